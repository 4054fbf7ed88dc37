# SPDX-License-Identifier: Apache-2.0
"""Engines that keep nothing of a request beside its KV cache hand pages over alone."""

from __future__ import annotations

import msgspec
import numpy as np
from handover import CANARY, Pool, handover, until

from sglang_mooncake.layout import COMPLETION_BYTES, Buffers, Layout
from sglang_mooncake.rooms.states import RoomState


class Bare(Pool):
    """KV memory alone."""

    def ranges(self) -> list[tuple[int, int]]:
        return super().ranges()[:1]

    def layout(self, completions: Buffers) -> Layout:
        return msgspec.structs.replace(super().layout(completions), aux=Buffers((), (), ()))


def test_pages_arrive_and_nothing_else() -> None:
    with handover(source=Bare(seed=1), target=Bare()) as pair:
        pair.decode.know(pair.address)
        source, target = pair.open_both(1)
        pair.name_pages(target, [5, 6], aux=0)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        pair.prefill.send(source, [1, 2], 0, aux_slot=0)
        until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
        moved = pair.source.kv[:, [1, 2]]
        expected = np.full_like(pair.target.kv, CANARY)
        expected[:, [5, 6]] = moved
        np.testing.assert_array_equal(pair.target.kv, expected)
        pair.decode.side.arrived(target)
        until(lambda: target.view.safe, "the room is over")
        assert target.view.landed_nbytes == moved.nbytes + COMPLETION_BYTES


def test_beside_an_engine_with_metadata_both_values_are_named() -> None:
    with handover(source=Bare(seed=1), target=Pool()) as pair:
        pair.decode.know(pair.address)
        target = pair.decode.side.new_room(1)
        pair.decode.side.choose_sources(target, pair.address, 0)
        until(lambda: target.view.over, "the room has failed")
        assert "the prefill server has none, the decode server has 64" in (target.view.reason or "")
