# SPDX-License-Identifier: Apache-2.0
"""Decode rooms: the cases that matter by name. Anything at all in any order is in
`test_rooms_decode_any_order.py`."""

from __future__ import annotations

import numpy as np
import pytest
from counted_tags import CountedTags

from sglang_mooncake.messages import RoomAbort, RoomFailed, RoomRequest
from sglang_mooncake.rooms.decode import (
    Aborted,
    Arrived,
    Broken,
    Closed,
    DecodeDeadlines,
    DecodeRooms,
    Expect,
    Fence,
    Fenced,
    LinkDown,
    LinkRefused,
    LinkUp,
    NotServed,
    Opened,
    OpenLink,
    Over,
    PagesNamed,
    PeerFailed,
    RoomSource,
    SourcesChosen,
    Tell,
    Tick,
)
from sglang_mooncake.rooms.room import Room, RoomView
from sglang_mooncake.rooms.states import RoomState

SLOTS = 4
P0, P1 = RoomSource("p0"), RoomSource("p1", destinations=2)
P1B = RoomSource("p1", aux=False)
IDLE = RoomSource("p1", sends=False, aux=False)
DEADLINES = DecodeDeadlines(bootstrap_s=10.0, waiting_s=20.0)


def new_rooms() -> DecodeRooms:
    return DecodeRooms(DEADLINES, SLOTS, first_generation=100, new_tag=CountedTags(200))


def requested(rooms: DecodeRooms, room: int = 1, link: str = "p0") -> Room:
    use = Room(room, 0.0)
    rooms.handle(Opened(use), 0)
    rooms.handle(SourcesChosen(use, (RoomSource(link),)), 0)
    rooms.handle(LinkUp(link), 0)
    rooms.handle(PagesNamed(use, np.array([4, 5]), 2, 8), 0)
    assert use.view.state is RoomState.REQUESTED
    return use


def tags_of(room: Room) -> tuple[int, ...]:
    return tuple(expected.tag for expected in room.view.expected)


def asked(instruction: object) -> RoomRequest:
    assert isinstance(instruction, Tell)
    assert isinstance(instruction.message, RoomRequest)
    return instruction.message


def test_a_room_goes_from_open_to_done_and_gives_its_completion_record_slots_back():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    chosen = SourcesChosen(room, (RoomSource("p0", 3), RoomSource("p1", 2, aux=False, state=False)))
    assert rooms.handle(chosen, 0) == [OpenLink("p0"), OpenLink("p1")]
    rooms.handle(LinkUp("p0"), 0)
    assert room.view.state is RoomState.OPEN
    rooms.handle(LinkUp("p1"), 0)
    assert room.view.state is RoomState.READY
    named = PagesNamed(room, np.array([4, 5]), 2, 8, states=(np.array([7]),))
    expect, other, *tells = rooms.handle(named, 0)
    assert [type(expect), type(other)] == [Expect, Expect]
    assert [expect.link, other.link] == ["p0", "p1"], "each may write under its own tag alone"
    first, second = (asked(tell) for tell in tells)
    assert (first.destinations, second.destinations) == (3, 2)
    assert first.target is not None
    assert second.target is not None
    asked_for = [(t.tag, t.completion_slot) for t in (first.target, second.target)]
    assert asked_for == [(expected.tag, expected.slot) for expected in room.view.expected]
    assert (first.target.num_pages, first.target.aux_slot) == (2, 2)
    assert [len(indices) for indices in first.target.states] == [4]
    assert (second.target.aux_slot, second.target.states) == (None, ())
    assert rooms.free_completion_slots == SLOTS - 2
    (fence,) = rooms.handle(Arrived(room), 0)
    assert isinstance(fence, Fence)
    assert fence.tags == tags_of(room)
    assert room.view.state is RoomState.DONE
    rooms.handle(Closed(room), 0)
    rooms.handle(Fenced(room), 0)
    assert (len(rooms), rooms.free_completion_slots) == (0, SLOTS)


