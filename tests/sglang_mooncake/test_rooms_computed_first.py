# SPDX-License-Identifier: Apache-2.0
"""The allocation policy prefill_complete: decode ranks name pages once the prompt is computed."""

from __future__ import annotations

import numpy as np
import pytest
from counted_tags import CountedTags
from handover import Pool, handover, until
from plain_plan import plan_of
from prefill_rooms import CHUNK_TIMEOUT_S, TIMEOUT_S, Rooms, chunk, opened, request

from sglang_mooncake.context import PREFILL_COMPLETE
from sglang_mooncake.messages import RoomAbort, RoomComputed, RoomFailed, RoomWait
from sglang_mooncake.rooms import decode, prefill, prefill_room
from sglang_mooncake.rooms.events import Aborted, Opened, Tick
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

WAIT = RoomWait(1, 7)
COMPUTED = [prefill.Tell("a", RoomComputed(1, 7))]


@pytest.fixture
def rooms() -> Rooms:
    return Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S, computed_first=True)


def test_a_decode_rank_that_waits_is_told_once_the_prompt_is_computed(rooms):
    room = opened(rooms)
    assert rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0) == []
    assert rooms.handle(prefill.Computed(room), 0) == COMPUTED
    assert rooms.handle(prefill.Computed(room), 0) == [], "once"
    assert room.view.state is RoomState.OPEN
    rooms.handle(prefill.Requested("a", request(1, generation=7)), 0)
    assert room.view.state is RoomState.READY
    (write,) = rooms.handle(prefill.ChunkSent(room, chunk(2)), 0)
    assert isinstance(write, prefill.Write)
    assert rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0) == [], "a repetition"


def test_one_that_comes_after_that_is_told_at_once(rooms):
    room = opened(rooms)
    assert rooms.handle(prefill.Computed(room), 0) == []
    assert rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0) == COMPUTED


def test_one_that_comes_before_the_room_is_opened_is_kept(rooms):
    assert rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0) == []
    room = opened(rooms)
    assert rooms.handle(prefill.Computed(room), 0) == COMPUTED


def test_one_whose_room_never_opens_is_told_so(rooms):
    rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    (tell,) = rooms.handle(Tick(), TIMEOUT_S)
    assert isinstance(tell.message, RoomFailed)
    assert (tell.peer, tell.message.generation) == ("a", 7)


def test_one_that_comes_too_late_is_told_why(rooms):
    room = opened(rooms)
    rooms.handle(Aborted(room, "the client went away"), 0)
    (tell,) = rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    assert "the client went away" in tell.message.reason


def test_those_who_wait_are_told_of_a_bad_end(rooms):
    room = opened(rooms)
    rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    tell, _ = rooms.handle(Aborted(room, "the client went away"), 0)
    assert (tell.peer, tell.message.generation) == ("a", 7)


def test_one_that_gives_up_ends_the_room_at_once(rooms):
    room = opened(rooms)
    rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    assert rooms.handle(prefill.RoomAborted("a", RoomAbort(1, 7, "gone")), 0) == [
        prefill.Over(room)
    ]
    assert room.view.state is RoomState.ABORTED


def test_an_abort_that_was_faster_than_its_wait_ends_the_room(rooms):
    room = opened(rooms)
    rooms.handle(prefill.RoomAborted("a", RoomAbort(1, 7, "gone")), 0)
    rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    assert room.view.state is RoomState.ABORTED


def test_the_abort_of_a_former_use_does_not(rooms):
    room = opened(rooms)
    rooms.handle(prefill.RoomAborted("a", RoomAbort(1, 0, "gone")), 0)
    rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    rooms.handle(Tick(), prefill_room.ABORT_GRACE_S)
    assert room.view.state is RoomState.OPEN


def test_one_that_is_lost_ends_the_room(rooms):
    room = opened(rooms)
    rooms.handle(prefill.WaitsForPrompt("a", WAIT), 0)
    rooms.handle(prefill.PeerLost("a", "lost a"), 0)
    assert (room.view.state, room.view.reason) == (RoomState.FAILED, "lost a")


def test_the_clock_starts_with_the_computed_prompt(rooms):
    room = opened(rooms)
    assert rooms.handle(Tick(), 100 * TIMEOUT_S) == []
    rooms.handle(prefill.Computed(room), 100 * TIMEOUT_S)
    rooms.handle(Tick(), 100 * TIMEOUT_S)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Tick(), 101 * TIMEOUT_S)
    assert room.view.state is RoomState.TIMED_OUT


# --- decode ---

P0, P1 = decode.RoomSource("p0"), decode.RoomSource("p1", aux=False)


def linked(*sources: decode.RoomSource) -> tuple[decode.DecodeRooms, Room, list]:
    deadlines = decode.DecodeDeadlines(bootstrap_s=10.0, waiting_s=20.0)
    rooms = decode.DecodeRooms(deadlines, 4, 100, CountedTags(200), computed_first=True)
    room = Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(decode.SourcesChosen(room, sources), 0)
    said = [one for source in sources for one in rooms.handle(decode.LinkUp(source.link), 0)]
    return rooms, room, said


