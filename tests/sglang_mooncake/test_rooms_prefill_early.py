# SPDX-License-Identifier: Apache-2.0
"""Prefill rooms: requests and aborts that come before their room, or after it."""

from __future__ import annotations

import pytest
from plain_plan import plan_of
from prefill_rooms import (
    CHUNK_TIMEOUT_S,
    TIMEOUT_S,
    Rooms,
    chunk,
    ended,
    opened,
    ready,
    request,
)

from sglang_mooncake.messages import REASON_CHARS_MAX, RoomAbort
from sglang_mooncake.rooms import early
from sglang_mooncake.rooms.early import EARLY_PEER_BYTES_MAX
from sglang_mooncake.rooms.prefill import (
    Aborted,
    ChunkSent,
    PeerLost,
    Requested,
    RoomAborted,
    Tell,
    Tick,
)
from sglang_mooncake.rooms.prefill_room import ABORT_GRACE_S
from sglang_mooncake.rooms.states import RoomState


def test_an_early_abort_of_one_rank_outlives_the_early_request_of_another():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(RoomAborted("b", RoomAbort(1, 0, "no link to its other source")), 0)
    rooms.handle(Requested("a", request(1, generation=9, destinations=2)), 0)
    room = opened(rooms)
    assert room.view.state is RoomState.OPEN, "the other rank may have asked again, on its way here"
    (tell, _) = rooms.handle(Tick(), ABORT_GRACE_S)
    assert room.view.state is RoomState.ABORTED
    assert isinstance(tell, Tell)
    assert (tell.peer, tell.message.generation) == ("a", 9)


def test_a_lost_peer_takes_its_early_request_along_and_leaves_that_of_others():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    for peer in "ab":
        rooms.handle(Requested(peer, request(1, destinations=2)), 0)
    rooms.handle(PeerLost("a", "gone"), 0)
    room = opened(rooms)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Requested("c", request(1, destinations=2)), 0)
    assert room.view.state is RoomState.READY


def test_a_room_whose_only_peer_was_lost_before_it_opened_does_not_wait_for_it():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("a", request(1)), 0)
    rooms.handle(PeerLost("a", "its process is gone"), 1)
    room = opened(rooms)
    rooms.handle(Tick(), 1 + ABORT_GRACE_S)
    assert room.view.state is RoomState.ABORTED
    assert room.view.reason is not None
    assert "its process is gone" in room.view.reason


def test_an_early_request_is_kept_for_its_room():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("a", request(1)), 0)
    assert opened(rooms).view.state is RoomState.READY


def test_an_early_request_is_refused_when_its_room_never_comes():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("a", request(1, generation=5)), 0)
    assert rooms.handle(Tick(), TIMEOUT_S - 0.1) == []
    (tell,) = rooms.handle(Tick(), TIMEOUT_S)
    assert isinstance(tell, Tell)
    assert (tell.peer, tell.message.room, tell.message.generation) == ("a", 1, 5)
    assert "no request with this room" in tell.message.reason
    assert tell.message.reason.endswith(f"within {TIMEOUT_S:.0f} s (bootstrap_s)")


def early_bytes(rooms: Rooms) -> int:
    return rooms._requests._early.nbytes


def test_what_one_peer_says_early_is_bounded_and_its_oldest_request_is_told():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    assert rooms.handle(Requested("b", request(1_000)), 0) == []
    pages = EARLY_PEER_BYTES_MAX // 4 // 4
    told = [rooms.handle(Requested("a", request(room, pages=pages)), 0) for room in range(5)]
    assert told[:3] == [[], [], []], "the fourth and its overhead are too much"
    for room, (tell,) in enumerate(told[3:]):
        assert isinstance(tell, Tell)
        assert (tell.peer, tell.message.room) == ("a", room)
        assert "more rooms, or name more pages" in tell.message.reason
    assert early_bytes(rooms) <= EARLY_PEER_BYTES_MAX + 5_000
    assert opened(rooms, 1_000).view.state is RoomState.READY, "nobody else gives way"


