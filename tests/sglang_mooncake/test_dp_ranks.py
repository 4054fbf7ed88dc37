# SPDX-License-Identifier: Apache-2.0
"""Telling the registry which DP rank has a room, while the registry answers, and while it does
not."""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import closing

from handover import NEVER_S, WAIT_S, handover, until

from bootstrap_server import BootstrapClient, BootstrapError
from sglang_mooncake import dp_ranks
from sglang_mooncake.dp_ranks import DpRankNotices
from sglang_mooncake.rooms.room import Room, RoomView
from sglang_mooncake.rooms.states import RoomState


def test_rooms_that_have_ended_before_their_turn_are_left_out():
    free, told = threading.Event(), queue.Queue()

    def register(room: int) -> None:
        told.put(room)
        assert free.wait(60)

    with closing(DpRankNotices(register, lambda use, reason: None)) as notices:
        for room in range(dp_ranks.THREADS):
            notices.tell(Room(room, 0.0))
        until(lambda: told.qsize() == dp_ranks.THREADS, "all threads are taken")
        over, ending = Room(101, 0.0), Room(102, 0.0)
        for use in (over, ending, Room(103, 0.0)):
            notices.tell(use)
        over.view, ending.view = RoomView(RoomState.ABORTED), RoomView(RoomState.ENDING)
        free.set()
        until(lambda: told.qsize() == dp_ranks.THREADS + 1, "the others are told")
    assert list(told.queue)[-1] == 103


def test_a_room_too_many_fails_at_once(monkeypatch):
    monkeypatch.setattr(dp_ranks, "ROOMS_MAX", dp_ranks.THREADS)
    free, failed = threading.Event(), []

    def register(room: int) -> None:
        assert free.wait(60)

    last = Room(9, 0.0)
    with closing(DpRankNotices(register, lambda *failure: failed.append(failure))) as notices:
        for room in range(dp_ranks.THREADS):
            notices.tell(Room(room, 0.0))
        notices.tell(last)
        free.set()
    ((use, reason),) = failed
    assert use is last
    assert reason.endswith(f"{dp_ranks.THREADS} rooms wait for that already")


def test_a_refusal_ends_its_room_with_the_time_it_has_waited():
    free, failed, now_s = threading.Event(), queue.Queue(), [0.0]
    problems = [BootstrapError("no such rank"), OSError("a bug")]

    def register(room: int) -> None:
        assert free.wait(60)
        if room >= 100:
            raise problems[room - 100]

    def note(use: Room, reason: str) -> None:
        failed.put((use.number, reason))

    with closing(DpRankNotices(register, note)) as notices:
        notices._workers._clock = lambda: now_s[0]
        for room in (*range(dp_ranks.THREADS), 100, 101):
            notices.tell(Room(room, 0.0))
        now_s[0] = 3.0
        free.set()
        reasons = dict(failed.get(timeout=WAIT_S) for _ in problems)
    start = "cannot tell the bootstrap server which DP rank has the room"
    assert reasons == {
        100: f"{start} (after 3.0 s behind other rooms): no such rank",
        101: f"{start} (after 3.0 s behind other rooms): internal error: OSError('a bug')",
    }


def test_a_registry_that_answers_nobody_does_not_hold_up_data_paths(monkeypatch):
    """Rooms wait for it in threads of their own; a decode rank's hello has others."""
    with handover() as pair:
        notices = pair.prefill.side._dp_ranks
        with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:

            def register(room: int) -> None:
                address = f"127.0.0.1:{silent.getsockname()[1]}"
                with BootstrapClient(address, timeout_s=NEVER_S) as client:
                    client.register_dp_rank(room, 0)

            monkeypatch.setattr(notices, "_register", register)
            uses = [pair.prefill.side.open_room(room, register_dp_rank=True) for room in range(64)]
            pair.decode.know(pair.address)
            pair.complete(1_000, [0, 1], [2, 3], aux=0)
            assert len(notices._workers) > len(uses) // 2, "they wait still"
            for use in uses:
                pair.prefill.side.abort(use, "the client left")
            until(lambda: all(use.view.over for use in uses), "all of them end")
        until(lambda: len(notices._workers) == 0, "those that are over are not asked for")
