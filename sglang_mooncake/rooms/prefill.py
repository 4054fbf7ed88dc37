# SPDX-License-Identifier: Apache-2.0
"""Rooms on the prefill side: which chunk goes to whom, and when a room is over.

`PrefillRooms.handle(event)` returns instructions; see `states.py` for the rules of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from sglang_mooncake.context import FIELD_NAMES, SettingNames
from sglang_mooncake.layout import ALL, Dealt, Layers
from sglang_mooncake.layout.indices import owned
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomFailed,
    RoomRequest,
    RoomWait,
)
from sglang_mooncake.rooms.checks import chunk_problem, disagreement, layers_problem
from sglang_mooncake.rooms.early import Early, EarlyRooms
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.prefill_events import (
    Awaited,
    CancelWrites,
    Chunk,
    ChunkSent,
    Computed,
    Event,
    FellBack,
    Instruction,
    LayersFilled,
    Met,
    PeerLost,
    Requested,
    RoomAborted,
    Tell,
    Write,
    WriteBegan,
    WriteEnded,
)
from sglang_mooncake.rooms.prefill_room import (
    Deadlines,
    PrefillRoom,
    abort_of_nobody_else,
    overdue,
    peer_gave_up,
)
from sglang_mooncake.rooms.recipient import PairPlan, Recipient
from sglang_mooncake.rooms.room import Publisher, Room
from sglang_mooncake.rooms.states import RELEASED, TRANSITIONS_PREFILL, RoomState, Step

__all__ = [
    "Aborted",
    "Awaited",
    "Broken",
    "CancelWrites",
    "Chunk",
    "ChunkSent",
    "Closed",
    "Computed",
    "Event",
    "FellBack",
    "Instruction",
    "LayersFilled",
    "Met",
    "Opened",
    "Over",
    "PeerLost",
    "PrefillRooms",
    "Requested",
    "RoomAborted",
    "Tell",
    "Tick",
    "Write",
    "WriteBegan",
    "WriteEnded",
]

#: Rooms that ended badly are remembered, so that a decode rank which asks later is told at once.
ENDED_ROOMS_MAX = 4_096
#: A decode rank, which pages of a chunk it is to have (positions in the room), and how many of them
#: this rank has.
_Part = tuple[str, Recipient, range, int]
#: Writes of layers before their chunk, of all rooms. Engine and peers take a bounded number of
#: transfers, and must have room for chunks.
EARLY_WRITES_MAX = 4_096
#: Requests that were met or refused are remembered, so that what is said of them late ends no later
#: use of the same room number.
ANSWERED_MAX = 65_536


class PrefillRooms:
    """All rooms of one prefill rank.

    Args:
        plan_of: the plan of the copy to a peer that has asked; raises LookupError.
        bootstrap_timeout_s: how long a room waits for its decode ranks, and a request for its room.
        chunk_timeout_s: how long a room waits for its scheduler's next chunk. Long before, a decode
            rank gives up and says so; this is for one whose word never comes.
        computed_first: decode ranks ask for a room only once its prompt is computed (the policy
            prefill_complete), so that it waits for them from then on.
        pages_dealt: which of the pages of a chunk this rank has (`Layout.pages_dealt`).
        names: what the two deadlines are called: `chunk_timeout_s` is twice that of `waiting`.
    """

    def __init__(
        self,
        plan_of: Callable[[str], PairPlan],
        bootstrap_timeout_s: float,
        chunk_timeout_s: float,
        computed_first: bool = False,
        pages_dealt: Dealt = ALL,
        names: SettingNames = FIELD_NAMES,
    ) -> None:
        self._deadlines = Deadlines(bootstrap_timeout_s, chunk_timeout_s, computed_first, names)
        self._plan_of, self._pages_dealt = plan_of, pages_dealt
        self._rooms: dict[int, PrefillRoom] = {}  # by serial: a number may be in use twice
        self._current: dict[int, PrefillRoom] = {}  # by room number: the newest use
        self._views = Publisher(TRANSITIONS_PREFILL)
        self._early = EarlyRooms(bootstrap_timeout_s, names.bootstrap)
        self._ended: dict[int, str] = {}  # room number → why it ended badly
        self._answered: dict[tuple[str, int], int] = {}  # (peer, room number) → newest generation
        self._early_writes = 0  # under way

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def rooms(self) -> list[Room]:
        """Those that are not over. Any thread may ask."""
        return [record.room for record in self._rooms.copy().values()]  # the copy is one step

    def handle(self, event: Event, now_s: float) -> Iterator[Instruction]:
        """Applies one event while its instructions are taken. Idempotent where peers may repeat
        themselves.

        Carry each instruction out before you take the next: a chunk for several decode ranks is
        planned for one of them at a time, and its pages leave for the first while nothing is known
        of the second. What has become of the rooms is shown before each instruction. Take all of
        them before the next event.
        """
        try:
            for instruction in self._apply(event, now_s):
                self._views.publish()
                yield instruction
        finally:
            self._views.publish()

    def _apply(self, event: Event, now_s: float) -> Iterable[Instruction]:
        match event:
            case Opened(room):
                return self._open(room, now_s)
            case ChunkSent(room, chunk):
                record = self._rooms.get(room.serial)
                return [] if record is None else self._chunk(record, chunk, now_s)
            case LayersFilled():
                return self._layers_filled(event, now_s)
            case Aborted(room, reason):
                return self._end(self._rooms.get(room.serial), RoomState.ABORTED, reason)
            case Broken(room, reason):
                return self._end(self._rooms.get(room.serial), RoomState.FAILED, reason)
            case Closed(room):
                return self._end(self._rooms.get(room.serial), RoomState.ABORTED, RELEASED)
            case Computed(room):
                return self._computed(room, now_s)
            case Awaited(peer, wait):
                return self._await(peer, wait, now_s)
            case Requested(peer, request):
                return self._request(peer, request, now_s)
            case RoomAborted(peer, message):
                return self._peer_abort(peer, message, now_s)
            case WriteBegan(room, at_s):
                record = self._rooms.get(room.serial)
                if record is not None:
                    self._views.mark(record, posted_s=at_s)
                return []
            case WriteEnded():
                return self._write_ended(event, now_s)
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason, now_s)
            case Tick():
                return self._tick(now_s)

    # --- events of the scheduler ---

    def _open(self, room: Room, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        former = self._current.get(room.number)
        if former is not None:
            instructions += self._end(
                former,
                RoomState.SUPERSEDED,
                f"room {room.number} was opened again by a newer request",
            )
        self._rooms[room.serial] = self._current[room.number] = PrefillRoom(room)
        self._ended.pop(room.number, None)
        for early in self._early.take(room.number):
            match early.message:
                case RoomRequest():
                    instructions += self._request(early.peer, early.message, now_s)
                case RoomWait():
                    instructions += self._await(early.peer, early.message, now_s)
                case RoomAbort():
                    instructions += self._peer_abort(early.peer, early.message, now_s)
        return instructions

    def _computed(self, room: Room, now_s: float) -> list[Instruction]:
        record = self._rooms.get(room.serial)
        if record is None or record.view.state is not RoomState.OPEN:
            return []
        if record.computed_s is not None:
            return []
        record.computed_s = now_s
        return [
            Tell(peer, RoomComputed(room.number, generation))
            for peer, generation in record.waiting.items()
        ]

    def _layers_filled(self, filled: LayersFilled, now_s: float) -> Iterable[Instruction]:
        room = filled.room
        record = self._rooms.get(room.serial)
        if record is None or record.view.state not in (RoomState.READY, RoomState.SENDING):
            return []  # it has ended, or its last chunk was sent
        if self._early_writes >= EARLY_WRITES_MAX:
            return [FellBack(room, "too many early writes of layers are under way")]
        chunk = Chunk(filled.pages, filled.first, None, filled.sent_s)
        problem = layers_problem(record.requests, chunk)
        layers = problem or record.early.announce(filled, record.next_page)
        if isinstance(layers, str):
            return [FellBack(room, layers)]
        if not layers:
            return []
        self._views.change(record, exposed=True)
        record.moved_s = now_s
        return self._write_early(record, chunk, layers)

    def _write_early(
        self, record: PrefillRoom, chunk: Chunk, layers: Layers
    ) -> Iterator[Instruction]:
        for peer, recipient, span, pages in self._parts(record, chunk):
            try:
                write = recipient.write_early(record.room, peer, chunk, span, pages, layers)
            except ValueError as error:
                yield from self._end(record, RoomState.FAILED, _cannot_plan(chunk, error))
                return
            record.early.wrote(write)
            yield self._begun(record, write)

    def _chunk(self, record: PrefillRoom, chunk: Chunk, now_s: float) -> Iterable[Instruction]:
        if record.view.over or record.view.state is RoomState.ENDING:
            return []  # the scheduler had not yet seen the end when it sent this
        early = record.early
        unannounced = early.contradicts(chunk)
        if early.held or (unannounced and record.writes_early):
            early.held.append(chunk)
            record.moved_s = now_s
            return []
        if problem := chunk_problem(record.view.state, record.next_page, record.requests, chunk):
            return self._end(record, RoomState.FAILED, problem)
        parts = self._parts(record, chunk)
        self._views.change(record, exposed=True, num_pages=chunk.span.stop)
        step = Step.LAST_CHUNK if chunk.is_last else Step.CHUNK
        record.next_page = chunk.span.stop
        record.moved_s = now_s
        if chunk.is_last:
            self._views.mark(record, named_s=chunk.sent_s, planned_s=now_s)
        fell_back: list[Instruction] = []
        if unannounced:
            reason = "a chunk was sent with other pages than were announced"
            fell_back = [FellBack(record.room, reason)]
        layers, early_page_layers = early.take(chunk)
        if chunk.is_last and not parts and not record.writes:
            # None of those who asked wants a byte from this rank, or they have all.
            return fell_back + self._forget(record, step, Step.QUIET)
        self._views.advance(record, step)
        return chain(self._write(record, chunk, parts, layers, early_page_layers), fell_back)

    def _write(
        self,
        record: PrefillRoom,
        chunk: Chunk,
        parts: list[_Part],
        layers: Layers,
        early_page_layers: Mapping[str, int],
    ) -> Iterator[Instruction]:
        for peer, recipient, span, pages in parts:
            early = early_page_layers.get(peer, 0)
            try:
                write = recipient.write(record.room, peer, chunk, span, pages, layers, early)
            except ValueError as error:
                yield from self._end(record, RoomState.FAILED, _cannot_plan(chunk, error))
                return
            yield self._begun(record, write)

    def _parts(self, record: PrefillRoom, chunk: Chunk) -> list[_Part]:
        parts = []
        for peer, recipient in record.recipients.items():
            target = recipient.request.target
            if target is None:
                continue
            span = target.share.within(chunk.span, target.num_pages * target.page_span)
            pages = self._count(chunk, span)
            if pages or chunk.is_last:  # the last one carries the seal, with or without pages
                parts.append((peer, recipient, span, pages))
        return parts

    def _begun(self, record: PrefillRoom, write: Write) -> Write:
        record.writes[write.key] = write
        self._early_writes += write.early
        return write

    def _count(self, chunk: Chunk, span: range) -> int:
        """How many pages at these positions of the room this rank has."""
        if self._pages_dealt == ALL:
            return len(span)
        pages = chunk.pages[span.start - chunk.first : span.stop - chunk.first]
        return int(owned(pages, self._pages_dealt).sum())

    # --- events of peers ---

    def _await(self, peer: str, wait: RoomWait, now_s: float) -> list[Instruction]:
        if wait.generation <= self._answered.get((peer, wait.room), -1):
            return []  # a repetition
        record = self._current.get(wait.room)
        if record is None or record.view.state is not RoomState.OPEN or peer in record.recipients:
            return self._too_late(peer, wait) or self._too_early(peer, wait, now_s)
        abort, _ = record.aborts.pop(peer, (None, 0.0))
        if abort is not None and abort.generation >= wait.generation:
            return self._end(record, RoomState.ABORTED, peer_gave_up(abort))
        record.waiting[peer] = wait.generation
        if record.computed_s is None:
            return []
        return [Tell(peer, RoomComputed(wait.room, wait.generation))]

    def _request(self, peer: str, request: RoomRequest, now_s: float) -> list[Instruction]:
        if request.generation <= self._answered.get((peer, request.room), -1):
            return []  # a repetition
        record = self._current.get(request.room)
        is_open = record is not None and record.view.state is RoomState.OPEN
        if record is not None and is_open and peer not in record.recipients:
            return self._meet(record, peer, request, now_s)
        return self._too_late(peer, request) or self._too_early(peer, request, now_s)

    def _too_late(self, peer: str, request: RoomRequest | RoomWait) -> list[Instruction]:
        """What is said of a room that has ended badly; nothing if it has not."""
        ended = self._ended.get(request.room)
        if ended is None:
            return []
        self._remember(peer, request)
        return [Tell(peer, RoomFailed(request.room, request.generation, ended))]

    def _too_early(
        self, peer: str, request: RoomRequest | RoomWait, now_s: float
    ) -> list[Instruction]:
        self._early.request(peer, request, now_s)
        return self._refuse(self._early.crowd(peer))

    def _meet(
        self, record: PrefillRoom, peer: str, request: RoomRequest, now_s: float
    ) -> list[Instruction]:
        self._remember(peer, request)
        record.waiting.pop(peer, None)
        abort, _ = record.aborts.pop(peer, (None, 0.0))
        if abort is not None and abort.generation >= request.generation:
            return self._end(record, RoomState.ABORTED, peer_gave_up(abort))
        record.recipients[peer] = Recipient(request, self._plan_of(peer))
        if problem := disagreement(record.requests):
            return self._end(record, RoomState.FAILED, problem)
        if len(record.recipients) == request.destinations:
            record.moved_s = now_s
            self._views.mark(record, met_s=now_s)
            self._views.advance(record, Step.MET, decode_prefix_len=request.decode_prefix_len)
            return [Met(record.room)]
        return []

    def _remember(self, peer: str, request: RoomRequest | RoomWait) -> None:
        key = peer, request.room
        self._answered.pop(key, None)
        self._answered[key] = request.generation
        if len(self._answered) > ANSWERED_MAX:
            del self._answered[next(iter(self._answered))]

    def _peer_abort(self, peer: str, message: RoomAbort, now_s: float) -> list[Instruction]:
        record = self._current.get(message.room)
        recipient = record.recipients.get(peer) if record is not None else None
        if (
            record is not None
            and recipient is not None
            and recipient.request.generation == message.generation
        ):
            del record.recipients[peer]  # it knows: no need to tell it
            return self._end(record, RoomState.ABORTED, peer_gave_up(message))
        if record is not None and record.waiting.get(peer) == message.generation:
            del record.waiting[peer]
            return self._end(record, RoomState.ABORTED, peer_gave_up(message))
        # A rank that gave up before it named its pages says 0: that can be of no former use which
        # had been asked for.
        if 0 < message.generation <= self._answered.get((peer, message.room), -1):
            return []
        if record is not None and recipient is None and record.view.state is RoomState.OPEN:
            if message.refused and not (record.recipients or record.waiting):
                return self._end(record, RoomState.ABORTED, peer_gave_up(message))
            record.aborts[peer] = message, now_s
            return []
        self._early.abort(peer, message, now_s)
        return self._refuse(self._early.crowd(peer))

    def _peer_lost(self, peer: str, reason: str, now_s: float) -> list[Instruction]:
        self._early.lose(peer, reason, now_s)
        instructions: list[Instruction] = []
        for record in list(self._rooms.values()):
            waited = record.waiting.pop(peer, None) is not None
            if record.recipients.pop(peer, None) is not None or waited:
                instructions += self._end(record, RoomState.FAILED, reason)
        return instructions

    # --- the engine and the clock ---

    def _write_ended(self, ended: WriteEnded, now_s: float) -> Iterator[Instruction]:
        record = self._rooms.get(ended.room.serial)
        write = record.writes.pop((ended.peer, ended.nth), None) if record is not None else None
        if record is None or write is None:
            return  # said before
        self._early_writes -= write.early
        if ended.story is not None:
            record.tell(ended.story)
        if ended.failure is None:
            landed_nbytes = record.view.landed_nbytes + write.cache_nbytes
            self._views.change(record, landed_nbytes=landed_nbytes)
        else:
            yield from self._end(record, RoomState.FAILED, ended.failure)
        if not record.writes and record.view.state in (RoomState.SEALED, RoomState.ENDING):
            yield from self._forget(record, Step.QUIET)
        elif record.early.held and not record.writes_early:
            held, record.early.held = record.early.held, []
            for chunk in held:
                yield from self._chunk(record, chunk, now_s)

    def _tick(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for record in list(self._rooms.values()):
            if abort := abort_of_nobody_else(record, now_s):
                instructions += self._end(record, RoomState.ABORTED, peer_gave_up(abort))
            elif late := overdue(record, self._deadlines, now_s):
                instructions += self._end(record, RoomState.TIMED_OUT, late)
        return instructions + self._refuse(self._early.late(now_s))

    def _refuse(self, overdue: list[tuple[Early, str]]) -> list[Instruction]:
        instructions: list[Instruction] = []
        for early, reason in overdue:
            request = early.message
            if not isinstance(request, RoomAbort):
                self._remember(early.peer, request)
                failed = RoomFailed(request.room, request.generation, reason)
                instructions.append(Tell(early.peer, failed))
        return instructions

    # --- ends ---

    def _end(self, record: PrefillRoom | None, end: RoomState, reason: str) -> list[Instruction]:
        if record is None or record.view.over or record.view.state is RoomState.ENDING:
            return []
        room = record.room
        asked = {peer: one.request.generation for peer, one in record.recipients.items()}
        instructions: list[Instruction] = [
            Tell(peer, RoomFailed(room.number, generation, f"prefill side: {reason}"))
            for peer, generation in (asked | record.waiting).items()
        ]
        self._views.change(record, reason=reason, end=end)
        if len(self._ended) >= ENDED_ROOMS_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[room.number] = f"prefill side: {reason}"
        if not record.writes:
            return instructions + self._forget(record, Step.END, Step.QUIET)
        self._views.advance(record, Step.END)
        return [*instructions, CancelWrites(room, tuple(record.writes))]

    def _forget(self, record: PrefillRoom, *steps: Step) -> list[Instruction]:
        """The end. The scheduler still has the room; the table needs it no more."""
        self._views.advance(record, *steps)
        del self._rooms[record.room.serial]
        if self._current.get(record.room.number) is record:
            del self._current[record.room.number]
        return [Over(record.room, tuple(record.stories))]


def _cannot_plan(chunk: Chunk, error: ValueError) -> str:
    return f"cannot hand over {len(chunk.pages)} pages: {error}"
