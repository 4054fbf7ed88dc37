# SPDX-License-Identifier: Apache-2.0
"""What pipeline stage 0 learns of the rooms of the other stages, over SGLang's own store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from sglang_mooncake.rooms.room import Room

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

ROOM = 1 << 62
WAIT_S = 60.0


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.fixture
def boards(monkeypatch) -> Iterator[list]:
    """The boards of two stages; the group that joins them hands one object from stage 0 to 1."""
    from sglang_mooncake.sglang import seam

    passed: list[object] = []

    def broadcast_object(value: object, src: int) -> object:
        passed.append(value)
        return passed[0]

    made = []
    for rank in range(2):
        group = SimpleNamespace(broadcast_object=broadcast_object)
        parallel = SimpleNamespace(pp_size=2, pp_rank=rank, pp_group=group)
        monkeypatch.setattr(seam, "get_parallel", lambda parallel=parallel: parallel)
        made.append(seam.StageBoard())
    yield made
    for board in reversed(made):
        board.close()


def test_stage_0_waits_for_the_other_stage_and_learns_of_its_failure(boards):
    from sglang_mooncake.sglang.seam import KVPoll

    first, second = boards
    ready = KVPoll.WaitingForInput
    assert first.consensus(ROOM, ready) == KVPoll.Bootstrapping
    room = Room(ROOM, 0.0)
    second.ready(room)
    until(lambda: first.consensus(ROOM, ready) == ready)
    assert first.consensus(ROOM, KVPoll.Bootstrapping) == KVPoll.Bootstrapping
    second.failed(room)
    until(lambda: first.consensus(ROOM, ready) == KVPoll.Failed)
    second.forget(room)
    until(lambda: first.consensus(ROOM, ready) == KVPoll.Bootstrapping)


def test_a_newer_use_of_a_room_number_outlives_the_words_of_the_former(boards):
    from sglang_mooncake.sglang.seam import KVPoll

    first, second = boards
    former, newer = Room(ROOM, 0.0), Room(ROOM, 1.0)
    second.ready(newer)
    second.failed(former)
    second.forget(former)
    marker = Room(ROOM + 1, 1.0)
    second.ready(marker)  # in order: when this has come, so has everything before it
    until(lambda: first.consensus(ROOM + 1, KVPoll.WaitingForInput) == KVPoll.WaitingForInput)
    assert first.consensus(ROOM, KVPoll.WaitingForInput) == KVPoll.WaitingForInput


def test_rooms_that_fail_and_are_never_closed_take_bounded_memory(boards, monkeypatch):
    """SGLang lets go of a request that is aborted while it waits, and closes no room."""
    from sglang_mooncake.sglang import seam
    from sglang_mooncake.sglang.seam import KVPoll

    monkeypatch.setattr(seam, "FAILED_ROOMS_MAX", 2)
    first, second = boards
    rooms = [Room(ROOM + i, 0.0) for i in range(4)]
    for room in rooms[:3]:
        second.failed(room)
    second.forget(rooms[1])
    second.failed(rooms[3])
    found = [KVPoll.Bootstrapping, KVPoll.Bootstrapping, KVPoll.Failed, KVPoll.Failed]
    until(lambda: [first.consensus(one.number, KVPoll.Success) for one in rooms] == found)


@pytest.mark.parametrize(("tp", "pp", "asks"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_one_rank_of_all_stages_has_a_retracted_request_computed_again(tp, pp, asks):
    from bootstrap_server import RankCoords
    from sglang_mooncake.sglang.manager import KVManager

    failures: list[str] = []
    rank = SimpleNamespace(
        context=SimpleNamespace(coords=RankCoords(0, 0, tp, pp)), prefill_info_table={}
    )
    receiver = SimpleNamespace(bootstrap_addr="127.0.0.1:9", fail=failures.append)
    KVManager.submit_prefill_recompute(rank, receiver, {})
    # The one that asks finds that it does not know whom, and says so.
    assert ["127.0.0.1:9" in failure for failure in failures] == [True] * asks


def test_recomputing_takes_none_of_the_threads_for_queries_of_dp_ranks():
    """Each of those requests takes as long as a prefill: up to minutes (finding B13)."""
    import socket
    import threading

    from bootstrap_server import RankCoords
    from sglang_mooncake.sglang.manager import KVManager

    with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:
        port = silent.getsockname()[1]
        info = SimpleNamespace(prefill_http_port=port)
        rank = SimpleNamespace(
            context=SimpleNamespace(
                coords=RankCoords(0, 0, 0, 0),
                deadlines=SimpleNamespace(waiting_s=60.0),
                names=SimpleNamespace(waiting="waiting_s"),
            ),
            prefill_info_table={"127.0.0.1:9": info},
            _queries=None,
            _recompute=None,
        )
        receiver = SimpleNamespace(
            bootstrap_addr="127.0.0.1:9", ended=False, fail=lambda reason: None
        )
        for _ in range(64):
            KVManager.submit_prefill_recompute(rank, receiver, {})
        queries = KVManager._ensure_prefill_recompute_executor(rank)
        assert queries.submit(threading.get_ident).result(timeout=45)  # a request takes 60 s
        rank._recompute.close()
        queries.shutdown()
