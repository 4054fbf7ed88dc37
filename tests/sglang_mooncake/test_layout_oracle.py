# SPDX-License-Identifier: Apache-2.0
"""Plans between random ranks of random models, against the oracle of `caches.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
from caches import (
    CANARY,
    Cache,
    Model,
    RankMemory,
    copy,
    fewest,
    models,
    pairings,
    place,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import te
from bootstrap_server import MismatchError, RankCoords, Topology
from bootstrap_server.ranks.matching import holding, sources
from sglang_mooncake.layout import Place, Plan, Units, layers_from

ITEMS = 6
Moved = dict[int | None, list[tuple[int, int]]]


def lists(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))


def blocks_of(plan: Plan, moved: Moved, borders: Iterable[int] = ()) -> te.Blocks:
    """`borders`: between groups of layers that go one after another."""
    states = [lists(moved[state]) for state in (0, 1)]
    starts = [0, *sorted(borders)]
    groups = [*map(range, starts, starts[1:]), layers_from(starts[-1])]
    parts = [plan.kv(*lists(moved[None]), layers) for layers in groups]
    assert sum(map(plan.layer_count, groups)) == plan.layer_count()
    return te.Blocks.concat([*parts, plan.state(*zip(*states, strict=True))])


@st.composite
def moves(draw: st.DrawFn) -> Moved:
    return {which: draw(pairings(ITEMS)) for which in (None, 0, 1)}


tp_sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@pytest.mark.slow
@given(tp_sizes, tp_sizes, st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]), moves(), st.data())
def test_every_byte_of_a_decode_rank_comes_from_exactly_one_prefill_rank(
    src_size, dst_size, stages, moved, data
):
    model = data.draw(models(src_size, dst_size))
    prefill, decode = Topology(1, 1, src_size, stages[0]), Topology(2, 1, dst_size, stages[1])
    coords = data.draw(st.sampled_from(list(decode.coords())))
    target = RankMemory(model, Place(decode, coords), ITEMS, full=False)
    times = np.zeros(target.base.size, np.int64)
    for asked in sources(prefill, decode, coords, 0):
        source = RankMemory(model, Place(prefill, asked.coords), ITEMS, full=True)
        plan = Plan(source.layout(address=1), target.layout(address=1), source.place, target.place)
        borders = data.draw(st.lists(st.integers(0, 8), max_size=3), label="borders of groups")
        blocks = blocks_of(plan, moved, borders)
        copy(blocks, source.base, target.base)
        for _, dst, nbytes in blocks.array.tolist():
            times[dst - 1 : dst - 1 + nbytes] += 1
    expected = target.expect(moved)
    np.testing.assert_array_equal(target.base, expected)
    np.testing.assert_array_equal(times, expected != CANARY)


@pytest.mark.slow
@given(tp_sizes, tp_sizes, moves(), st.data())
def test_blocks_are_as_few_as_can_be(src_size, dst_size, moved, data):
    model = data.draw(models(src_size, dst_size))
    source = RankMemory(
        model, place(src_size, data.draw(st.integers(0, src_size - 1))), ITEMS, full=True
    )
    target = RankMemory(
        model, place(dst_size, data.draw(st.integers(0, dst_size - 1))), ITEMS, full=False
    )
    plan = Plan(source.layout(address=1), target.layout(address=1), source.place, target.place)
    blocks = blocks_of(plan, moved)
    assert len(blocks) == fewest(blocks)
    assert plan.sends_kv or not len(plan.kv(*lists(moved[None])))


@pytest.mark.slow
@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32, 64, 128]),
    st.integers(0, 63),
    st.integers(0, 7),
)
@settings(max_examples=300)
def test_of_any_two_topologies_each_unit_is_sent_once(src_size, dst_size, units, rank, dp):
    """Up to 64 × 64 ranks; sizes that the units cannot be dealt out to are refused."""
    decode = place(dst_size, rank % dst_size, dp=dp, dps=8)
    cache = Cache("k", (0,), (Units(units, 3),), rows=2)
    model = Model((cache,), layers=1)
    try:
        held = holding(units, dst_size, decode.coords.tp)
        holding(units, src_size, 0)
    except MismatchError:
        return
    target = RankMemory(model, decode, 1, full=False)
    sent = []
    for tp in range(src_size):
        source = RankMemory(model, place(src_size, tp), 1, full=False)
        plan = Plan(source.layout(address=1), target.layout(address=1), source.place, decode)
        sent += [
            dst + b for _, dst, n in plan.kv(np.array([0]), np.array([0])).array for b in range(n)
        ]
    first = target.layout(address=1).components[0].buffers.addresses[0]
    assert sorted(sent) == list(range(first, first + 2 * 3 * len(held)))


@pytest.mark.parametrize("dst_size", [1, 2, 4, 16])
def test_replicas_share_the_sending(dst_size):
    """MLA: every prefill rank has the whole latent; decode DP ranks take it from all in turn."""
    model = Model((Cache("latent", (0,), (Units(1, 8),)),), layers=1)
    loads = [0] * 4
    for dp, tp in itertools.product(range(8), range(dst_size)):
        target = RankMemory(model, place(dst_size, tp, dp=dp, dps=8), 1, full=False)
        for at in range(4):
            source = RankMemory(model, place(4, at), 1, full=False)
            plan = Plan(source.layout(), target.layout(), source.place, target.place)
            loads[at] += plan.sends_kv
    assert sum(loads) == 8 * dst_size
    assert max(loads) - min(loads) <= math.ceil(sum(loads) / 4) - sum(loads) // 4


def test_pipeline_stages_send_their_layers():
    model = Model((Cache("k", tuple(range(5)), (Units(2, 4),)),), layers=5)
    target = RankMemory(model, place(1, 0), 2, full=False)
    for stage, layers in ((0, 2), (1, 3)):
        source = RankMemory(model, place(1, 0, 2, stage), 2, full=True)
        plan = Plan(source.layout(), target.layout(), source.place, target.place)
        assert len(plan.kv(np.array([0]), np.array([1]))) == layers


def test_the_place_of_a_rank_must_lie_in_its_topology():
    with pytest.raises(ValueError, match="tp"):
        Place(Topology(1, 1, 2, 1), RankCoords(0, 0, 2, 0))