def test_what_all_peers_say_early_is_bounded_and_who_has_most_gives_way(monkeypatch):
    monkeypatch.setattr(early, "EARLY_BYTES_MAX", 10_000)
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("b", request(1, pages=0)), 0)
    for room in range(100, 200):
        rooms.handle(RoomAborted("a", RoomAbort(room, 1, "never was one")), 0)
    assert early_bytes(rooms) <= 10_000
    assert opened(rooms, 1).view.state is RoomState.READY


def test_aborts_of_unknown_rooms_with_long_reasons_take_little_memory():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    for room in range(300):
        rooms.handle(RoomAborted("a", RoomAbort(room, 1, "x" * 2_000_000)), 0)
    assert early_bytes(rooms) < 300 * 6_000
    assert sum(
        len(one.message.reason) for room in range(300) for one in rooms._requests._early.take(room)
    ) == (300 * REASON_CHARS_MAX)
    assert early_bytes(rooms) == 0


def test_an_early_abort_ends_the_room_unless_the_peer_asks_again():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    for room in (1, 2):
        rooms.handle(RoomAborted("a", RoomAbort(room, 4, "client gone")), 0)
    use, reused = opened(rooms, 1), opened(rooms, 2)
    rooms.handle(Requested("a", request(2, generation=5)), 1)
    assert reused.view.state is RoomState.READY
    rooms.handle(Tick(), ABORT_GRACE_S - 0.1)
    assert use.view.state is RoomState.OPEN
    rooms.handle(Tick(), ABORT_GRACE_S)
    assert use.view.state is RoomState.ABORTED
    assert "client gone" in (use.view.reason or "")
    assert reused.view.state is RoomState.READY


def test_an_abort_that_overtook_its_request_wins():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(RoomAborted("a", RoomAbort(1, 4, "client gone")), 0)
    rooms.handle(Requested("a", request(1, generation=4)), 0)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, generation=4)), 0)
    assert room.view.state is RoomState.ABORTED


def test_a_newer_request_outlives_an_older_abort():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(RoomAborted("a", RoomAbort(1, 4, "client gone")), 0)
    rooms.handle(Requested("a", request(1, generation=5)), 0)
    assert opened(rooms).view.state is RoomState.READY


@pytest.mark.parametrize("when", ["before the number is used again", "after"])
def test_a_late_abort_of_a_former_use_ends_no_later_one(when):
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    former = ready(rooms)
    rooms.handle(ChunkSent(former, chunk(2)), 0)
    rooms.handle(ended(rooms, former), 0)
    assert former.view.state is RoomState.DONE
    if when == "after":
        room = opened(rooms)
    rooms.handle(RoomAborted("a", RoomAbort(1, 1, "client gone")), 0)
    if when != "after":
        room = opened(rooms)
    rooms.handle(Tick(), TIMEOUT_S - 1)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Requested("a", request(1, generation=2)), TIMEOUT_S - 1)
    assert room.view.state is RoomState.READY


def test_an_abort_of_an_early_request_is_not_lost_on_a_room_in_use():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    ready(rooms)
    rooms.handle(Requested("a", request(1, generation=2)), 0)
    rooms.handle(RoomAborted("a", RoomAbort(1, 2, "client gone")), 0)
    again = opened(rooms)
    assert again.view.state is RoomState.OPEN
    rooms.handle(Tick(), ABORT_GRACE_S)
    assert again.view.state is RoomState.ABORTED


def test_a_request_that_comes_twice_opens_no_later_use_of_its_room_number():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    former = ready(rooms)
    rooms.handle(Aborted(former, "client gone"), 0)
    again = opened(rooms)
    assert rooms.handle(Requested("a", request(1)), 0) == []
    assert again.view.state is RoomState.OPEN


@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_that_will_never_ask_is_not_waited_for(is_early):
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    abort = RoomAborted("(no link)", RoomAbort(1, 0, "it has another secret", refused=True))
    if is_early:
        rooms.handle(abort, 0)
    room = opened(rooms)
    if not is_early:
        rooms.handle(abort, 0)
    assert room.view.state is RoomState.ABORTED
    assert "another secret" in (room.view.reason or "")


def test_a_room_that_another_rank_has_asked_for_does_not_end_at_such_a_word():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=2)), 0)
    rooms.handle(RoomAborted("b", RoomAbort(1, 0, "a stranger's word", refused=True)), 0)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Requested("b", request(1, destinations=2)), 0)
    assert room.view.state is RoomState.READY
