# SPDX-License-Identifier: Apache-2.0
"""Decode rooms: the cases that matter by name, then anything at all in any order."""

from __future__ import annotations

import numpy as np
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
    SourcesChosen,
    Tell,
    Tick,
)
from sglang_mooncake.rooms.states import ENDS, RoomState, RoomView

SLOTS = 4
DEADLINES = DecodeDeadlines(bootstrap_s=10.0, waiting_s=20.0)


def new_rooms() -> DecodeRooms:
    return DecodeRooms(DEADLINES, SLOTS, first_tag=100)


def requested(rooms: DecodeRooms, room: int = 1, link: str = "p0") -> RoomView:
    view = RoomView(room, 0.0)
    rooms.handle(Opened(view), 0)
    rooms.handle(SourcesChosen(view, (link,), 1), 0)
    rooms.handle(LinkUp(link), 0)
    rooms.handle(PagesNamed(view, np.array([4, 5]), 2, 8), 0)
    assert view.state is RoomState.REQUESTED
    return view


def test_a_room_goes_from_open_to_done_and_gives_its_seal_slots_back():
    rooms, view = new_rooms(), RoomView(1, 0.0)
    rooms.handle(Opened(view), 0)
    assert rooms.handle(SourcesChosen(view, ("p0", "p1"), 3), 0) == [OpenLink("p0"), OpenLink("p1")]
    rooms.handle(LinkUp("p0"), 0)
    assert view.state is RoomState.OPEN
    rooms.handle(LinkUp("p1"), 0)
    assert view.state is RoomState.READY
    instructions = rooms.handle(PagesNamed(view, np.array([4, 5]), 2, 8), 0)
    assert [type(i) for i in instructions] == [Expect, Expect, Tell, Tell]
    tell = instructions[2]
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, RoomRequest)
    assert (tell.message.num_pages, tell.message.destinations) == (2, 3)
    assert (tell.message.tag, tell.message.seal_slot) == view.seals[0]
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
    assert rooms.handle(SourcesChosen(view, ("p0",), 1), 0) == []
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
    assert rooms.handle(SourcesChosen(again, ("p0",), 1), 0) == [OpenLink("p0")]


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
    rooms.handle(SourcesChosen(late, ("p0",), 1), 0)
    rooms.handle(PagesNamed(late, np.array([1]), 0, 0), 0)
    assert late.state is RoomState.FAILED
    assert "seal slots" in (late.reason or "")
    assert all(view.state is RoomState.REQUESTED for view in views)


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
                assert instruction.message.tag in self.open_tags, "told before it was open"
            if isinstance(instruction, Over):
                self.over.append(instruction.view)
            if isinstance(instruction, Fence):
                self.open_tags -= set(instruction.tags)
                self.unfenced.append(instruction.view)

    @rule(room=st.integers(1, 3), links=st.sampled_from([("p0",), ("p1",), ("p0", "p1")]))
    def open(self, room, links):
        view = RoomView(room, self.now_s)
        self.views.append(view)
        self.do(Opened(view))
        self.do(SourcesChosen(view, links, 1))

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
