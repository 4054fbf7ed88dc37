# SPDX-License-Identifier: Apache-2.0
"""Whom a decode rank asks agrees with what those ranks then plan to send."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bootstrap_server import InstanceConfig, KVFormat, MismatchError, RankCoords, Topology
from sglang_mooncake.layout import Buffers, Component, Layout, Place, Plan, Units
from sglang_mooncake.sources import sources_of

LAYERS = 4
sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
shapes = st.builds(Topology, st.integers(1, 3), st.integers(1, 3), sizes, st.sampled_from([1, 2]))


def layout(place: Place, heads: int, channels: int) -> Layout:
    """K and a state of one buffer per layer of this stage, at addresses that nobody reads.

    Raises:
        MismatchError: so many heads or channels cannot be dealt out.
    """
    stage, stages = place.stage
    layers = tuple(range(LAYERS))[stage::stages]
    made = []
    for kind, units, state in (("k", heads, None), ("conv", channels, 0)):
        cuts = (Units(units, 8),)
        component = Component(kind, (), Buffers((), (), ()), cuts, state=state)
        item = component.held_nbytes(place.topology.tp_size, place.coords.tp)
        buffers = Buffers(*((value,) * len(layers) for value in (1 << 40, item, 100 * item)))
        made.append(Component(kind, layers, buffers, cuts, state=state))
    aux = Buffers((1 << 50,), (8,), (80,))
    return Layout(1, "float32", None, tuple(made), aux, Buffers((), (), ()), states=("conv",))


@pytest.mark.slow
@given(shapes, shapes, st.sampled_from([1, 2, 4, 6]), st.sampled_from([1, 4, 8]), st.booleans())
def test_who_is_said_to_send_has_something_to_send(prefill, decode, heads, channels, all_cp_ranks):
    decode = Topology(decode.dp_size, 1, decode.tp_size, min(decode.pp_size, prefill.pp_size))
    config = InstanceConfig(prefill, KVFormat(1, "float32"))
    asked: Counter[tuple[RankCoords, int]] = Counter()
    destinations: dict[RankCoords, int] = {}
    for coords in decode.coords():
        place = Place(decode, coords)
        try:
            mine = layout(place, heads, channels)
            found = sources_of(config, 0, place, mine, all_cp_ranks)
            theirs = [layout(Place(prefill, s.coords), heads, channels) for s, _ in found]
        except MismatchError:
            assume(False)
        assert sum(source.aux for source, _ in found) == 1
        for (source, sends), source_layout in zip(found, theirs, strict=True):
            plan = Plan(source_layout, mine, Place(prefill, source.coords), place)
            kv = plan.sends_kv and source.pages.of > 0
            assert sends == (source.aux or kv or (plan.sends_state and source.state))
            asked[source.coords, coords.dp] += 1
            destinations[source.coords] = source.destinations
    group = [coords for coords in prefill.coords() if coords.dp == 0]
    for decode_dp in range(decode.dp_size):
        for coords in group:
            assert asked[coords, decode_dp] == destinations[coords] >= 1, "asked, and so often"