def test_a_room_that_its_scheduler_lets_go_of_is_aborted_by_its_text_too():
    """By which SGLang's tests know it."""
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(Closed(room), 0)
    assert room.view.state is RoomState.ABORTED
    assert "abort" in room.view.reason


def test_a_room_asks_for_the_links_that_do_not_stand():
    rooms = new_rooms()
    first = requested(rooms, 1)
    room = Room(2, 0.0)
    rooms.handle(Opened(room), 0)
    assert rooms.handle(SourcesChosen(room, (P0, P1B)), 0) == [OpenLink("p1")]
    assert rooms.handle(LinkUp("p0"), 0) == rooms.handle(LinkUp("p0"), 0) == []
    assert room.view.state is RoomState.OPEN, "said twice is said once"
    rooms.handle(LinkUp("p1"), 0)
    assert room.view.state is RoomState.READY
    assert first.view.state is RoomState.REQUESTED


def test_a_room_whose_links_stand_is_ready_as_its_sources_are_chosen():
    rooms, room = new_rooms(), Room(3, 0.0)
    first = requested(rooms, 1)
    rooms.handle(LinkUp("p1"), 0)
    rooms.handle(Opened(room), 0)
    assert rooms.handle(SourcesChosen(room, (P0, P1B)), 0) == []
    assert room.view.state is RoomState.READY
    assert rooms.standing.keys() == {"p0", "p1"}
    rooms.handle(LinkDown("p0", "gone"), 0)
    rooms.handle(LinkRefused("p1", "gone"), 0)
    assert not rooms.standing
    assert first.view.state is RoomState.ENDING
    again = Room(4, 0.0)
    rooms.handle(Opened(again), 0)
    opened = rooms.handle(SourcesChosen(again, (P0, P1B)), 0)
    assert opened == [OpenLink("p0"), OpenLink("p1")]


def test_a_link_that_cannot_be_opened_fails_its_room_at_once():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0,)), 0)
    abort = Tell("p0", RoomAbort(1, 0, "too many open files"))
    assert rooms.handle(LinkDown("p0", "too many open files"), 0) == [abort, Over(room)]
    assert (room.view.state, room.view.reason) == (RoomState.FAILED, "too many open files")


def test_a_prefill_rank_that_refuses_is_told_that_it_will_never_be_asked():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0,)), 0)
    told = rooms.handle(LinkRefused("p0", "another page size"), 0)
    assert told == [Tell("p0", RoomAbort(1, 0, "another page size", refused=True)), Over(room)]


def test_a_prefill_rank_that_does_not_fit_is_told_that_it_will_never_be_asked():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    told = rooms.handle(NotServed(room, ("p0",), "another page size"), 0)
    abort = RoomAbort(1, 0, "another page size", refused=True)
    assert told == [OpenLink("p0"), Tell("p0", abort), Over(room)]


def test_pages_that_are_named_before_the_links_stand_are_asked_for_once_they_do():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0, P1B)), 0)
    room.named = True
    assert rooms.handle(PagesNamed(room, np.array([4, 5]), 2, 8), 0) == []
    assert rooms.handle(LinkUp("p0"), 0) == []
    assert room.view.state is RoomState.OPEN
    assert not room.view.exposed
    instructions = rooms.handle(LinkUp("p1"), 0)
    assert [type(one) for one in instructions] == [Expect, Expect, Tell, Tell]
    assert room.view.state is RoomState.REQUESTED


@pytest.mark.parametrize("end", ["link", "abort"])
def test_pages_of_a_room_that_ends_before_its_links_stand_are_never_exposed(end):
    rooms, use, other = new_rooms(), Room(1, 0.0), Room(2, 0.0)
    for room in (use, other):
        rooms.handle(Opened(room), 0)
        rooms.handle(SourcesChosen(room, (P0, P1B)), 0)
        room.named = True
        rooms.handle(PagesNamed(room, np.array([4, 5]), 2, 8), 0)
    rooms.handle(LinkUp("p0"), 0)
    if end == "link":
        rooms.handle(LinkDown("p1", "lost"), 0)
        assert (other.view.state, other.view.reason) == (RoomState.FAILED, "lost")
    else:
        use.withdrawn = True
        rooms.handle(LinkUp("p1"), 0)
        assert other.view.state is RoomState.REQUESTED, "the others go on"
        rooms.handle(Aborted(use, "another rank failed"), 0)
    assert use.view.over
    assert use.releasable
    assert not use.view.exposed