def test_a_room_is_ready_once_every_source_has_computed():
    rooms, room, said = linked(P0, P1)
    assert said == [decode.Tell(link, RoomWait(1, 100)) for link in ("p0", "p1")]
    assert room.view.state is RoomState.COMPUTING
    rooms.handle(decode.PeerComputed("p0", RoomComputed(1, 100)), 0)
    rooms.handle(decode.PeerComputed("p1", RoomComputed(1, 99)), 0)
    assert room.view.state is RoomState.COMPUTING, "that was a former use of the number"
    rooms.handle(decode.PeerComputed("p1", RoomComputed(1, 100)), 0)
    assert room.view.state is RoomState.READY
    named = decode.PagesNamed(room, np.array([4, 5]), 2, 8)
    asked = [i.message for i in rooms.handle(named, 0) if isinstance(i, decode.Tell)]
    assert [message.generation for message in asked] == [100, 100]


def test_a_prompt_that_is_not_computed_ends_in_a_sentence_that_names_the_rank_and_the_setting():
    rooms, room, _ = linked(P0, P1)
    rooms.handle(decode.PeerComputed("p0", RoomComputed(1, 100)), 0)
    rooms.handle(decode.Tick(), 19.9)
    assert room.view.state is RoomState.COMPUTING
    rooms.handle(decode.Tick(), 20.0)
    assert room.view.state is RoomState.TIMED_OUT
    assert room.view.reason == "room 1: p1 did not compute the prompt within 20 s (waiting_s)"


def test_pages_that_are_named_too_early_are_asked_for_once_the_prompt_is_computed():
    rooms, room, _ = linked(P0, P1)
    assert rooms.handle(decode.PagesNamed(room, np.array([4, 5]), 2, 8), 0) == []
    rooms.handle(decode.PeerComputed("p0", RoomComputed(1, 100)), 0)
    instructions = rooms.handle(decode.PeerComputed("p1", RoomComputed(1, 100)), 0)
    assert len([one for one in instructions if isinstance(one, decode.Tell)]) == 2
    assert room.view.state is RoomState.REQUESTED


def test_a_prompt_that_is_never_computed_ends_the_room():
    rooms, room, _ = linked(P0)
    tell, _ = rooms.handle(Tick(), 20.0)
    assert tell == decode.Tell("p0", RoomAbort(1, 100, room.view.reason))
    assert room.view.state is RoomState.TIMED_OUT
    assert "compute the prompt within 20 s" in room.view.reason


def test_a_wait_that_cannot_be_said_ends_the_room():
    rooms, room, (tell,) = linked(P0)
    failed = decode.after_failure(tell, OSError("no memory"))
    rooms.handle(failed, 0)
    assert room.view.state is RoomState.FAILED
    assert "no memory" in room.view.reason


def test_between_ranks_pages_are_named_after_the_prompt_is_computed():
    with handover(policy=PREFILL_COMPLETE) as pair:
        pair.decode.know(pair.address)
        target = pair.decode.side.new_room(1)
        pair.decode.side.choose_sources(target, pair.address, 0)
        until(lambda: target.view.state is RoomState.COMPUTING, "it waits for the prompt")
        source = pair.prefill.side.open_room(1, register_dp_rank=False)
        pair.prefill.side.computed(source)
        pair.prefill.side.polled(source, sent=False)
        until(lambda: target.view.state is RoomState.READY, "it knows that the prompt is computed")
        pair.name_pages(target, [3, 4], 0)
        until(lambda: source.view.state is RoomState.READY, "it was asked")
        pair.prefill.send(source, [1, 2], 0, 5)
        until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
        assert isinstance(pair.source, Pool)
        assert isinstance(pair.target, Pool)
        assert (pair.target.kv[:, [3, 4]] == pair.source.kv[:, [1, 2]]).all()


def test_a_prefill_rank_that_has_forgotten_us_is_asked_for_a_link_again():
    """A wait over a link whose data path is gone: the room fails, and the next one is linked."""
    with handover(policy=PREFILL_COMPLETE) as pair:
        pair.decode.know(pair.address)
        first = pair.decode.side.new_room(1)
        pair.decode.side.choose_sources(first, pair.address, 0)
        until(
            lambda: pair.prefill.side._rooms._requests._early.nbytes,
            "the prefill rank knows that it waits",
        )
        for destination in pair.prefill.side._links._destinations:
            pair.prefill.side._links._destinations.remove(destination.key)
        second = pair.decode.side.new_room(2)
        pair.decode.side.choose_sources(second, pair.address, 0)
        until(lambda: first.view.over and second.view.over, "both rooms were told")
        third = pair.decode.side.new_room(3)
        pair.decode.side.choose_sources(third, pair.address, 0)
        until(lambda: third.view.state is RoomState.COMPUTING, "the link stands again")
