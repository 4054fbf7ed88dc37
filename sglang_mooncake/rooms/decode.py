# SPDX-License-Identifier: Apache-2.0
"""Rooms on the decode side: when pages are open for writing, what arrival is, when they are free.

`DecodeRooms.handle(event)` returns instructions; see `states.py` for the rules of this package.
Arrival itself is no event: the scheduler's `poll()` compares completion records with the engine's
counters (`RoomView.expected`, `arrival.py`), so that it never waits for the loop thread.

Links are told of once, when they come up (`LinkUp`). A room whose links all stand when its sources
are chosen is ready at once; another asks for those that it lacks (`OpenLink`). A room ends when one
of its links goes (`LinkDown`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from sglang_mooncake.context import FIELD_NAMES, SettingNames
from sglang_mooncake.layout import Verify
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomDigests,
    RoomFailed,
    RoomWait,
)
from sglang_mooncake.rooms.decode_deadlines import DecodeDeadlines, overdue
from sglang_mooncake.rooms.decode_events import (
    Arrived,
    Compare,
    Differs,
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
    PeerDigested,
    PeerFailed,
    RoomSource,
    SourcesChosen,
    Tell,
    Verified,
    after_failure,
)
from sglang_mooncake.rooms.decode_table import DecodeRoom, DecodeTable
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.room import Publisher, Room
from sglang_mooncake.rooms.states import RELEASED, TRANSITIONS_DECODE, RoomState, Step
from sglang_mooncake.rooms.targets import Targets

__all__ = [
    "Aborted",
    "Arrived",
    "Broken",
    "Closed",
    "Compare",
    "DecodeDeadlines",
    "DecodeRooms",
    "Differs",
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
    "PeerDigested",
    "PeerFailed",
    "RoomSource",
    "SourcesChosen",
    "Tell",
    "Tick",
    "Verified",
    "after_failure",
]


#: States in which pages may be named. What is named before a room is ready waits for that.
_NAMEABLE = (RoomState.OPEN, RoomState.COMPUTING, RoomState.READY)


class DecodeRooms:
    """All rooms of one decode rank.

    Args:
        completion_slots: how many completion records the registered buffer holds; a bound on
            rooms × sources.
        first_generation: they count up from here, so that they differ from those of a former life.
        new_tag: a tag that was never used, and that nobody can guess.
        computed_first: a room is ready only once its prompt is computed (the allocation policy
            prefill_complete).
        names: what the deadlines are called.
        verify: how much is to be digested, at least.
    """

    def __init__(
        self,
        deadlines: DecodeDeadlines,
        completion_slots: int,
        first_generation: int,
        new_tag: Callable[[], int],
        computed_first: bool = False,
        names: SettingNames = FIELD_NAMES,
        verify: Verify = Verify.OFF,
    ) -> None:
        self._deadlines, self._names = deadlines, names
        self._table = DecodeTable()
        self._views = Publisher(TRANSITIONS_DECODE)
        self._free_slots = list(range(completion_slots - 1, -1, -1))
        self._next_generation = first_generation
        self._new_tag, self._computed_first = new_tag, computed_first
        self._verify = verify

    def __len__(self) -> int:
        return len(self._table)

    @property
    def standing(self) -> Mapping[Hashable, int]:
        """The links that stand. Any thread may ask; what it gets never changes."""
        return self._table.standing

    @property
    def free_completion_slots(self) -> int:
        return len(self._free_slots)

    @property
    def rooms(self) -> list[Room]:
        """Those that are not over. Any thread may ask."""
        return self._table.rooms

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Applies one event, and then shows what has become of the rooms. Idempotent where peers
        may repeat themselves."""
        try:
            return self._apply(event, now_s)
        finally:
            self._views.publish()

    def _apply(self, event: Event, now_s: float) -> list[Instruction]:
        match event:
            case Opened(room):
                self._table.add(room)
                return []
            case SourcesChosen(room, sources):
                return self._choose(room, sources, now_s)
            case NotServed(room, links, reason):
                return self._not_served(room, links, reason)
            case PagesNamed(room):
                return self._name(room, event, now_s)
            case Arrived():
                return self._arrive(event)
            case Aborted(room, reason):
                return self._end(self._table.get(room), RoomState.ABORTED, reason)
            case Broken(room, reason):
                return self._end(self._table.get(room), RoomState.FAILED, reason)
            case Closed(room):
                return self._end(self._table.get(room), RoomState.ABORTED, RELEASED)
            case Fenced(room):
                return self._fenced(room)
            case LinkUp(link, layers):
                return self._link_up(link, layers, now_s)
            case LinkDown(link, reason):
                return self._link_gone(link, reason, refused=False)
            case LinkRefused(link, reason):
                return self._link_gone(link, reason, refused=True)
            case PeerComputed(link, said):
                return self._peer_computed(link, said, now_s)
            case PeerDigested(link, message):
                return self._peer_digested(link, message)
            case Differs(room, tell):
                return [] if self._requested(room) is None else [tell]
            case Verified():
                return self._verified(event)
            case PeerFailed(link, message):
                return self._peer_failed(link, message)
            case Tick():
                return self._tick(now_s)

    # --- the way up ---

    def _choose(
        self, room: Room, sources: tuple[RoomSource, ...], now_s: float
    ) -> list[Instruction]:
        record = self._table.get(room)
        if record is None or record.view.state is not RoomState.OPEN:
            return []
        self._table.ask(record, sources)
        self._views.change(record, peers=tuple(source.link for source in sources))
        return _open_links(record) if record.unlinked else self._linked(record, now_s)

    def _not_served(
        self, room: Room, links: tuple[Hashable, ...], reason: str
    ) -> list[Instruction]:
        record = self._table.get(room)
        if record is None or record.view.state is not RoomState.OPEN:
            return []
        sources = tuple(RoomSource(link, sends=False, aux=False) for link in links)
        self._table.ask(record, sources)
        return _open_links(record) + self._end(record, RoomState.FAILED, reason, refused=True)

    def _name(self, room: Room, named: PagesNamed, now_s: float) -> list[Instruction]:
        record = self._table.get(room)
        if record is None or record.view.state not in _NAMEABLE:
            return []  # it ended between the scheduler's poll and its pages
        record.targets = Targets(named)
        self._views.change(record, num_pages=len(named.pages))
        self._views.mark(record, named_s=named.named_s)
        return self._publish(record, now_s) if record.view.state is RoomState.READY else []

    def _meet(self, record: DecodeRoom, now_s: float) -> list[Instruction]:
        """All prefill ranks are ready to be asked, which is for those whose pages have a name."""
        record.since_s = now_s
        self._views.mark(record, met_s=now_s)
        if record.targets is not None:
            return self._publish(record, now_s, Step.MET)
        self._views.advance(record, Step.MET)
        return []

    def _publish(self, record: DecodeRoom, now_s: float, *met: Step) -> list[Instruction]:
        """`met`: the step that makes the room ready, if it is not yet."""
        targets = record.targets
        assert targets is not None
        record.targets = None  # as many numbers as the prompt has pages
        if record.room.withdrawn:
            self._views.advance(record, *met)
            return []  # the event that ends it follows; its pages stay what they are
        sending = [source for source in record.sources if source.sends]
        if len(self._free_slots) < len(sending):
            return self._end(
                record,
                RoomState.FAILED,
                f"all slots for completion records are in use ({len(self._table)} rooms are open "
                "on this rank)",
            )
        record.slots = tuple(self._free_slots.pop() for _ in sending)
        record.since_s = now_s
        self._name_use(record)
        self._views.mark(record, planned_s=now_s)
        number, generation = record.room.number, record.view.generation
        layers = self._table.standing
        expected = tuple(
            targets.expected(
                source, layers[source.link], generation, self._new_tag(), slot, self._verify
            )
            for source, slot in zip(sending, record.slots, strict=True)
        )
        self._views.advance(record, *met, Step.PUBLISHED, expected=expected, exposed=True)
        by_link = dict(zip((source.link for source in sending), expected, strict=True))
        expect = [
            Expect(record.room, link, expected.tag, expected.slot)
            for link, expected in by_link.items()
        ]
        requests = {
            source.link: targets.request(
                source, number, generation, by_link.get(source.link), self._verify
            )
            for source in record.sources
        }
        record.asked = {link: (requests[link], one) for link, one in by_link.items()}
        tell = [Tell(source.link, requests[source.link]) for source in record.sources]
        return [*expect, *tell]

    def _name_use(self, record: DecodeRoom) -> None:
        if not record.view.generation:
            self._views.change(record, generation=self._next_generation)
            self._table.name_use(record, self._next_generation)
            self._next_generation += 1

    def _arrive(self, arrived: Arrived) -> list[Instruction]:
        record = self._requested(arrived.room)
        if record is None:
            return []  # a failure was faster in the books, but the scheduler has its KV: both fine
        self._views.mark(record, landed_s=arrived.at_s)
        self._views.advance(record, Step.QUIET, landed_nbytes=arrived.landed_nbytes)
        # Everything has landed, so this only closes the tags; nothing waits for it.
        return [_fence(record)]

    # --- the ways down ---

    def _end(
        self, record: DecodeRoom | None, end: RoomState, reason: str, *, refused: bool = False
    ) -> list[Instruction]:
        if record is None or record.view.decided:
            return []
        self._views.change(record, reason=reason, end=end)
        abort = RoomAbort(record.room.number, record.view.generation, reason, refused)
        tell: list[Instruction] = [Tell(source.link, abort) for source in record.sources]
        if not record.view.exposed:
            return tell + self._forget(record, Step.END, Step.QUIET)
        self._views.advance(record, Step.END)
        # First the fence: it alone makes the pages safe, and it needs no peer.
        return [_fence(record), *tell]

    def _fenced(self, room: Room) -> list[Instruction]:
        record = self._table.get(room)
        if record is None:
            return []
        self._free_slots.extend(record.slots)
        record.slots = ()
        return self._forget(record, *(() if record.view.over else (Step.QUIET,)))

    def _forget(self, record: DecodeRoom, *steps: Step) -> list[Instruction]:
        """The end. The scheduler still has the room; the table needs it no more."""
        self._views.advance(record, *steps, safe=True)
        self._table.drop(record)
        return [Over(record.room)]

    # --- peers and the clock ---

    def _link_up(self, link: Hashable, layers: int, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for record in self._table.link_up(link, layers):
            if record.view.state is RoomState.OPEN:
                instructions += self._linked(record, now_s)
        return instructions

    def _linked(self, record: DecodeRoom, now_s: float) -> list[Instruction]:
        if not self._computed_first:
            return self._meet(record, now_s)
        record.since_s = now_s
        self._name_use(record)
        record.computing = frozenset(source.link for source in record.sources)
        self._views.advance(record, Step.LINKED)
        wait = RoomWait(record.room.number, record.view.generation)
        return [Tell(source.link, wait) for source in record.sources]

    def _link_gone(self, link: Hashable, reason: str, *, refused: bool) -> list[Instruction]:
        """Its rank is told, too: by the next link, if there is none to say it over."""
        self._table.link_down(link)
        instructions: list[Instruction] = []
        for record in self._table.of_link(link):
            # A room that has asked another rank has a generation, and that one knows it.
            never_asked = refused and not record.view.generation
            instructions += self._end(record, RoomState.FAILED, reason, refused=never_asked)
        return instructions

    def _peer_computed(
        self, link: Hashable, message: RoomComputed, now_s: float
    ) -> list[Instruction]:
        record = self._table.of_use(link, message.room, message.generation)
        if record is None or record.view.state is not RoomState.COMPUTING:
            return []
        record.computing -= {link}
        return [] if record.computing else self._meet(record, now_s)

    def _peer_digested(self, link: Hashable, message: RoomDigests) -> list[Instruction]:
        record = self._table.of_use(link, message.room, message.generation)
        if record is None or record.view.state is not RoomState.REQUESTED:
            return []
        asked = dict(record.asked)
        if (found := asked.pop(link, None)) is None:
            return []  # said before
        record.asked = asked
        return [Compare(record.room, link, *found, message)]

    def _requested(self, room: Room) -> DecodeRoom | None:
        """None of one that is not waiting for its pages."""
        record = self._table.get(room)
        is_waiting = record is not None and record.view.state is RoomState.REQUESTED
        return record if is_waiting else None

    def _verified(self, verified: Verified) -> list[Instruction]:
        record = self._requested(verified.room)
        if record is None:
            return []
        if verified.failure is not None:
            return self._end(record, RoomState.FAILED, verified.failure)
        self._views.change(record, verified=record.view.verified | {verified.tag})
        return []

    def _peer_failed(self, link: Hashable, message: RoomFailed) -> list[Instruction]:
        record = self._table.of_use(link, message.room, message.generation)
        if record is None:
            return []
        self._table.leave_out(record, link)
        return self._end(record, RoomState.FAILED, message.reason)

    def _tick(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for record in self._table:
            missed = overdue(record, self._deadlines, self._names, now_s)
            if missed is not None:
                reason = f"room {record.room.number}: {missed}"
                instructions += self._end(record, RoomState.TIMED_OUT, reason)
        return instructions


def _open_links(record: DecodeRoom) -> list[Instruction]:
    """Those that it waits for, in the order of its sources."""
    links = dict.fromkeys(source.link for source in record.sources)
    return [OpenLink(link) for link in links if link in record.unlinked]


def _fence(record: DecodeRoom) -> Fence:
    return Fence(record.room, tuple(expected.tag for expected in record.view.expected))