def test_pages_with_numbers_that_are_none_end_their_room_when_they_are_named():
    """And not when its links stand, which other rooms wait for, too."""
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0,)), 0)
    with pytest.raises(ValueError, match="index outside"):
        rooms.handle(PagesNamed(room, np.array([-1]), 0, 0), 0)
    assert rooms.handle(LinkUp("p0"), 0) == []


def test_when_the_scheduler_may_name_pages():
    room = Room(1, 0.0)
    assert not room.nameable
    room.linked = True
    assert room.nameable
    for state in set(RoomState) - {RoomState.OPEN, RoomState.READY}:
        room.view = RoomView(state)
        assert not room.nameable
    room.view, room.linked = RoomView(RoomState.READY), False
    assert room.nameable


def test_pages_that_were_withdrawn_before_the_loop_published_them_are_never_exposed():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0,)), 0)
    rooms.handle(LinkUp("p0"), 0)
    room.named = room.withdrawn = True  # both on the scheduler's thread, in one step
    assert not room.releasable
    assert rooms.handle(PagesNamed(room, np.array([4, 5]), 2, 0), 0) == []
    assert not room.view.exposed
    tell, over = rooms.handle(Aborted(room, "another rank failed"), 0)
    assert isinstance(tell, Tell)
    assert over == Over(room)
    assert room.releasable
    assert rooms.handle(PagesNamed(room, np.array([4, 5]), 2, 0), 0) == []
    assert not room.view.exposed


def test_named_pages_are_not_released_before_the_fence_is_confirmed():
    rooms = new_rooms()
    room = requested(rooms)
    room.named = True
    rooms.handle(Arrived(room), 0)
    assert room.view.over
    assert not room.releasable, "its tag is still open"
    rooms.handle(Fenced(room), 0)
    assert room.releasable


def test_a_scheduler_that_never_names_pages_holds_the_room_for_an_hour_at_most():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0,)), 0)
    rooms.handle(LinkUp("p0"), 5.0)
    rooms.handle(Tick(), 5.0 + DEADLINES.ready_s - 1)
    assert room.view.state is RoomState.READY, "it may wait long for free memory"
    rooms.handle(Tick(), 5.0 + DEADLINES.ready_s)
    assert room.view.state is RoomState.TIMED_OUT
    assert "allocated no pages for the request within 3600 s" in (room.view.reason or "")


def test_an_aborted_room_is_fenced_before_it_is_over_and_before_anybody_is_told():
    rooms = new_rooms()
    room = requested(rooms)
    fence, tell = rooms.handle(Aborted(room, "client gone"), 0)
    assert isinstance(fence, Fence)
    assert tell == Tell("p0", RoomAbort(1, room.view.generation, "client gone"))
    assert room.view.state is RoomState.ENDING
    rooms.handle(Fenced(room), 0)
    assert room.view.state is RoomState.ABORTED


def test_a_room_that_named_no_pages_needs_no_fence():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    assert rooms.handle(Broken(room, "no such instance"), 0) == [Over(room)]
    assert room.view.state is RoomState.FAILED


def test_a_lost_link_fails_its_rooms_and_is_opened_again_by_the_next():
    rooms = new_rooms()
    room = requested(rooms)
    fence, tell = rooms.handle(LinkDown("p0", "prefill rank died"), 0)
    rooms.handle(Fenced(room), 0)
    assert isinstance(fence, Fence)
    # By the next link; see `DecodeLinks.send`.
    assert tell == Tell("p0", RoomAbort(room.number, room.view.generation, "prefill rank died"))
    assert (room.view.state, room.view.reason) == (RoomState.FAILED, "prefill rank died")
    again = Room(2, 0.0)
    rooms.handle(Opened(again), 0)
    assert rooms.handle(SourcesChosen(again, (RoomSource("p0"),)), 0) == [OpenLink("p0")]


