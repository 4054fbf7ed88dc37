# SPDX-License-Identifier: Apache-2.0
"""The allocation policy prefill_complete: decode ranks name pages once the prompt is computed."""

from __future__ import annotations

import numpy as np
import pytest
from counted_tags import CountedTags
from handover import Pool, handover, until
from plain_plan import plan_of
from prefill_rooms import CHUNK_TIMEOUT_S, TIMEOUT_S, chunk, opened, request

from sglang_mooncake.context import PREFILL_COMPLETE
from sglang_mooncake.messages import RoomAbort, RoomComputed, RoomFailed, RoomWait
from sglang_mooncake.rooms import decode, prefill, prefill_room
from sglang_mooncake.rooms.events import Aborted, Opened, Tick
from sglang_mooncake.rooms.states import RoomState, RoomView

WAIT = RoomWait(1, 7)
COMPUTED = [prefill.Tell("a", RoomComputed(1, 7))]


@pytest.fixture
def rooms() -> prefill.PrefillRooms:
    return prefill.PrefillRooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S, computed_first=True)


def test_a_decode_rank_that_waits_is_told_once_the_prompt_is_computed(rooms):
    view = opened(rooms)
    assert rooms.handle(prefill.Awaited("a", WAIT), 0) == []
    assert rooms.handle(prefill.Computed(view), 0) == COMPUTED
    assert rooms.handle(prefill.Computed(view), 0) == [], "once"
    assert view.state is RoomState.OPEN
    rooms.handle(prefill.Requested("a", request(1, generation=7)), 0)
    assert view.state is RoomState.READY
    (write,) = rooms.handle(prefill.ChunkSent(view, chunk(2)), 0)
    assert isinstance(write, prefill.Write)
    assert rooms.handle(prefill.Awaited("a", WAIT), 0) == [], "a repetition"


def test_one_that_comes_after_that_is_told_at_once(rooms):
    view = opened(rooms)
    assert rooms.handle(prefill.Computed(view), 0) == []
    assert rooms.handle(prefill.Awaited("a", WAIT), 0) == COMPUTED


def test_one_that_comes_before_the_room_is_opened_is_kept(rooms):
    assert rooms.handle(prefill.Awaited("a", WAIT), 0) == []
    view = opened(rooms)
    assert rooms.handle(prefill.Computed(view), 0) == COMPUTED


def test_one_whose_room_never_opens_is_told_so(rooms):
    rooms.handle(prefill.Awaited("a", WAIT), 0)
    (tell,) = rooms.handle(Tick(), TIMEOUT_S)
    assert isinstance(tell.message, RoomFailed)
    assert (tell.peer, tell.message.generation) == ("a", 7)


def test_one_that_comes_too_late_is_told_why(rooms):
    view = opened(rooms)
    rooms.handle(Aborted(view, "the client went away"), 0)
    (tell,) = rooms.handle(prefill.Awaited("a", WAIT), 0)
    assert "the client went away" in tell.message.reason


def test_those_who_wait_are_told_of_a_bad_end(rooms):
    view = opened(rooms)
    rooms.handle(prefill.Awaited("a", WAIT), 0)
    tell, _ = rooms.handle(Aborted(view, "the client went away"), 0)
    assert (tell.peer, tell.message.generation) == ("a", 7)


def test_one_that_gives_up_ends_the_room_at_once(rooms):
    view = opened(rooms)
    rooms.handle(prefill.Awaited("a", WAIT), 0)
    assert rooms.handle(prefill.RoomAborted("a", RoomAbort(1, 7, "gone")), 0) == [
        prefill.Over(view)
    ]
    assert view.state is RoomState.ABORTED


def test_an_abort_that_was_faster_than_its_wait_ends_the_room(rooms):
    view = opened(rooms)
    rooms.handle(prefill.RoomAborted("a", RoomAbort(1, 7, "gone")), 0)
    rooms.handle(prefill.Awaited("a", WAIT), 0)
    assert view.state is RoomState.ABORTED


def test_the_abort_of_a_former_use_does_not(rooms):
    view = opened(rooms)
    rooms.handle(prefill.RoomAborted("a", RoomAbort(1, 0, "gone")), 0)
    rooms.handle(prefill.Awaited("a", WAIT), 0)
    rooms.handle(Tick(), prefill_room.ABORT_GRACE_S)
    assert view.state is RoomState.OPEN


def test_one_that_is_lost_ends_the_room(rooms):
    view = opened(rooms)
    rooms.handle(prefill.Awaited("a", WAIT), 0)
    rooms.handle(prefill.PeerLost("a", "lost a"), 0)
    assert (view.state, view.reason) == (RoomState.FAILED, "lost a")


