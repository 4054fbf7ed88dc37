# SPDX-License-Identifier: Apache-2.0
"""Rooms on the decode side: when pages are open for writing, what arrival is, when they are free.

`DecodeRooms.handle(event)` returns instructions; see `states.py` for the rules of this package.
Arrival itself is no event: the scheduler's `poll()` compares seals with the engine's counters
(`RoomView.awaited`, `arrival.py`), so that it never waits for the loop thread.

Links are told of once, when they come up (`LinkUp`). A room whose links all stand when its sources
are chosen is ready at once; another asks for those that it lacks (`OpenLink`). A room ends when one
of its links goes (`LinkDown`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from sglang_mooncake.context import FIELD_NAMES, SettingNames
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomFailed,
    RoomWait,
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
    PeerComputed,
    PeerFailed,
    RoomSource,
    SourcesChosen,
    Tell,
    after_failure,
)
from sglang_mooncake.rooms.decode_table import DecodeRoom, DecodeTable
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.states import (
    RELEASED,
    TRANSITIONS_DECODE,
    RoomState,
    RoomView,
    Step,
    advance,
)
from sglang_mooncake.rooms.targets import Targets

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
    "PeerComputed",
    "PeerFailed",
    "RoomSource",
    "SourcesChosen",
    "Tell",
    "Tick",
    "after_failure",
]


#: The scheduler may keep a request waiting for free memory much longer than any other deadline
#: allows; this one only ends what it has forgotten.
READY_S = 3_600.0
#: States in which pages may be named. What is named before a room is ready waits for that.
_NAMEABLE = (RoomState.OPEN, RoomState.COMPUTING, RoomState.READY)


@dataclass(frozen=True, slots=True)
class DecodeDeadlines:
    """`bootstrap_s`: until the prefill ranks are known; `ready_s`: until the scheduler names pages;
    `waiting_s`: until the prompt is computed (where that is waited for), and until the KV has
    arrived."""

    bootstrap_s: float
    waiting_s: float
    ready_s: float = READY_S


class DecodeRooms:
    """All rooms of one decode rank.

    Args:
        seal_slots: how many seals the registered seal buffer holds; a bound on rooms × sources.
        first_generation: they count up from here, so that they differ from those of a former life.
        new_tag: a tag that was never used, and that nobody can guess.
        computed_first: a room is ready only once its prompt is computed (the allocation policy
            prefill_complete).
        names: what the deadlines are called.
    """

    def __init__(
        self,
        deadlines: DecodeDeadlines,
        seal_slots: int,
        first_generation: int,
        new_tag: Callable[[], int],
        computed_first: bool = False,
        names: SettingNames = FIELD_NAMES,
    ) -> None:
        self._deadlines, self._names = deadlines, names
        self._table = DecodeTable()
        self._free_slots = list(range(seal_slots - 1, -1, -1))
        self._next_generation = first_generation
        self._new_tag, self._computed_first = new_tag, computed_first

    def __len__(self) -> int:
        return len(self._table)

    @property
    def standing(self) -> Mapping[Hashable, int]:
        """The links that stand. Any thread may ask; what it gets never changes."""
        return self._table.standing

    @property
    def free_seal_slots(self) -> int:
        return len(self._free_slots)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Applies one event. Idempotent where peers may repeat themselves."""
        match event:
            case Opened(view):
                self._table.add(view)
                return []
            case SourcesChosen(view, sources):
                return self._choose(view, sources, now_s)
            case NotServed(view, links, reason):
                return self._not_served(view, links, reason)
            case PagesNamed(view):
                return self._name(view, event, now_s)
            case Arrived(view):
                return self._arrive(view)
            case Aborted(view, reason):
                return self._end(view, RoomState.ABORTED, reason)
            case Broken(view, reason):
                return self._end(view, RoomState.FAILED, reason)
            case Closed(view):
                return self._end(view, RoomState.ABORTED, RELEASED)
            case Fenced(view):
                return self._fenced(view)
            case LinkUp(link, layers):
                return self._link_up(link, layers, now_s)
            case LinkDown(link, reason):
                return self._link_gone(link, reason, refused=False)
            case LinkRefused(link, reason):
                return self._link_gone(link, reason, refused=True)
            case PeerComputed(link, said):
                return self._peer_computed(link, said, now_s)
            case PeerFailed(link, message):
                return self._peer_failed(link, message)
            case Tick():
                return self._tick(now_s)

    # --- the way up ---

    def _choose(
        self, view: RoomView, sources: tuple[RoomSource, ...], now_s: float
    ) -> list[Instruction]:
        room = self._table.get(view)
        if room is None or view.state is not RoomState.OPEN:
            return []
        self._table.ask(room, sources)
        return _open_links(room) if room.unlinked else self._linked(room, now_s)

    def _not_served(
        self, view: RoomView, links: tuple[Hashable, ...], reason: str
    ) -> list[Instruction]:
        room = self._table.get(view)
        if room is None or view.state is not RoomState.OPEN:
            return []
        sources = tuple(RoomSource(link, sends=False, aux=False) for link in links)
        self._table.ask(room, sources)
        return _open_links(room) + self._end(view, RoomState.FAILED, reason, refused=True)

    def _name(self, view: RoomView, named: PagesNamed, now_s: float) -> list[Instruction]:
        room = self._table.get(view)
        if room is None or view.state not in _NAMEABLE:
            return []  # it ended between the scheduler's poll and its pages
        room.targets = Targets(named)
        return self._publish(room, now_s) if view.state is RoomState.READY else []

    def _meet(self, room: DecodeRoom, now_s: float) -> list[Instruction]:
        """All prefill ranks are ready to be asked, which is for those whose pages have a name."""
        room.since_s = room.view.times.met_s = now_s
        if room.targets is not None:
            return self._publish(room, now_s, Step.MET)
        advance(room.view, TRANSITIONS_DECODE, Step.MET)
        return []

    def _publish(self, room: DecodeRoom, now_s: float, *met: Step) -> list[Instruction]:
        """`met`: the step that makes the room ready, if it is not yet."""
        view, targets = room.view, room.targets
        assert targets is not None
        room.targets = None  # as many numbers as the prompt has pages
        if view.withdrawn:
            advance(view, TRANSITIONS_DECODE, *met)
            return []  # the event that ends it follows; its pages stay what they are
        sending = [source for source in room.sources if source.sends]
        if len(self._free_slots) < len(sending):
            return self._end(
                view,
                RoomState.FAILED,
                f"all seal slots are in use ({len(self._table)} rooms are open on this rank)",
            )
        room.slots = tuple(self._free_slots.pop() for _ in sending)
        room.since_s = view.times.planned_s = now_s
        self._name_use(room)
        layers = self._table.standing
        view.awaited = tuple(
            targets.awaited(source, layers[source.link], view.generation, self._new_tag(), slot)
            for source, slot in zip(sending, room.slots, strict=True)
        )
        view.exposed = True
        advance(view, TRANSITIONS_DECODE, *met, Step.PUBLISHED)
        expect = [
            Expect(view, source.link, awaited.tag, awaited.slot)
            for source, awaited in zip(sending, view.awaited, strict=True)
        ]
        by_link = dict(zip((source.link for source in sending), view.awaited, strict=True))
        tell = [
            Tell(source.link, targets.request(source, view, by_link.get(source.link)))
            for source in room.sources
        ]
        return [*expect, *tell]

    def _name_use(self, room: DecodeRoom) -> None:
        if not room.view.generation:
            self._table.name_use(room, self._next_generation)
            self._next_generation += 1

    def _arrive(self, view: RoomView) -> list[Instruction]:
        room = self._table.get(view)
        if room is None or view.state is not RoomState.REQUESTED:
            return []  # a failure was faster in the books, but the scheduler has its KV: both fine
        advance(view, TRANSITIONS_DECODE, Step.QUIET)
        # Everything has landed, so this only closes the tags; nothing waits for it.
        return [_fence(view)]

    # --- the ways down ---

    def _end(
        self, view: RoomView, end: RoomState, reason: str, *, refused: bool = False
    ) -> list[Instruction]:
        room = self._table.get(view)
        if room is None or view.over or view.state is RoomState.ENDING:
            return []
        view.reason, view.end = reason, end
        tell: list[Instruction] = [
            Tell(source.link, RoomAbort(view.room, view.generation, reason, refused))
            for source in room.sources
        ]
        if not view.exposed:
            return tell + self._forget(room, Step.END, Step.QUIET)
        advance(view, TRANSITIONS_DECODE, Step.END)
        # First the fence: it alone makes the pages safe, and it needs no peer.
        return [_fence(view), *tell]

    def _fenced(self, view: RoomView) -> list[Instruction]:
        room = self._table.get(view)
        if room is None:
            return []
        self._free_slots.extend(room.slots)
        room.slots = ()
        return self._forget(room, *(() if view.over else (Step.QUIET,)))

    def _forget(self, room: DecodeRoom, *steps: Step) -> list[Instruction]:
        """The end. The scheduler still has the view; the table needs the room no more."""
        room.view.safe = True
        advance(room.view, TRANSITIONS_DECODE, *steps)
        self._table.drop(room)
        return [Over(room.view)]

    # --- peers and the clock ---

    def _link_up(self, link: Hashable, layers: int, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for room in self._table.link_up(link, layers):
            if room.view.state is RoomState.OPEN:
                instructions += self._linked(room, now_s)
        return instructions

    def _linked(self, room: DecodeRoom, now_s: float) -> list[Instruction]:
        if not self._computed_first:
            return self._meet(room, now_s)
        view = room.view
        room.since_s = now_s
        self._name_use(room)
        room.computing = frozenset(source.link for source in room.sources)
        advance(view, TRANSITIONS_DECODE, Step.LINKED)
        return [Tell(source.link, RoomWait(view.room, view.generation)) for source in room.sources]

    def _link_gone(self, link: Hashable, reason: str, *, refused: bool) -> list[Instruction]:
        """Its rank is told, too: by the next link, if there is none to say it over."""
        self._table.link_down(link)
        instructions: list[Instruction] = []
        for room in self._table.of_link(link):
            # A room that has asked another rank has a generation, and that one knows it.
            never_asked = refused and not room.view.generation
            instructions += self._end(room.view, RoomState.FAILED, reason, refused=never_asked)
        return instructions

    def _peer_computed(
        self, link: Hashable, message: RoomComputed, now_s: float
    ) -> list[Instruction]:
        room = self._table.of_use(link, message.room, message.generation)
        if room is None or room.view.state is not RoomState.COMPUTING:
            return []
        room.computing -= {link}
        return [] if room.computing else self._meet(room, now_s)

    def _peer_failed(self, link: Hashable, message: RoomFailed) -> list[Instruction]:
        room = self._table.of_use(link, message.room, message.generation)
        if room is None:
            return []
        self._table.leave_out(room, link)
        return self._end(room.view, RoomState.FAILED, message.reason)

    def _tick(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for room in self._table:
            late = _late(room, self._deadlines, self._names, now_s)
            if late is not None:
                reason = f"room {room.view.room}: {late}"
                instructions += self._end(room.view, RoomState.TIMED_OUT, reason)
        return instructions


def _late(
    room: DecodeRoom, deadlines: DecodeDeadlines, names: SettingNames, now_s: float
) -> str | None:
    """Which deadline the room has missed; None when it has not."""
    name: str | None
    match room.view.state:
        case RoomState.OPEN:
            waited_s, limit_s = now_s - room.view.opened_s, deadlines.bootstrap_s
            what, name = "could not connect to all prefill ranks", names.bootstrap
        case RoomState.COMPUTING:
            waited_s, limit_s = now_s - room.since_s, deadlines.waiting_s
            what, name = "the prefill server did not compute the prompt", names.waiting
        case RoomState.READY:
            waited_s, limit_s = now_s - room.since_s, deadlines.ready_s
            what, name = "the decode server's scheduler allocated no pages for the request", None
        case RoomState.REQUESTED:
            waited_s, limit_s = now_s - room.since_s, deadlines.waiting_s
            what, name = "the KV cache did not arrive", names.waiting
        case _:
            return None
    if waited_s < limit_s:
        return None
    return f"{what} within {waited_s:.0f} s" + (f" ({name})" if name else "")


def _open_links(room: DecodeRoom) -> list[Instruction]:
    """Those that it waits for, in the order of its sources."""
    links = dict.fromkeys(source.link for source in room.sources)
    return [OpenLink(link) for link in links if link in room.unlinked]


def _fence(view: RoomView) -> Fence:
    return Fence(view, tuple(awaited.tag for awaited in view.awaited))
