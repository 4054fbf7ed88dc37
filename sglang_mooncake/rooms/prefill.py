# SPDX-License-Identifier: Apache-2.0
"""Rooms on the prefill side: which chunk goes to whom, and when a room is over.

`PrefillRooms.handle(event)` returns instructions; see `states.py` for the rules of this package.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from sglang_mooncake.context import FIELD_NAMES, SettingNames
from sglang_mooncake.layout import ALL, Dealt, Layers, Verify, is_chosen
from sglang_mooncake.layout.indices import owned
from sglang_mooncake.messages import RoomComputed, RoomDigests
from sglang_mooncake.rooms.checks import chunk_problem, layers_problem
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.layers import NOTHING, Before
from sglang_mooncake.rooms.prefill_events import (
    AwaitEvents,
    CancelWrites,
    Chunk,
    ChunkSent,
    Computed,
    Differed,
    Digest,
    Digested,
    Event,
    EventsHappened,
    FellBack,
    Instruction,
    LayersFilled,
    LookAgain,
    Met,
    Misdirected,
    PeerLost,
    Requested,
    RoomAborted,
    Tell,
    Undigested,
    WaitsForPrompt,
    Write,
    WriteBegan,
    WriteEnded,
)
from sglang_mooncake.rooms.prefill_room import (
    Deadlines,
    PrefillRoom,
    Said,
    abort_of_nobody_else,
    gpu_hangs,
    leads_elsewhere,
    overdue,
    peer_gave_up,
    undigested,
)
from sglang_mooncake.rooms.prefill_table import PrefillTable
from sglang_mooncake.rooms.recipient import PairPlan, Recipient
from sglang_mooncake.rooms.requests import Requests
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RELEASED, RoomState, Step

__all__ = [
    "Aborted",
    "AwaitEvents",
    "Broken",
    "CancelWrites",
    "Chunk",
    "ChunkSent",
    "Closed",
    "Computed",
    "Differed",
    "Digest",
    "Digested",
    "Event",
    "EventsHappened",
    "FellBack",
    "Instruction",
    "LayersFilled",
    "LookAgain",
    "Met",
    "Misdirected",
    "Opened",
    "Over",
    "PeerLost",
    "PrefillRooms",
    "Requested",
    "RoomAborted",
    "Tell",
    "Tick",
    "Undigested",
    "WaitsForPrompt",
    "Write",
    "WriteBegan",
    "WriteEnded",
]

#: A decode rank, which pages of a chunk it is to have (positions in the room), and how many of them
#: this rank has.
_Part = tuple[str, Recipient, range, int]
#: Writes of layers before their chunk, of all rooms. Engine and peers take a bounded number of
#: transfers, and must have room for chunks.
EARLY_WRITES_MAX = 4_096
#: Chunks and announcements of layers that wait for the GPU, of all rooms: far more than a prefill
#: server has under way. One is a few hundred bytes and its pages.
WAITING_MAX = 65_536


def _nobody() -> bool:
    return False


def _random() -> int:
    return secrets.randbits(64)


class PrefillRooms:
    """All rooms of one prefill rank.

    Args:
        plan_of: the plan of the copy to a peer that has asked; raises LookupError.
        is_linked: whether any peer is linked to this rank (default: none).
        bootstrap_timeout_s: how long a room waits for its decode ranks, and a request for its room.
        chunk_timeout_s: how long a room waits for its scheduler's next chunk. Long before, a decode
            rank gives up and says so; this is for one whose word never comes. The GPU has half of
            it to fill what the scheduler has sent.
        computed_first: decode ranks ask for a room only once its prompt is computed (the policy
            prefill_complete), so that it waits for them from then on.
        pages_dealt: which of the pages of a chunk this rank has (`Layout.pages_dealt`).
        names: what the two deadlines are called: `chunk_timeout_s` is twice that of `waiting`.
        verify: how much is digested at least; a decode rank may ask for more. None where nothing
            can be digested.
        random: 64 bits.
    """

    def __init__(
        self,
        plan_of: Callable[[str], PairPlan],
        bootstrap_timeout_s: float,
        chunk_timeout_s: float,
        computed_first: bool = False,
        pages_dealt: Dealt = ALL,
        names: SettingNames = FIELD_NAMES,
        is_linked: Callable[[], bool] = _nobody,
        verify: Verify | None = Verify.OFF,
        random: Callable[[], int] = _random,
    ) -> None:
        self._deadlines = Deadlines(bootstrap_timeout_s, chunk_timeout_s, computed_first, names)
        self._pages_dealt, self._is_linked = pages_dealt, is_linked
        self._verify, self._random = verify, random
        self._table = PrefillTable()
        self._views = self._table.views
        self._requests = Requests(self._table, plan_of, bootstrap_timeout_s, names.bootstrap)
        self._early_writes = 0  # under way

    def __len__(self) -> int:
        return len(self._table)

    @property
    def rooms(self) -> list[Room]:
        """Those that are not over. Any thread may ask."""
        return self._table.rooms

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
            case ChunkSent() | LayersFilled():
                return self._say(event, now_s)
            case EventsHappened(room, failure):
                return self._filled(room, failure, now_s)
            case Aborted(room, reason):
                return self._table.end(self._table.get(room), RoomState.ABORTED, reason)
            case Broken(room, reason):
                return self._table.end(self._table.get(room), RoomState.FAILED, reason)
            case Closed(room):
                return self._table.end(self._table.get(room), RoomState.ABORTED, RELEASED)
            case Computed(room):
                return self._computed(room, now_s)
            case Misdirected(room, reason):
                record = self._table.get(room)
                if record is not None:
                    record.misdirected = reason
                return []
            case WaitsForPrompt(peer, wait):
                return self._requests.wait(peer, wait, now_s)
            case Requested(peer, request):
                return self._requests.request(peer, request, now_s)
            case RoomAborted(peer, message):
                return self._requests.abort(peer, message, now_s)
            case WriteBegan(room, at_s):
                record = self._table.get(room)
                if record is not None:
                    self._views.mark(record, posted_s=at_s)
                return []
            case WriteEnded():
                return self._write_ended(event, now_s)
            case Digested():
                return self._digested(event)
            case Differed(peer, message):
                return [LookAgain(peer, message)]
            case PeerLost(peer, reason):
                return self._requests.lost(peer, reason, now_s)
            case Tick():
                return self._tick(now_s)

    # --- events of the scheduler; those of peers are in requests.py ---

    def _open(self, room: Room, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        former = self._table.newest(room.number)
        if former is not None:
            reason = f"room {room.number} was opened again by a newer request"
            instructions = self._table.end(former, RoomState.SUPERSEDED, reason)
        self._table.add(room)
        return instructions + self._requests.opened(room.number, now_s)

    def _computed(self, room: Room, now_s: float) -> list[Instruction]:
        record = self._table.get(room)
        if record is None or record.view.state is not RoomState.OPEN:
            return []
        if record.computed_s is not None:
            return []
        record.computed_s = now_s
        return [
            Tell(peer, RoomComputed(room.number, generation))
            for peer, generation in record.waiting.items()
        ]

    def _say(self, event: ChunkSent | LayersFilled, now_s: float) -> Iterable[Instruction]:
        """Nothing of a room overtakes what waits there. Rooms do not wait for each other."""
        record = self._table.get(event.room)
        if record is None or record.view.decided:
            return []  # the scheduler had not yet seen the end when it said this
        if self._table.waiting >= WAITING_MAX and (event.events or record.said):
            full = (
                f"{WAITING_MAX} chunks are waiting for GPU events, which is the limit: the GPU "
                "seems to hang"
            )
            return self._table.end(record, RoomState.FAILED, full)
        record.said.append(Said(event, now_s, bool(event.events)))
        self._table.waiting += 1
        record.moved_s = now_s
        if event.events:
            return [AwaitEvents(event.room, event.events)]
        return self._go_on(record, now_s)

    def _filled(self, room: Room, failure: str | None, now_s: float) -> Iterable[Instruction]:
        """The GPU has filled what was said first of those that wait for it, or never will."""
        record = self._table.get(room)
        said = next((one for one in record.said if one.awaits_gpu), None) if record else None
        if record is None or said is None:
            return []  # the room has ended meanwhile
        if failure is not None:
            return self._table.end(record, RoomState.FAILED, failure)
        said.awaits_gpu = False
        return self._go_on(record, now_s)

    def _go_on(self, record: PrefillRoom, now_s: float) -> Iterator[Instruction]:
        """Takes up what was said of a room until something has to wait."""
        while record.said and not self._must_wait(record):
            event = record.said.popleft().event
            self._table.waiting -= 1
            match event:
                case ChunkSent(_, chunk):
                    yield from self._chunk(record, chunk, now_s)
                case LayersFilled():
                    yield from self._layers_filled(record, event, now_s)

    @staticmethod
    def _must_wait(record: PrefillRoom) -> bool:
        said = record.said[0]
        if said.awaits_gpu:
            return True
        chunk = said.event.chunk if isinstance(said.event, ChunkSent) else None
        return chunk is not None and record.writes_early and record.early.contradicts(chunk)

    def _layers_filled(
        self, record: PrefillRoom, filled: LayersFilled, now_s: float
    ) -> Iterable[Instruction]:
        room = filled.room
        if record.view.state not in (RoomState.READY, RoomState.SENDING):
            return []  # nobody has asked, or the last chunk was sent
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
        return self._write_layers(record, chunk, layers)

    def _write_layers(
        self, record: PrefillRoom, chunk: Chunk, layers: Layers
    ) -> Iterator[Instruction]:
        for peer, recipient, span, pages in self._parts(record, chunk):
            try:
                write = recipient.write_early(record.room, peer, chunk, span, pages, layers)
            except ValueError as error:
                yield from self._table.end(record, RoomState.FAILED, _cannot_plan(chunk, error))
                return
            record.early.wrote(write)
            yield self._begun(record, write)

    def _chunk(self, record: PrefillRoom, chunk: Chunk, now_s: float) -> Iterable[Instruction]:
        early = record.early
        unannounced = early.contradicts(chunk)
        if problem := chunk_problem(record.view.state, record.next_page, record.requests, chunk):
            return self._table.end(record, RoomState.FAILED, problem)
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
        layers, before = early.take(chunk)
        if chunk.is_last and not parts and not record.writes:
            # None of those who asked wants a byte from this rank, or they have all.
            return fell_back + self._table.forget(record, step, Step.QUIET)
        self._views.advance(record, step)
        return chain(self._write_chunk(record, chunk, parts, layers, before), fell_back)

    def _write_chunk(
        self,
        record: PrefillRoom,
        chunk: Chunk,
        parts: list[_Part],
        layers: Layers,
        before: Mapping[str, Before],
    ) -> Iterator[Instruction]:
        for peer, recipient, span, pages in parts:
            went = before.get(peer, NOTHING)
            verify = self._verify_for(recipient)
            recipient.is_digested = chunk.is_last and is_chosen(verify, self._random())
            try:
                write = recipient.write(record.room, peer, chunk, span, pages, layers, went)
            except ValueError as error:
                yield from self._table.end(record, RoomState.FAILED, _cannot_plan(chunk, error))
                return
            yield self._begun(record, write)
            if recipient.is_digested:
                generation, lists = recipient.request.generation, partial(recipient.cells, chunk)
                record.digesting[peer] = verify
                nbytes = recipient.copied_nbytes
                yield Digest(record.room, peer, generation, verify, nbytes, lists)

    def _verify_for(self, recipient: Recipient) -> Verify:
        """The stricter of two wishes."""
        return Verify.OFF if self._verify is None else max(self._verify, recipient.request.verify)

    def _parts(self, record: PrefillRoom, chunk: Chunk) -> list[_Part]:
        parts = []
        for peer, recipient in record.recipients.items():
            target = recipient.request.target
            if target is None:
                continue
            span = target.share.within(chunk.span, target.num_pages * target.page_span)
            pages = self._count(chunk, span)
            # The last one carries the completion record, with or without pages.
            if pages or chunk.is_last:
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

    # --- the engine and the clock ---

    def _write_ended(self, ended: WriteEnded, now_s: float) -> Iterator[Instruction]:
        record = self._table.get(ended.room)
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
            yield from self._table.end(record, RoomState.FAILED, ended.failure)
        if self._is_over(record):
            yield from self._table.forget(record, Step.QUIET)
        else:
            yield from self._go_on(record, now_s)

    def _digested(self, digested: Digested) -> Iterator[Instruction]:
        record, peer, message = self._table.get(digested.room), digested.peer, digested.message
        verify = None if record is None else record.digesting.pop(peer, None)
        if record is None or verify is None:
            return  # said before
        failure = digested.failure
        if failure is not None and verify is Verify.ALL:
            reason = f"no digest of what was sent: {failure}"
            yield from self._table.end(record, RoomState.FAILED, reason)
        elif not record.view.decided:
            if failure is not None:  # one of a sample arrives without digests
                generation = record.recipients[peer].request.generation
                message = RoomDigests(record.room.number, generation, verify, failure=failure)
            if message is not None:
                yield Tell(peer, message)
        if record.view.over:
            return  # the failure was its end
        if self._is_over(record):
            yield from self._table.forget(record, Step.QUIET)

    def _without_digests(self, record: PrefillRoom, why: str) -> Iterator[Instruction]:
        """Its pages may be used again: what is digested too late is thrown away."""
        yield Undigested(record.room, why)
        for peer in tuple(record.digesting):
            yield from self._digested(Digested(record.room, peer, None, why))

    @staticmethod
    def _is_over(record: PrefillRoom) -> bool:
        return record.is_quiet and record.view.state in (RoomState.ALL_SENT, RoomState.ENDING)

    def _tick(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for record in self._table:
            if abort := abort_of_nobody_else(record, now_s):
                instructions += self._table.end(record, RoomState.ABORTED, peer_gave_up(abort))
            elif elsewhere := leads_elsewhere(record, self._is_linked(), now_s):
                instructions += self._table.end(record, RoomState.FAILED, elsewhere)
            elif hangs := gpu_hangs(record, self._deadlines, now_s):
                instructions += self._table.end(record, RoomState.FAILED, hangs)
            elif late := overdue(record, self._deadlines, now_s):
                instructions += self._table.end(record, RoomState.TIMED_OUT, late)
            elif why := undigested(record, self._deadlines, now_s):
                instructions += self._without_digests(record, why)
        return instructions + self._requests.tick(now_s)


def _cannot_plan(chunk: Chunk, error: ValueError) -> str:
    return f"cannot hand over {len(chunk.pages)} pages: {error}"