def test_the_prefill_sides_failure_ends_the_room_it_names_and_no_other():
    rooms = new_rooms()
    room, other = requested(rooms, 1), requested(rooms, 2)
    rooms.handle(PeerFailed("p0", RoomFailed(1, room.view.generation + 99, "stale")), 0)
    assert room.view.state is RoomState.REQUESTED
    rooms.handle(PeerFailed("p0", RoomFailed(1, room.view.generation, "out of memory")), 0)
    rooms.handle(Fenced(room), 0)
    assert (room.view.state, room.view.reason) == (RoomState.FAILED, "out of memory")
    assert other.view.state is RoomState.REQUESTED


SEVEN = tuple(RoomSource(f"p{number}", aux=not number) for number in range(7))


@pytest.mark.parametrize(
    ("sources", "registry", "who"),
    [
        ((), "", "the prefill ranks"),
        ((), "10.0.0.1:8998", "the prefill ranks of 10.0.0.1:8998"),
        ((P0, P1B), "10.0.0.1:8998", "p1"),
        (SEVEN, "", "p1, p2, p3, p4 and 2 more"),
    ],
)
def test_a_room_without_its_links_ends_in_a_sentence_that_names_the_ranks_and_the_setting(
    sources, registry, who
):
    rooms, room = new_rooms(), Room(1, 0.0)
    room.registry = registry
    rooms.handle(LinkUp("p0"), 0)
    rooms.handle(Opened(room), 0)
    if sources:
        rooms.handle(SourcesChosen(room, sources), 0)
    rooms.handle(Tick(), 9.9)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Tick(), 10.0)
    assert room.view.state is RoomState.TIMED_OUT
    said = f"room 1: could not connect to {who} within 10 s (bootstrap_s)"
    assert room.view.reason == said


def test_a_room_without_its_kv_cache_ends_in_a_sentence_that_names_the_ranks_and_the_setting():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0, IDLE)), 0)
    for link in ("p0", "p1"):
        rooms.handle(LinkUp(link), 0)
    rooms.handle(PagesNamed(room, np.array([4, 5]), 2, 8), 0)
    rooms.handle(Tick(), 19.9)
    assert room.view.state is RoomState.REQUESTED
    rooms.handle(Tick(), 20.0)
    rooms.handle(Fenced(room), 20.0)
    assert room.view.state is RoomState.TIMED_OUT
    said = "room 1: the KV cache did not arrive from p0 within 20 s (waiting_s)"
    assert room.view.reason == said


def test_without_a_free_completion_record_slot_the_room_fails_and_the_others_go_on():
    rooms = new_rooms()
    uses = [requested(rooms, room) for room in range(1, SLOTS + 1)]
    late = Room(99, 0.0)
    rooms.handle(Opened(late), 0)
    rooms.handle(SourcesChosen(late, (RoomSource("p0"),)), 0)
    rooms.handle(LinkUp("p0"), 0)
    rooms.handle(PagesNamed(late, np.array([1]), 0, 0), 0)
    assert late.view.state is RoomState.FAILED
    assert "slots for completion records" in (late.view.reason or "")
    assert all(use.view.state is RoomState.REQUESTED for use in uses)


def two_sources(rooms: DecodeRooms, other: RoomSource) -> Room:
    """A requested room, from `p0` and another one."""
    room = Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (RoomSource("p0"), other)), 0)
    for link in ("p0", other.link):
        rooms.handle(LinkUp(link), 0)
    rooms.handle(PagesNamed(room, np.array([4, 5]), 2, 8), 0)
    assert room.view.state is RoomState.REQUESTED
    return room


