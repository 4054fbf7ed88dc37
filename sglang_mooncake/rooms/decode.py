# SPDX-License-Identifier: Apache-2.0
"""Rooms on the decode side: when pages are open for writing, what arrival is, when they are free.

`DecodeRooms.handle(event)` returns instructions; see `states.py` for the rules of this package. A
link, the way to one prefill rank, is whatever the shell names it by.
Arrival itself is no event: the scheduler's `poll()` reads the engine's counters (`RoomView.seals`),
so that it never waits for the loop thread.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_mooncake.messages import RoomAbort, RoomFailed, RoomRequest, pages_to_bytes
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
    "LinkUp",
    "OpenLink",
    "Opened",
    "Over",
    "PagesNamed",
    "PeerFailed",
    "SourcesChosen",
    "Tell",
    "Tick",
]


# --- events: what happened ---


@dataclass(frozen=True, slots=True)
class SourcesChosen:
    """Which prefill ranks feed this room, and how many decode ranks each of them feeds for it."""

    view: RoomView
    sources: tuple[Hashable, ...]
    destinations: int


@dataclass(frozen=True, slots=True)
class PagesNamed:
    view: RoomView
    pages: npt.NDArray[np.integer]
    aux_slot: int
    decode_prefix_len: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """`poll()` saw every seal: the scheduler has taken the room."""

    view: RoomView


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of this room can land any more."""

    view: RoomView


@dataclass(frozen=True, slots=True)
class LinkUp:
    link: Hashable


@dataclass(frozen=True, slots=True)
class LinkDown:
    link: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFailed:
    link: Hashable
    message: RoomFailed


Event = (
    Opened
    | SourcesChosen
    | PagesNamed
    | Arrived
    | Aborted
    | Broken
    | Closed
    | Fenced
    | LinkUp
    | LinkDown
    | PeerFailed
    | Tick
)


# --- instructions: what to do about it ---


@dataclass(frozen=True, slots=True)
class OpenLink:
    link: Hashable


@dataclass(frozen=True, slots=True)
class Expect:
    """Clear the seal slot, then open this tag for writing, before anybody is told of it."""

    tag: int
    slot: int


@dataclass(frozen=True, slots=True)
class Tell:
    link: Hashable
    message: RoomRequest | RoomAbort


@dataclass(frozen=True, slots=True)
class Fence:
    """Close these tags, then hand in `Fenced(view)`."""

    view: RoomView
    tags: tuple[int, ...]


Instruction = OpenLink | Expect | Tell | Fence | Over


class _Link(enum.Enum):
    OPENING = "opening"
    UP = "up"


@dataclass(slots=True, eq=False)
class _Room:
    view: RoomView
    sources: tuple[Hashable, ...] = ()
    destinations: int = 1
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
            case SourcesChosen(view, sources, destinations):
                return self._choose(view, sources, destinations)
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
            case PeerFailed(link, message):
                return self._peer_failed(link, message)
            case Tick():
                return self._tick(now_s)

    # --- the way up ---

    def _choose(
        self, view: RoomView, sources: tuple[Hashable, ...], destinations: int
    ) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is not RoomState.OPEN:
            return []
        room.sources, room.destinations = sources, destinations
        instructions: list[Instruction] = []
        for link in sources:
            if link not in self._links:
                self._links[link] = _Link.OPENING
                instructions.append(OpenLink(link))
        self._meet_if_linked(room)
        return instructions

    def _meet_if_linked(self, room: _Room) -> None:
        if room.view.state is not RoomState.OPEN or not room.sources:
            return
        if all(self._links.get(link) is _Link.UP for link in room.sources):
            advance(room.view, Step.MET, TRANSITIONS_DECODE)

    def _publish(self, view: RoomView, named: PagesNamed, now_s: float) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is not RoomState.READY:
            return []  # it ended between the scheduler's poll and its pages
        if len(self._free_slots) < len(room.sources):
            return self._end(
                view,
                RoomState.FAILED,
                f"all seal slots are in use ({len(self._rooms)} rooms are open on this rank)",
            )
        room.slots = tuple(self._free_slots.pop() for _ in room.sources)
        tags = tuple(range(self._next_tag, self._next_tag + len(room.sources)))
        self._next_tag += len(room.sources)
        room.published_s = now_s
        # The generation tells this use of the room number from any other; tags are never reused.
        view.generation = tags[0]
        view.seals = tuple(zip(tags, room.slots, strict=True))
        view.exposed = True
        advance(view, Step.PUBLISHED, TRANSITIONS_DECODE)
        pages = pages_to_bytes(named.pages)
        instructions: list[Instruction] = [Expect(tag, slot) for tag, slot in view.seals]
        instructions += [
            Tell(
                link,
                RoomRequest(
                    room=view.room,
                    generation=view.generation,
                    tag=tag,
                    num_pages=len(named.pages),
                    pages=pages,
                    aux_slot=named.aux_slot,
                    seal_slot=slot,
                    decode_prefix_len=named.decode_prefix_len,
                    destinations=room.destinations,
                ),
            )
            for link, tag, slot in zip(room.sources, tags, room.slots, strict=True)
        ]
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
            Tell(link, RoomAbort(view.room, view.generation, reason)) for link in room.sources
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
            if link in room.sources:
                room.sources = tuple(source for source in room.sources if source != link)
                instructions += self._end(room.view, RoomState.FAILED, reason)
        return instructions

    def _peer_failed(self, link: Hashable, message: RoomFailed) -> list[Instruction]:
        for room in list(self._rooms.values()):
            view = room.view
            if (view.room, view.generation) == (message.room, message.generation):
                room.sources = tuple(source for source in room.sources if source != link)
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
