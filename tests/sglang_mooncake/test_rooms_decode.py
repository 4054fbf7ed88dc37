# SPDX-License-Identifier: Apache-2.0
"""Decode rooms: the cases that matter by name, then anything at all in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
    LinkUp,
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
from sglang_mooncake.rooms.states import ENDS, RoomState, RoomView

SLOTS = 4
P0, P1 = RoomSource("p0"), RoomSource("p1", destinations=2)
P1B = RoomSource("p1", aux=False)
IDLE = RoomSource("p1", sends=False, aux=False)
DEADLINES = DecodeDeadlines(bootstrap_s=10.0, waiting_s=20.0)


def new_rooms() -> DecodeRooms:
    return DecodeRooms(DEADLINES, SLOTS, first_tag=100)


def requested(rooms: DecodeRooms, room: int = 1, link: str = "p0") -> RoomView:
    view = RoomView(room, 0.0)
    rooms.handle(Opened(view), 0)
    rooms.handle(SourcesChosen(view, (RoomSource(link),)), 0)
    rooms.handle(LinkUp(link), 0)
    rooms.handle(PagesNamed(view, np.array([4, 5]), 2, 8), 0)
    assert view.state is RoomState.REQUESTED
    return view


def asked(instruction: object) -> RoomRequest:
    assert isinstance(instruction, Tell)
    assert isinstance(instruction.message, RoomRequest)
    return instruction.message


def test_a_room_goes_from_open_to_done_and_gives_its_seal_slots_back():
    rooms, view = new_rooms(), RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    chosen = SourcesChosen(view, (RoomSource("p0", 3), RoomSource("p1", 2, aux=False, state=False)))
    assert rooms.handle(chosen, 0) == [OpenLink("p0"), OpenLink("p1")]
    rooms.handle(LinkUp("p0"), 0)
    assert view.state is RoomState.OPEN
    rooms.handle(LinkUp("p1"), 0)
    assert view.state is RoomState.READY
    named = PagesNamed(view, np.array([4, 5]), 2, 8, states=(np.array([7]),))
    expect, other, *tells = rooms.handle(named, 0)
    assert [type(expect), type(other)] == [Expect, Expect]
    first, second = (asked(tell) for tell in tells)
    assert (first.destinations, second.destinations) == (3, 2)
    assert first.target is not None
    assert second.target is not None
    assert [(t.tag, t.seal_slot) for t in (first.target, second.target)] == list(view.seals)
    assert (first.target.num_pages, first.target.aux_slot) == (2, 2)
    assert [len(indices) for indices in first.target.states] == [4]
    assert (second.target.aux_slot, second.target.states) == (None, ())
    assert rooms.free_seal_slots == SLOTS - 2
    (fence,) = rooms.handle(Arrived(view), 0)
    assert isinstance(fence, Fence)
    assert fence.tags == tuple(tag for tag, _ in view.seals)
    assert view.state is RoomState.DONE
    rooms.handle(Closed(view), 0)
    rooms.handle(Fenced(view), 0)
    assert (len(rooms), rooms.free_seal_slots) == (0, SLOTS)


def test_a_link_is_opened_once_for_many_rooms():
    rooms = new_rooms()
    requested(rooms, 1)
    view = RoomView(2, 0.0)
    rooms.handle(Opened(view), 0)
    assert rooms.handle(SourcesChosen(view, (RoomSource("p0"),)), 0) == []
    assert view.state is RoomState.READY


def test_an_aborted_room_is_fenced_before_it_is_over_and_before_anybody_is_told():
    rooms = new_rooms()
    view = requested(rooms)
    fence, tell = rooms.handle(Aborted(view, "client gone"), 0)
    assert isinstance(fence, Fence)
    assert tell == Tell("p0", RoomAbort(1, view.generation, "client gone"))
    assert view.state is RoomState.ENDING
    rooms.handle(Fenced(view), 0)
    assert view.state is RoomState.ABORTED


def test_a_room_that_named_no_pages_needs_no_fence():
    rooms, view = new_rooms(), RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    assert rooms.handle(Broken(view, "no such instance"), 0) == [Over(view)]
    assert view.state is RoomState.FAILED


def test_a_lost_link_fails_its_rooms_and_is_opened_again_by_the_next():
    rooms = new_rooms()
    view = requested(rooms)
    (fence,) = rooms.handle(LinkDown("p0", "prefill rank died"), 0)
    rooms.handle(Fenced(view), 0)
    assert isinstance(fence, Fence)
    assert (view.state, view.reason) == (RoomState.FAILED, "prefill rank died")
    again = RoomView(2, 0.0)
    rooms.handle(Opened(again), 0)
    assert rooms.handle(SourcesChosen(again, (RoomSource("p0"),)), 0) == [OpenLink("p0")]


def test_the_prefill_sides_failure_ends_the_room_it_names_and_no_other():
    rooms = new_rooms()
    view, other = requested(rooms, 1), requested(rooms, 2)
    rooms.handle(PeerFailed("p0", RoomFailed(1, view.generation + 99, "stale")), 0)
    assert view.state is RoomState.REQUESTED
    rooms.handle(PeerFailed("p0", RoomFailed(1, view.generation, "out of memory")), 0)
    rooms.handle(Fenced(view), 0)
    assert (view.state, view.reason) == (RoomState.FAILED, "out of memory")
    assert other.state is RoomState.REQUESTED


def test_both_deadlines_end_in_a_sentence_that_names_the_variable():
    rooms, waiting = new_rooms(), RoomView(1, 0.0)
    rooms.handle(Opened(waiting), 0)
    view = requested(rooms, 2)
    rooms.handle(Tick(), 10.0)
    assert waiting.state is RoomState.TIMED_OUT
    assert "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in (waiting.reason or "")
    assert view.state is RoomState.REQUESTED
    rooms.handle(Tick(), 20.0)
    rooms.handle(Fenced(view), 20.0)
    assert view.state is RoomState.TIMED_OUT
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in (view.reason or "")


def test_without_a_free_seal_slot_the_room_fails_and_the_others_go_on():
    rooms = new_rooms()
    views = [requested(rooms, room) for room in range(1, SLOTS + 1)]
    late = RoomView(99, 0.0)
    rooms.handle(Opened(late), 0)
    rooms.handle(SourcesChosen(late, (RoomSource("p0"),)), 0)
    rooms.handle(PagesNamed(late, np.array([1]), 0, 0), 0)
    assert late.state is RoomState.FAILED
    assert "seal slots" in (late.reason or "")
    assert all(view.state is RoomState.REQUESTED for view in views)


def two_sources(rooms: DecodeRooms, other: RoomSource) -> RoomView:
    """A requested room, from `p0` and another one."""
    view = RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    rooms.handle(SourcesChosen(view, (RoomSource("p0"), other)), 0)
    for link in ("p0", other.link):
        rooms.handle(LinkUp(link), 0)
    rooms.handle(PagesNamed(view, np.array([4, 5]), 2, 8), 0)
    assert view.state is RoomState.REQUESTED
    return view


def test_a_source_that_sends_nothing_is_asked_and_not_waited_for():
    rooms, view = new_rooms(), RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    rooms.handle(SourcesChosen(view, (IDLE, P0)), 0)
    rooms.handle(LinkUp("p0"), 0)
    assert view.state is RoomState.OPEN, "it must be reachable, too"
    rooms.handle(LinkUp("p1"), 0)
    expect, first, second = rooms.handle(PagesNamed(view, np.array([4]), 2, 8), 0)
    assert isinstance(expect, Expect)
    assert asked(first).target is None
    assert asked(second).target is not None
    assert asked(first).generation == asked(second).generation == view.generation
    assert view.seals == ((expect.tag, expect.slot),)
    assert rooms.free_seal_slots == SLOTS - 1


@pytest.mark.parametrize("other", [P1B, IDLE], ids=["sends", "sends nothing"])
def test_a_source_that_fails_fails_the_room_and_the_others_are_told(other):
    rooms = new_rooms()
    view = two_sources(rooms, other)
    message = RoomFailed(1, view.generation, "out of memory")
    fence, tell = rooms.handle(PeerFailed("p1", message), 0)
    assert isinstance(fence, Fence)
    assert fence.tags == tuple(tag for tag, _ in view.seals), "all sources are fenced"
    assert tell == Tell("p0", RoomAbort(1, view.generation, "out of memory"))


def test_a_stranger_cannot_fail_a_room():
    rooms = new_rooms()
    view = requested(rooms)
    assert rooms.handle(PeerFailed("p9", RoomFailed(1, view.generation, "no")), 0) == []
    assert view.state is RoomState.REQUESTED


@pytest.mark.parametrize("sources", [(), (IDLE,), (P0, P0), (RoomSource("p0", sends=False),)])
def test_a_room_has_exactly_one_source_of_metadata(sources):
    with pytest.raises(ValueError, match="one source of a room sends its metadata"):
        SourcesChosen(RoomView(1, 0.0), sources)


def test_pages_that_are_no_indices_change_nothing():
    rooms = new_rooms()
    view = RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    rooms.handle(SourcesChosen(view, (P0,)), 0)
    rooms.handle(LinkUp("p0"), 0)
    with pytest.raises(ValueError, match="-1"):
        rooms.handle(PagesNamed(view, np.array([-1]), 0, 0), 0)
    assert (view.state, rooms.free_seal_slots) == (RoomState.READY, SLOTS)


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order: pages are safe at every end, slots never leak, tags never
    repeat."""

    @initialize()
    def start(self):
        self.rooms = new_rooms()
        self.now_s = 0.0
        self.views: list[RoomView] = []
        self.open_tags: set[int] = set()
        self.all_tags: set[int] = set()
        self.ends: dict[int, tuple[RoomState, str | None]] = {}
        self.over: list[RoomView] = []
        self.unfenced: list[RoomView] = []

    def do(self, event):
        for instruction in self.rooms.handle(event, self.now_s):
            if isinstance(instruction, Expect):
                assert instruction.tag not in self.all_tags
                self.open_tags.add(instruction.tag)
                self.all_tags.add(instruction.tag)
            if isinstance(instruction, Tell) and isinstance(instruction.message, RoomRequest):
                target = instruction.message.target
                assert target is None or target.tag in self.open_tags, "told before it was open"
            if isinstance(instruction, Over):
                self.over.append(instruction.view)
            if isinstance(instruction, Fence):
                self.open_tags -= set(instruction.tags)
                self.unfenced.append(instruction.view)

    @rule(room=st.integers(1, 3), sources=st.sampled_from([(P0,), (P1,), (P0, P1B), (P0, IDLE)]))
    def open(self, room, sources):
        view = RoomView(room, self.now_s)
        self.views.append(view)
        self.do(Opened(view))
        self.do(SourcesChosen(view, sources))

    @rule(link=st.sampled_from(["p0", "p1"]), up=st.booleans())
    def link(self, link, up):
        self.do(LinkUp(link) if up else LinkDown(link, "lost"))

    @rule(data=st.data(), what=st.sampled_from(["pages", "arrive", "abort", "close", "peer"]))
    def step(self, data, what):
        if not self.views:
            return
        view = data.draw(st.sampled_from(self.views))
        if what == "pages":
            self.do(PagesNamed(view, np.array([1]), 0, 0))
        elif what == "arrive":
            self.do(Arrived(view))
        elif what == "abort":
            self.do(Aborted(view, "gone"))
        elif what == "peer":
            self.do(PeerFailed("p0", RoomFailed(view.room, view.generation, "failed")))
        else:
            self.do(Closed(view))

    @rule(data=st.data())
    def fence_ends(self, data):
        if self.unfenced:
            view = data.draw(st.sampled_from(self.unfenced))
            self.unfenced.remove(view)
            self.do(Fenced(view))

    @rule(elapsed_s=st.floats(0, 30))
    def tick(self, elapsed_s):
        self.now_s += elapsed_s
        self.do(Tick())

    @invariant()
    def ends_are_final_and_safe(self):
        for view in self.views:
            if view.state in ENDS:
                assert not self.open_tags & {tag for tag, _ in view.seals}
                end = (view.state, view.reason)
                assert self.ends.setdefault(view.serial, end) == end
                assert (view.reason is None) == (view.state is RoomState.DONE)

    @invariant()
    def slots_are_held_by_live_or_unfenced_rooms_alone(self):
        held = sum(len(v.seals) for v in self.views if v in self.unfenced or v.state not in ENDS)
        assert self.rooms.free_seal_slots == SLOTS - held

    @invariant()
    def the_table_holds_live_and_unfenced_rooms_alone(self):
        alive = [v for v in self.views if not v.over or v in self.unfenced]
        assert len(self.rooms) == len(alive)
        assert {v.serial for v in self.over} == {v.serial for v in self.views if v not in alive}
        assert len(self.over) == len({view.serial for view in self.over})


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_any_order = AnyOrder.TestCase