def test_the_clock_starts_with_the_computed_prompt(rooms):
    view = opened(rooms)
    assert rooms.handle(Tick(), 100 * TIMEOUT_S) == []
    rooms.handle(prefill.Computed(view), 100 * TIMEOUT_S)
    rooms.handle(Tick(), 100 * TIMEOUT_S)
    assert view.state is RoomState.OPEN
    rooms.handle(Tick(), 101 * TIMEOUT_S)
    assert view.state is RoomState.TIMED_OUT


# --- decode ---

P0, P1 = decode.RoomSource("p0"), decode.RoomSource("p1", aux=False)


def linked(*sources: decode.RoomSource) -> tuple[decode.DecodeRooms, RoomView, list]:
    deadlines = decode.DecodeDeadlines(bootstrap_s=10.0, waiting_s=20.0)
    rooms = decode.DecodeRooms(deadlines, 4, 100, CountedTags(200), computed_first=True)
    view = RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    rooms.handle(decode.SourcesChosen(view, sources), 0)
    said = [one for source in sources for one in rooms.handle(decode.LinkUp(source.link), 0)]
    return rooms, view, said


def test_a_room_is_ready_once_every_source_has_computed():
    rooms, view, said = linked(P0, P1)
    assert said == [decode.Tell(link, RoomWait(1, 100)) for link in ("p0", "p1")]
    assert view.state is RoomState.COMPUTING
    rooms.handle(decode.PeerComputed("p0", RoomComputed(1, 100)), 0)
    rooms.handle(decode.PeerComputed("p1", RoomComputed(1, 99)), 0)
    assert view.state is RoomState.COMPUTING, "that was a former use of the number"
    rooms.handle(decode.PeerComputed("p1", RoomComputed(1, 100)), 0)
    assert view.state is RoomState.READY
    named = decode.PagesNamed(view, np.array([4, 5]), 2, 8)
    asked = [i.message for i in rooms.handle(named, 0) if isinstance(i, decode.Tell)]
    assert [message.generation for message in asked] == [100, 100]


def test_pages_that_are_named_too_early_are_asked_for_once_the_prompt_is_computed():
    rooms, view, _ = linked(P0, P1)
    assert rooms.handle(decode.PagesNamed(view, np.array([4, 5]), 2, 8), 0) == []
    rooms.handle(decode.PeerComputed("p0", RoomComputed(1, 100)), 0)
    instructions = rooms.handle(decode.PeerComputed("p1", RoomComputed(1, 100)), 0)
    assert len([one for one in instructions if isinstance(one, decode.Tell)]) == 2
    assert view.state is RoomState.REQUESTED


def test_a_prompt_that_is_never_computed_ends_the_room():
    rooms, view, _ = linked(P0)
    tell, _ = rooms.handle(Tick(), 20.0)
    assert tell == decode.Tell("p0", RoomAbort(1, 100, view.reason))
    assert view.state is RoomState.TIMED_OUT
    assert "compute the prompt within 20 s" in view.reason


def test_a_wait_that_cannot_be_said_ends_the_room():
    rooms, view, (tell,) = linked(P0)
    failed = decode.after_failure(tell, OSError("no memory"))
    rooms.handle(failed, 0)
    assert view.state is RoomState.FAILED
    assert "no memory" in view.reason


def test_between_ranks_pages_are_named_after_the_prompt_is_computed():
    with handover(policy=PREFILL_COMPLETE) as pair:
        pair.decode.know(pair.address)
        target = pair.decode.side.new_room(1)
        pair.decode.side.choose_sources(target, pair.address, 0)
        until(lambda: target.state is RoomState.COMPUTING, "it waits for the prompt")
        source = pair.prefill.side.open_room(1, register_dp_rank=False)
        pair.prefill.side.computed(source)
        pair.prefill.side.polled(source, sent=False)
        until(lambda: target.state is RoomState.READY, "it knows that the prompt is computed")
        pair.name_pages(target, [3, 4], 0)
        until(lambda: source.state is RoomState.READY, "it was asked")
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
            lambda: pair.prefill.side._rooms._early.nbytes, "the prefill rank knows that it waits"
        )
        for destination in pair.prefill.side._links._destinations:
            pair.prefill.side._links._destinations.remove(destination.key)
        second = pair.decode.side.new_room(2)
        pair.decode.side.choose_sources(second, pair.address, 0)
        until(lambda: first.over and second.over, "both rooms were told")
        third = pair.decode.side.new_room(3)
        pair.decode.side.choose_sources(third, pair.address, 0)
        until(lambda: third.state is RoomState.COMPUTING, "the link stands again")
