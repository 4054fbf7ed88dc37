# SPDX-License-Identifier: Apache-2.0
"""Decode rooms: anything at all in any order, through the executor of the decode side, with links
that break, instructions that raise, fences that are late, and a scheduler that is ahead of the
loop."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from counted_tags import CountedTags
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_mooncake.executor import Executor
from sglang_mooncake.messages import RoomComputed, RoomFailed, RoomRequest
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
    Opened,
    OpenLink,
    Over,
    PagesNamed,
    PeerComputed,
    PeerFailed,
    RoomSource,
    SourcesChosen,
    Tell,
    Tick,
    after_failure,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import ENDS, RoomState

SLOTS = 4
LINKS = ("p0", "p1")
P0, P1 = RoomSource("p0"), RoomSource("p1", destinations=2)
P1B = RoomSource("p1", aux=False)
IDLE = RoomSource("p1", sends=False, aux=False)
DEADLINES = DecodeDeadlines(bootstrap_s=10.0, waiting_s=20.0, ready_s=30.0)


class AnyOrder(RuleBasedStateMachine):
    """Pages are safe at every end, slots never leak, tags never repeat, and every room ends."""

    @initialize(computed_first=st.booleans())
    def start(self, computed_first):
        self.rooms = DecodeRooms(DEADLINES, SLOTS, 100, CountedTags(200), computed_first)
        self.now_s = 0.0
        self.executor = Executor(self.handle, self.perform, after_failure, lambda: self.now_s)
        self.inbox: deque = deque()  # what the scheduler has posted and the loop not seen
        self.uses: list[Room] = []
        self.links: dict[str, bool] = {}  # up?
        self.raises: dict[type, Exception] = {}  # by instruction, the next time
        self.open_tags: set[int] = set()
        self.all_tags: set[int] = set()
        self.refused_tags: set[int] = set()
        self.unconfirmed: list[Fence] = []
        self.ends: dict[int, tuple[RoomState, str | None]] = {}
        self.over: list[Room] = []

    # --- the shell ---

    def handle(self, event, now_s):
        before = {room.serial: room.view.exposed for room in self.uses}
        given_up = {room.serial for room in self.uses if room.withdrawn}
        instructions = self.rooms.handle(event, now_s)
        for room in self.uses:
            if room.view.exposed and not before[room.serial]:
                assert room.serial not in given_up, "exposed after it was given up"
                assert room.named, "exposed before it was named"
        return instructions

    def perform(self, instruction):
        if (error := self.raises.pop(type(instruction), None)) is not None:
            if isinstance(instruction, Expect):
                self.refused_tags.add(instruction.tag)
            raise error
        match instruction:
            case OpenLink(link):
                assert not self.links.setdefault(link, False), "it stands, and the rooms know it"
            case Expect(_, _, tag, _):
                assert tag not in self.all_tags
                self.open_tags.add(tag)
                self.all_tags.add(tag)
            case Tell(_, RoomRequest(target=target)) if target is not None:
                # An engine that could not open a tag refuses what is written under it.
                assert target.tag in self.open_tags | self.refused_tags, "told before it was open"
            case Fence():
                self.unconfirmed.append(instruction)
            case Over(room):
                self.over.append(room)

    # --- the scheduler: its flags are seen at once, its events later ---

    @rule(room=st.integers(1, 3), sources=st.sampled_from([(P0,), (P1,), (P0, P1B), (P0, IDLE)]))
    def open(self, room, sources):
        use = Room(room, self.now_s)
        self.uses.append(use)
        self.inbox += [Opened(use), SourcesChosen(use, sources)]

    @rule(room=st.integers(1, 3), sources=st.sampled_from([(P0,), (P0, P1B)]))
    def open_and_meet(self, room, sources):
        """What mostly happens, so that the rare things happen at every stage of it."""
        self.open(room, sources)
        self.loop_catches_up(len(self.inbox))
        for source in sources:
            self.link(source.link, "up")
        for source in sources:
            self.compute(source.link, self.uses[-1])

    def compute(self, link, room):
        said = RoomComputed(room.number, room.view.generation)
        self.executor.submit(PeerComputed(link, said))

    @property
    def ready(self):
        return [room for room in self.uses if room.view.state is RoomState.READY and not room.named]

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), given_up=st.sampled_from([None, None, Aborted, Broken]))
    def name_pages(self, data, given_up):
        """At the right time, and perhaps given up in the same step of the scheduler."""
        room = data.draw(st.sampled_from(self.ready))
        room.named = True
        self.inbox.append(PagesNamed(room, np.array([1]), 0, 0))
        if given_up is not None:
            room.withdrawn = True
            self.inbox.append(given_up(room, "another rank failed"))

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), what=st.sampled_from(["pages", "arrive", "abort", "break", "close"]))
    def scheduler(self, data, what):
        alive = [room for room in self.uses if not room.view.over]
        room = data.draw(st.sampled_from(alive or self.uses))
        if what == "pages":
            room.named = True
            self.inbox.append(PagesNamed(room, np.array([1]), 0, 0))
        elif what == "arrive":
            self.inbox.append(Arrived(room))
        else:
            room.withdrawn = True
            events = {"abort": Aborted(room, "gone"), "break": Broken(room, "disagrees")}
            self.inbox.append(events.get(what, Closed(room)))

    @precondition(lambda self: self.inbox)
    @rule(count=st.integers(1, 4))
    def loop_catches_up(self, count):
        for _ in range(min(count, len(self.inbox))):
            self.executor.submit(self.inbox.popleft())

    # --- everybody else ---

    @rule(link=st.sampled_from(LINKS), how=st.sampled_from(["up", "up", "down", "refused"]))
    def link(self, link, how):
        if how == "up":
            if link in self.links:
                self.links[link] = True
                self.executor.submit(LinkUp(link))
        elif self.links.pop(link, None) is not None:
            event = LinkDown(link, "lost") if how == "down" else LinkRefused(link, "refused")
            self.executor.submit(event)

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), link=st.sampled_from(LINKS))
    def peer_has_computed(self, data, link):
        self.compute(link, data.draw(st.sampled_from(self.uses)))

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), link=st.sampled_from(LINKS))
    def peer_fails(self, data, link):
        room = data.draw(st.sampled_from(self.uses))
        self.executor.submit(
            PeerFailed(link, RoomFailed(room.number, room.view.generation, "failed"))
        )

    @rule(what=st.sampled_from([OpenLink, Expect, Tell, Over]))
    def next_one_raises(self, what):
        self.raises[what] = OSError(f"{what.__name__} failed")

    @precondition(lambda self: self.unconfirmed)
    @rule(data=st.data())
    def fence_is_confirmed(self, data):
        self.confirm(data.draw(st.sampled_from(self.unconfirmed)))

    def confirm(self, fence):
        self.unconfirmed.remove(fence)
        self.open_tags -= set(fence.tags)
        self.executor.submit(Fenced(fence.room))

    @rule(elapsed_s=st.floats(0, 6))
    def tick(self, elapsed_s):
        self.now_s += elapsed_s
        self.executor.submit(Tick())

    # --- what holds at any time ---

    @invariant()
    def released_pages_are_never_writable(self):
        for room in self.uses:
            if room.releasable and (room.named or room.view.over):
                assert not self.open_tags & {expected.tag for expected in room.view.expected}
                assert not (room.view.exposed and not room.view.over)

    @invariant()
    def ends_are_final(self):
        for room in self.uses:
            if room.view.state in ENDS:
                end = (room.view.state, room.view.reason)
                assert self.ends.setdefault(room.serial, end) == end
                assert (room.view.reason is None) == (room.view.state is RoomState.DONE)

    @invariant()
    def slots_are_held_by_rooms_that_are_not_safe(self):
        held = sum(len(room.view.expected) for room in self.uses if not room.view.safe)
        assert self.rooms.free_completion_slots == SLOTS - held

    @invariant()
    def links_that_stand_are_known(self):
        assert self.rooms.standing.keys() == {link for link, is_up in self.links.items() if is_up}

    @invariant()
    def a_room_is_over_once(self):
        assert len(self.over) == len({room.serial for room in self.over})

    def teardown(self):
        """Every room ends once nothing more happens than that time passes and fences end."""
        if not hasattr(self, "rooms"):
            return
        while self.inbox:
            self.executor.submit(self.inbox.popleft())
        self.now_s += 1_000.0
        self.executor.submit(Tick())
        while self.unconfirmed:
            self.confirm(self.unconfirmed[0])
        assert all(room.view.safe and room.view.over for room in self.uses)
        assert (len(self.rooms), self.rooms.free_completion_slots) == (0, SLOTS)
        assert not self.open_tags & {a.tag for room in self.uses for a in room.view.expected}
        assert self.rooms._table.is_empty


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_any_order = pytest.mark.slow(AnyOrder.TestCase)
