# SPDX-License-Identifier: Apache-2.0
"""Rooms on the decode side: when pages are open for writing, what arrival is, when they are free.

`DecodeRooms.handle(event)` returns instructions; see `states.py` for the rules of this package.
Arrival itself is no event: the scheduler's `poll()` reads the engine's counters (`RoomView.seals`),
so that it never waits for the loop thread.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from sglang_mooncake.messages import (
    RoomAbort,
    RoomFailed,
    RoomRequest,
    Target,
    indices_to_bytes,
    states_to_bytes,
)
from sglang_mooncake.rooms.decode_events import (
    Arrived,
    Event,
    Expect,
    Fence,
    Fenced,
    Instruction,
    LinkDown,
    LinkRefused,
    LinkUp,
    NotServed,
    OpenLink,
    PagesNamed,
    PeerFailed,
    RoomSource,
    SourcesChosen,
    Tell,
)
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.states import (
    TRANSITIONS_DECODE,
    RoomState,
    RoomView,
    Step,
    advance,
)

__all__ = [
    "Aborted",
    "Arrived",
    "Broken",
    "Closed",
    "DecodeDeadlines",
    "DecodeRooms",
    "Event",
    "Expect",
    "Fence",
    "Fenced",
    "Instruction",
    "LinkDown",
    "LinkRefused",
    "LinkUp",
    "NotServed",
    "OpenLink",
    "Opened",
    "Over",
    "PagesNamed",
    "PeerFailed",
    "RoomSource",
    "SourcesChosen",
    "Tell",
    "Tick",
]


class _Link(enum.Enum):
    OPENING = "opening"
    UP = "up"


@dataclass(slots=True, eq=False)
class _Room:
    view: RoomView
    sources: tuple[RoomSource, ...] = ()
    published_s: float | None = None
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeDeadlines:
    """`bootstrap_s`: until the prefill ranks are known; `waiting_s`: until the KV has arrived."""

    bootstrap_s: float
    waiting_s: float


class DecodeRooms:
    """All rooms of one decode rank.

    Args:
        seal_slots: how many seals the registered seal buffer holds; a bound on rooms × sources.
        first_tag: tags count up from here, so that they differ from those of a former life.
    """

    def __init__(self, deadlines: DecodeDeadlines, seal_slots: int, first_tag: int) -> None:
        self._deadlines = deadlines
        self._rooms: dict[int, _Room] = {}  # by serial
        self._links: dict[Hashable, _Link] = {}
        self._free_slots = list(range(seal_slots - 1, -1, -1))
        self._next_tag = first_tag

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def free_seal_slots(self) -> int:
        return len(self._free_slots)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Applies one event. Idempotent where peers may repeat themselves."""
        match event:
            case Opened(view):
                self._rooms[view.serial] = _Room(view)
                return []
            case SourcesChosen(view, sources):
                return self._choose(view, sources)
            case NotServed(view, links, reason):
                return self._not_served(view, links, reason)
            case PagesNamed(view):
                return self._publish(view, event, now_s)
            case Arrived(view):
                return self._arrive(view)
            case Aborted(view, reason):
                return self._end(view, RoomState.ABORTED, reason)
            case Broken(view, reason):
                return self._end(view, RoomState.FAILED, reason)
            case Closed(view):
                return self._end(view, RoomState.ABORTED, "the scheduler released the request")
            case Fenced(view):
                return self._fenced(view)
            case LinkUp(link):
                return self._link_up(link)
            case LinkDown(link, reason):
                return self._link_down(link, reason)
            case LinkRefused(link, reason):
                return self._link_refused(link, reason)
            case PeerFailed(link, message):
                return self._peer_failed(link, message)
            case Tick():
                return self._tick(now_s)

    # --- the way up ---

    def _choose(self, view: RoomView, sources: tuple[RoomSource, ...]) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is not RoomState.OPEN:
            return []
        room.sources = sources
        instructions = self._open_links(source.link for source in sources)
        self._meet_if_linked(room)
        return instructions

    def _not_served(
        self, view: RoomView, links: tuple[Hashable, ...], reason: str
    ) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is not RoomState.OPEN:
            return []
        room.sources = tuple(RoomSource(link, sends=False, aux=False) for link in links)
        return self._open_links(links) + self._end(view, RoomState.FAILED, reason)

    def _open_links(self, links: Iterable[Hashable]) -> list[Instruction]:
        missing = [link for link in links if link not in self._links]
        self._links |= dict.fromkeys(missing, _Link.OPENING)
        return [OpenLink(link) for link in missing]

    def _meet_if_linked(self, room: _Room) -> None:
        if room.view.state is not RoomState.OPEN or not room.sources:
            return
        if all(self._links.get(source.link) is _Link.UP for source in room.sources):
            advance(room.view, Step.MET, TRANSITIONS_DECODE)

    def _publish(self, view: RoomView, named: PagesNamed, now_s: float) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is not RoomState.READY:
            return []  # it ended between the scheduler's poll and its pages
        pages = indices_to_bytes(named.pages)
        states = states_to_bytes(named.states)
        sending = sum(source.sends for source in room.sources)
        if len(self._free_slots) < sending:
            return self._end(
                view,
                RoomState.FAILED,
                f"all seal slots are in use ({len(self._rooms)} rooms are open on this rank)",
            )
        room.slots = tuple(self._free_slots.pop() for _ in range(sending))
        tags = tuple(range(self._next_tag, self._next_tag + sending))
        self._next_tag += sending
        room.published_s = now_s
        # The generation tells this use of the room number from any other; tags are never reused.
        view.generation = tags[0]
        view.seals = tuple(zip(tags, room.slots, strict=True))
        view.exposed = True
        advance(view, Step.PUBLISHED, TRANSITIONS_DECODE)
        instructions: list[Instruction] = [Expect(tag, slot) for tag, slot in view.seals]
        seals = iter(view.seals)
        for source in room.sources:
            target = None
            if source.sends:
                tag, slot = next(seals)
                target = Target(
                    tag,
                    len(named.pages),
                    pages,
                    source.share,
                    states if source.state else (),
                    named.aux_slot if source.aux else None,
                    slot,
                )
            request = RoomRequest(
                view.room, view.generation, named.decode_prefix_len, source.destinations, target
            )
            instructions.append(Tell(source.link, request))
        return instructions

    def _arrive(self, view: RoomView) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is not RoomState.REQUESTED:
            return []  # a failure was faster in the books, but the scheduler has its KV: both fine
        advance(view, Step.QUIET, TRANSITIONS_DECODE)
        # Everything has landed, so this only closes the tags; nothing waits for it.
        return [Fence(view, tuple(tag for tag, _ in view.seals))]

    # --- the ways down ---

    def _end(self, view: RoomView, end: RoomState, reason: str) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.over or view.state is RoomState.ENDING:
            return []
        view.reason, view.end = reason, end
        advance(view, Step.END, TRANSITIONS_DECODE)
        instructions: list[Instruction] = [
            Tell(source.link, RoomAbort(view.room, view.generation, reason))
            for source in room.sources
        ]
        if view.exposed:
            # First the fence: it alone makes the pages safe, and it needs no peer.
            instructions.insert(0, Fence(view, tuple(tag for tag, _ in view.seals)))
        else:
            advance(view, Step.QUIET, TRANSITIONS_DECODE)
            instructions += self._forget(room)
        return instructions

    def _fenced(self, view: RoomView) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None:
            return []
        self._free_slots.extend(room.slots)
        room.slots = ()
        if view.state is RoomState.ENDING:
            advance(view, Step.QUIET, TRANSITIONS_DECODE)
        return self._forget(room)

    def _forget(self, room: _Room) -> list[Instruction]:
        """The end. The scheduler still has the view; the table needs the room no more."""
        del self._rooms[room.view.serial]
        return [Over(room.view)]

    # --- peers and the clock ---

    def _link_up(self, link: Hashable) -> list[Instruction]:
        if self._links.get(link) is _Link.OPENING:
            self._links[link] = _Link.UP
            for room in self._rooms.values():
                self._meet_if_linked(room)
        return []

    def _link_down(self, link: Hashable, reason: str) -> list[Instruction]:
        self._links.pop(link, None)
        instructions: list[Instruction] = []
        for room in list(self._rooms.values()):
            if _leave_out(room, link):
                instructions += self._end(room.view, RoomState.FAILED, reason)
        return instructions

    def _link_refused(self, link: Hashable, reason: str) -> list[Instruction]:
        self._links.pop(link, None)
        instructions: list[Instruction] = []
        for room in list(self._rooms.values()):
            if any(source.link == link for source in room.sources):
                instructions += self._end(room.view, RoomState.FAILED, reason)
        return instructions

    def _peer_failed(self, link: Hashable, message: RoomFailed) -> list[Instruction]:
        for room in list(self._rooms.values()):
            view = room.view
            if (view.room, view.generation) == (message.room, message.generation) and _leave_out(
                room, link
            ):
                return self._end(view, RoomState.FAILED, message.reason)
        return []

    def _tick(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for room in list(self._rooms.values()):
            view = room.view
            if view.state is RoomState.OPEN:
                waited_s, limit_s = now_s - view.opened_s, self._deadlines.bootstrap_s
                what = "no data path to its prefill ranks stood"
                variable = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
            elif view.state is RoomState.REQUESTED and room.published_s is not None:
                waited_s, limit_s = now_s - room.published_s, self._deadlines.waiting_s
                what = "its KV cache did not arrive"
                variable = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
            else:
                continue
            if waited_s >= limit_s:
                instructions += self._end(
                    view,
                    RoomState.TIMED_OUT,
                    f"room {view.room}: {what} within {waited_s:.0f} s ({variable})",
                )
        return instructions


def _leave_out(room: _Room, link: Hashable) -> bool:
    """Takes a source out that knows of the room's end, or cannot be told; False if it is none."""
    others = tuple(source for source in room.sources if source.link != link)
    was_source = len(others) < len(room.sources)
    room.sources = others
    return was_source
