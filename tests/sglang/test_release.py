# SPDX-License-Identifier: Apache-2.0
"""`deregister_buffer_to_engine` and its opposite while rooms are under way. SGLang calls them on an
idle server; what a peer, an abort or a bug leaves under way must not land all the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from handover import CANARY, Handover, Pool, handover, until

from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


class Manager:
    """The two methods of the manager for a rank whose memory it registers."""

    def __init__(self, rank, memory: Pool, role: str) -> None:
        from sglang_mooncake.sglang.manager import KVManager

        self._manager_class = KVManager
        for region in list(rank.engine._memory.regions):
            if (region.address, region.nbytes) in memory.ranges():
                rank.engine.deregister(region)
        ranges = memory.ranges()
        empty: list[int] = []
        self._state = SimpleNamespace(
            engine=rank.engine,
            config=Config(),
            context=SimpleNamespace(role=role),
            kv_args=SimpleNamespace(
                kv_data_ptrs=[address for address, _ in ranges],
                kv_data_lens=[nbytes for _, nbytes in ranges],
                aux_data_ptrs=empty, aux_data_lens=empty,
                state_data_ptrs=[], state_data_lens=[],
            ),
            _regions=[],
        )  # fmt: skip
        self.resume()

    def release(self) -> None:
        self._manager_class.deregister_buffer_to_engine(self._state)

    def resume(self) -> None:
        self._manager_class.register_buffer_to_engine(self._state)


@pytest.fixture
def pair() -> Iterator[Handover]:
    with handover() as made:
        made.decode.know(made.address)
        made.complete(1, [1, 2], [3, 4], aux=0)
        yield made


def same(pair: Handover, sources: list[int], targets: list[int]) -> bool:
    return np.array_equal(pair.source.kv[:, sources], pair.target.kv[:, targets])


def test_what_is_sent_to_a_decode_rank_that_gave_its_memory_back_does_not_land(pair):
    manager = Manager(pair.decode, pair.target, "decode")
    source, target = pair.open_both(2)
    pair.name_pages(target, [7, 9], aux=1)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    peers = list(pair.prefill.engine.stats().peer_transports)
    manager.release()
    pair.prefill.send(source, [5, 6], 0, 1)
    until(lambda: source.view.over and target.view.over, "both sides have given the room up")
    assert {source.view.state, target.view.state} <= {RoomState.FAILED, RoomState.ABORTED}
    assert (pair.target.kv[:, [7, 9]] == CANARY).all()
    manager.resume()
    pair.complete(3, [5, 6], [7, 9], aux=2)
    assert same(pair, [5, 6], [7, 9])
    assert list(pair.prefill.engine.stats().peer_transports) == peers


def test_a_prefill_rank_waits_for_what_still_reads_its_memory(pair):
    manager = Manager(pair.prefill, pair.source, "prefill")
    source, target = pair.open_both(2)
    pair.name_pages(target, list(range(10, 60)), aux=1)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, list(range(10, 60)), 0, 1)
    until(lambda: source.view.state is not RoomState.READY, "the chunk was taken up")
    manager.release()
    # Its transfer had begun and was waited for, or was refused.
    until(lambda: pair.decode.side.has_arrived(target) or target.view.over, "the room has ended")
    if pair.decode.side.has_arrived(target):
        assert same(pair, list(range(10, 60)), list(range(10, 60)))
    manager.resume()
    pair.complete(3, [1, 2], [3, 4], aux=2)
    assert same(pair, [1, 2], [3, 4])


def test_it_can_be_done_again_and_again(pair):
    managers = [
        Manager(pair.decode, pair.target, "decode"),
        Manager(pair.prefill, pair.source, "prefill"),
    ]
    for room in range(2, 6):
        for manager in managers:
            manager.release()
            manager.release()  # nothing is left to take back
        for manager in managers:
            manager.resume()
        pair.complete(room, [room, room + 1], [10 * room, 10 * room + 1], aux=0)
        assert same(pair, [room, room + 1], [10 * room, 10 * room + 1])