def test_a_source_that_sends_nothing_is_asked_and_not_waited_for():
    rooms, room = new_rooms(), Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (IDLE, P0)), 0)
    rooms.handle(LinkUp("p0"), 0)
    assert room.view.state is RoomState.OPEN, "it must be reachable, too"
    rooms.handle(LinkUp("p1"), 0)
    expect, first, second = rooms.handle(PagesNamed(room, np.array([4]), 2, 8), 0)
    assert isinstance(expect, Expect)
    assert expect.link == "p0", "the other sends nothing"
    assert asked(first).target is None
    assert asked(second).target is not None
    assert asked(first).generation == asked(second).generation == room.view.generation
    assert [(expected.tag, expected.slot) for expected in room.view.expected] == [
        (expect.tag, expect.slot)
    ]
    assert rooms.free_completion_slots == SLOTS - 1


@pytest.mark.parametrize("other", [P1B, IDLE], ids=["sends", "sends nothing"])
def test_a_source_that_fails_fails_the_room_and_the_others_are_told(other):
    rooms = new_rooms()
    room = two_sources(rooms, other)
    message = RoomFailed(1, room.view.generation, "out of memory")
    fence, tell = rooms.handle(PeerFailed("p1", message), 0)
    assert isinstance(fence, Fence)
    assert fence.tags == tags_of(room), "all sources are fenced"
    assert tell == Tell("p0", RoomAbort(1, room.view.generation, "out of memory"))


def test_a_stranger_cannot_fail_a_room():
    rooms = new_rooms()
    room = requested(rooms)
    assert rooms.handle(PeerFailed("p9", RoomFailed(1, room.view.generation, "no")), 0) == []
    assert room.view.state is RoomState.REQUESTED


@pytest.mark.parametrize("sources", [(), (IDLE,), (P0, P0), (RoomSource("p0", sends=False),)])
def test_a_room_has_exactly_one_source_of_metadata(sources):
    with pytest.raises(ValueError, match="one source of a room sends its metadata"):
        SourcesChosen(Room(1, 0.0), sources)


def test_pages_that_are_no_indices_change_nothing():
    rooms = new_rooms()
    room = Room(1, 0.0)
    rooms.handle(Opened(room), 0)
    rooms.handle(SourcesChosen(room, (P0,)), 0)
    rooms.handle(LinkUp("p0"), 0)
    with pytest.raises(ValueError, match="-1"):
        rooms.handle(PagesNamed(room, np.array([-1]), 0, 0), 0)
    assert (room.view.state, rooms.free_completion_slots) == (RoomState.READY, SLOTS)


class Aloof(Room):
    """A room that must not be looked at once `is_left` says so."""

    __slots__ = ()
    is_left = False

    def __getattribute__(self, name: str) -> object:
        assert not Aloof.is_left, f"somebody reads {name} of a room that has nothing to do with it"
        return super().__getattribute__(name)


def test_a_link_that_is_heard_to_stand_again_touches_no_room(monkeypatch):
    rooms, room = new_rooms(), Aloof(1, 0.0)
    rooms.handle(LinkUp("p0"), 0.0)
    rooms.handle(Opened(room), 0.0)
    rooms.handle(SourcesChosen(room, (P0,)), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Aloof, "is_left", True)
        rooms.handle(LinkUp("p0"), 0.0)
        rooms.handle(PeerFailed("p0", RoomFailed(1, 7, "another use")), 0.0)
    assert room.view.state is RoomState.READY


def test_what_happens_to_a_link_touches_the_rooms_that_have_it_alone(monkeypatch):
    rooms = new_rooms()
    mine, other = requested(rooms, 1, "p0"), Aloof(2, 0.0)
    rooms.handle(Opened(other), 0.0)
    rooms.handle(SourcesChosen(other, (RoomSource("p1"),)), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Aloof, "is_left", True)
        rooms.handle(LinkUp("p0"), 0.0)
        rooms.handle(PeerFailed("p0", RoomFailed(1, mine.view.generation + 1, "another use")), 0.0)
        rooms.handle(LinkDown("p0", "gone"), 0.0)
        rooms.handle(Fenced(mine), 0.0)
    assert mine.view.state is RoomState.FAILED
    rooms.handle(LinkDown("p1", "gone"), 0.0)
    assert other.view.state is RoomState.FAILED
    assert rooms._table.is_empty
