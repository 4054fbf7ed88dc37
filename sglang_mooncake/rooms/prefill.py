# SPDX-License-Identifier: Apache-2.0
"""Rooms on the prefill side: which chunk goes to whom, and when a room is over.

`PrefillRooms.handle(event)` returns instructions; see `states.py` for the rules of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_mooncake.messages import RoomAbort, RoomFailed, RoomRequest, Target
from sglang_mooncake.rooms.early import EarlyRooms
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.states import (
    TRANSITIONS_PREFILL,
    RoomState,
    RoomView,
    Step,
    advance,
)

__all__ = [
    "Aborted",
    "Broken",
    "CancelWrites",
    "Chunk",
    "ChunkSent",
    "Closed",
    "Event",
    "Instruction",
    "Met",
    "Opened",
    "Over",
    "PeerLost",
    "PrefillRooms",
    "Requested",
    "RoomAborted",
    "Sent",
    "Tell",
    "Tick",
    "Write",
    "WriteEnded",
]

#: Rooms that ended badly are remembered, so that a decode rank which asks later is told at once.
ENDED_ROOMS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of one `send()`: `pages[i]` goes to the destination's page `first + i`. How many there
    are is known at once, but which: only when the room's rules are told of the chunk."""

    pages: npt.NDArray[np.integer]
    first: int
    aux_slot: int | None  # set with the last chunk alone
    sent_s: float
    #: A list of indices or None for each of the model's kinds of state; with the last chunk alone.
    states: tuple[npt.NDArray[np.int64] | None, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.aux_slot is not None

    @property
    def span(self) -> range:
        """Its pages as positions in the room."""
        return range(self.first, self.first + len(self.pages))


# --- events: what happened ---


@dataclass(frozen=True, slots=True)
class ChunkSent:
    view: RoomView
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Requested:
    peer: str
    request: RoomRequest


@dataclass(frozen=True, slots=True)
class RoomAborted:
    peer: str
    message: RoomAbort


@dataclass(frozen=True, slots=True)
class WriteEnded:
    view: RoomView
    failure: str | None


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    reason: str


Event = (
    Opened
    | ChunkSent
    | Aborted
    | Broken
    | Closed
    | Requested
    | RoomAborted
    | WriteEnded
    | PeerLost
    | Tick
)


# --- instructions: what to do about it ---


@dataclass(frozen=True, slots=True)
class Sent:
    """What one target of a room has been sent."""

    writes: int = 0
    pages: int = 0

    def with_write(self, span: range) -> Sent:
        """With one more write, of these pages."""
        return Sent(self.writes + 1, self.pages + len(span))


@dataclass(frozen=True, slots=True)
class Write:
    """Write a part of one chunk into the target of one request.

    span: the pages of it, as positions in the room (`Chunk.first` is that of the chunk).
    sent: what this request has had so far, with this write; with the last chunk that is what the
        destination must have seen arrive.
    """

    view: RoomView
    peer: str
    generation: int
    target: Target
    chunk: Chunk
    span: range
    sent: Sent


@dataclass(frozen=True, slots=True)
class Met:
    """All decode ranks of the room have asked: its pages can be sent."""

    view: RoomView


@dataclass(frozen=True, slots=True)
class CancelWrites:
    view: RoomView


@dataclass(frozen=True, slots=True)
class Tell:
    peer: str
    message: RoomFailed


Instruction = Met | Write | CancelWrites | Tell | Over


@dataclass(slots=True, eq=False)
class _Room:
    view: RoomView
    requests: dict[str, RoomRequest] = field(default_factory=dict)
    sent: dict[str, Sent] = field(default_factory=dict)  # by peer
    outstanding: int = 0
    next_page: int = 0  # where the next chunk must begin
    moved_s: float = 0.0  # when its decode ranks had asked, or the latest chunk came


class PrefillRooms:
    """All rooms of one prefill rank.

    Args:
        bootstrap_timeout_s: how long a room waits for its decode ranks, and a request for its room.
        chunk_timeout_s: how long a room waits for its scheduler's next chunk. Long before, a decode
            rank gives up and says so; this is for one whose word never comes.
    """

    def __init__(self, bootstrap_timeout_s: float, chunk_timeout_s: float) -> None:
        self._bootstrap_timeout_s, self._chunk_timeout_s = bootstrap_timeout_s, chunk_timeout_s
        self._rooms: dict[int, _Room] = {}  # by serial: a room number may be in use twice
        self._current: dict[int, _Room] = {}  # by room number: the newest use
        self._early = EarlyRooms(bootstrap_timeout_s)
        self._ended: dict[int, str] = {}  # room number → why it ended badly

    def __len__(self) -> int:
        return len(self._rooms)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Applies one event. Idempotent where peers may repeat themselves."""
        match event:
            case Opened(view):
                return self._open(view, now_s)
            case ChunkSent(view, chunk):
                return self._chunk(view, chunk, now_s)
            case Aborted(view, reason):
                return self._end(view, RoomState.ABORTED, reason)
            case Broken(view, reason):
                return self._end(view, RoomState.FAILED, reason)
            case Closed(view):
                return self._end(view, RoomState.ABORTED, "the scheduler released the request")
            case Requested(peer, request):
                return self._request(peer, request, now_s)
            case RoomAborted(peer, message):
                return self._peer_abort(peer, message, now_s)
            case WriteEnded(view, failure):
                return self._write_ended(view, failure)
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason)
            case Tick():
                return self._tick(now_s)

    # --- events of the scheduler ---

    def _open(self, view: RoomView, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        former = self._current.get(view.room)
        if former is not None:
            instructions += self._end(
                former.view,
                RoomState.SUPERSEDED,
                f"room {view.room} was opened again by a newer request",
            )
        room = _Room(view)
        self._rooms[view.serial] = room
        self._current[view.room] = room
        self._ended.pop(view.room, None)
        early = self._early.take(view.room)
        if early is None:
            return instructions
        for peer, request in early.requests.items():
            instructions += self._request(peer, request, now_s)
        for abort in early.aborts.values():
            instructions += self._end(view, RoomState.ABORTED, _peer_gave_up(abort))
        return instructions

    def _chunk(self, view: RoomView, chunk: Chunk, now_s: float) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is RoomState.ENDING:
            return []  # the scheduler had not yet seen the end when it sent this
        if problem := _chunk_problem(room, chunk):
            return self._end(view, RoomState.FAILED, problem)
        writes: list[Instruction] = []
        for peer, request in room.requests.items():
            if request.target is None:
                continue
            span = request.target.share.within(chunk.span, request.target.num_pages)
            if span or chunk.is_last:  # the last one carries the seal, with or without pages
                sent = room.sent.get(peer, Sent()).with_write(span)
                writes.append(
                    Write(view, peer, request.generation, request.target, chunk, span, sent)
                )
        # From here on nothing can raise: what is counted is also written.
        view.exposed = True
        step = Step.LAST_CHUNK if chunk.is_last else Step.CHUNK
        advance(view, step, TRANSITIONS_PREFILL)
        room.next_page, room.moved_s = chunk.span.stop, now_s
        room.sent |= {write.peer: write.sent for write in writes if isinstance(write, Write)}
        room.outstanding += len(writes)
        if chunk.is_last and room.outstanding == 0:
            return self._quiet(room)  # none of those who asked wants a byte from this rank
        return writes

    # --- events of peers ---

    def _request(self, peer: str, request: RoomRequest, now_s: float) -> list[Instruction]:
        room = self._current.get(request.room)
        if room is not None and room.view.state is RoomState.OPEN:
            return self._meet(room, peer, request, now_s)
        known = room.requests.get(peer) if room is not None else None
        if known is not None and known.generation >= request.generation:
            return []  # a repetition
        ended = self._ended.get(request.room)
        if ended is not None:
            return [Tell(peer, RoomFailed(request.room, request.generation, ended))]
        self._early.request(peer, request, now_s)
        return self._refuse_early(now_s)

    def _meet(
        self, room: _Room, peer: str, request: RoomRequest, now_s: float
    ) -> list[Instruction]:
        room.requests[peer] = request
        if problem := _disagreement(room):
            return self._end(room.view, RoomState.FAILED, problem)
        if len(room.requests) == request.destinations:
            room.view.decode_prefix_len = request.decode_prefix_len
            room.moved_s = now_s
            advance(room.view, Step.MET, TRANSITIONS_PREFILL)
            return [Met(room.view)]
        return []

    def _peer_abort(self, peer: str, message: RoomAbort, now_s: float) -> list[Instruction]:
        room = self._current.get(message.room)
        if room is None:
            self._early.abort(peer, message, now_s)
            return self._refuse_early(now_s)
        request = room.requests.get(peer)
        if request is not None and request.generation == message.generation:
            del room.requests[peer]  # it knows: no need to tell it
            return self._end(room.view, RoomState.ABORTED, _peer_gave_up(message))
        if room.view.state is RoomState.OPEN:
            # The decode rank gave up before it named its pages: nobody will come for this room.
            return self._end(room.view, RoomState.ABORTED, _peer_gave_up(message))
        return []

    def _peer_lost(self, peer: str, reason: str) -> list[Instruction]:
        self._early.lose(peer)
        instructions: list[Instruction] = []
        for room in list(self._rooms.values()):
            if room.requests.pop(peer, None) is not None:
                instructions += self._end(room.view, RoomState.FAILED, reason)
        return instructions

    # --- the engine and the clock ---

    def _write_ended(self, view: RoomView, failure: str | None) -> list[Instruction]:
        room = self._rooms[view.serial]
        room.outstanding -= 1
        if room.outstanding < 0:
            raise RuntimeError(f"room {view.room} ended more writes than it began")
        instructions: list[Instruction] = []
        if failure is not None:
            instructions = self._end(view, RoomState.FAILED, failure)
        if room.outstanding == 0 and view.state in (RoomState.SEALED, RoomState.ENDING):
            instructions += self._quiet(room)
        return instructions

    def _tick(self, now_s: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for room in list(self._rooms.values()):
            if late := self._late(room, now_s):
                instructions += self._end(room.view, RoomState.TIMED_OUT, late)
        return instructions + self._refuse_early(now_s)

    def _late(self, room: _Room, now_s: float) -> str | None:
        match room.view.state:
            case RoomState.OPEN:
                waited_s = now_s - room.view.opened_s
                if waited_s >= self._bootstrap_timeout_s:
                    return (
                        f"{_who_asked(room)} for room {room.view.room} within {waited_s:.0f} s "
                        "(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)"
                    )
            case RoomState.READY | RoomState.SENDING:
                waited_s = now_s - room.moved_s
                if waited_s >= self._chunk_timeout_s:
                    return (
                        f"the scheduler sent nothing after page {room.next_page} of room "
                        f"{room.view.room} for {waited_s:.0f} s "
                        "(twice SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
                    )
        return None

    def _refuse_early(self, now_s: float) -> list[Instruction]:
        return [
            Tell(peer, RoomFailed(number, request.generation, reason))
            for number, early, reason in self._early.overdue(now_s)
            for peer, request in early.requests.items()
        ]

    # --- ends ---

    def _end(self, view: RoomView, end: RoomState, reason: str) -> list[Instruction]:
        room = self._rooms.get(view.serial)
        if room is None or view.state is RoomState.ENDING:
            return []
        instructions: list[Instruction] = [
            Tell(peer, RoomFailed(view.room, request.generation, f"prefill side: {reason}"))
            for peer, request in room.requests.items()
        ]
        view.reason, view.end = reason, end
        if len(self._ended) >= ENDED_ROOMS_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[view.room] = f"prefill side: {reason}"
        advance(view, Step.END, TRANSITIONS_PREFILL)
        if room.outstanding:
            instructions.append(CancelWrites(view))
        else:
            instructions += self._quiet(room)
        return instructions

    def _quiet(self, room: _Room) -> list[Instruction]:
        """The end. The scheduler still has the view; the table needs the room no more."""
        advance(room.view, Step.QUIET, TRANSITIONS_PREFILL)
        del self._rooms[room.view.serial]
        if self._current.get(room.view.room) is room:
            del self._current[room.view.room]
        return [Over(room.view)]


def _peer_gave_up(message: RoomAbort) -> str:
    return f"the decode server gave the request up: {message.reason}"


def _who_asked(room: _Room) -> str:
    if not room.requests:
        return "no decode rank asked"
    expected = next(iter(room.requests.values())).destinations
    return f"{len(room.requests)} of {expected} decode ranks asked"


def _disagreement(room: _Room) -> str | None:
    """Decode ranks that ask for one room must be the ranks of one request."""
    counts = {request.destinations for request in room.requests.values()}
    if len(counts) > 1 or len(room.requests) > max(counts):
        return (
            f"{len(room.requests)} decode ranks asked for room {room.view.room} and disagree "
            f"how many of them there are: {sorted(counts)}"
        )
    cached = {request.decode_prefix_len for request in room.requests.values()}
    if len(cached) > 1:
        return (
            f"the decode ranks that asked for room {room.view.room} hold different numbers of "
            f"its tokens: {sorted(cached)}"
        )
    return None


def _chunk_problem(room: _Room, chunk: Chunk) -> str | None:
    """A chunk must continue where the last one ended, and end where the destination's pages do."""
    if room.view.state is RoomState.OPEN:
        return "the scheduler sent pages before a decode rank had asked for them"
    if chunk.first != room.next_page or room.view.state is RoomState.SEALED:
        return (
            f"the prefill server sends pages {chunk.first}..{chunk.span.stop} after pages "
            f"0..{room.next_page}{' and the last chunk' * (room.view.state is RoomState.SEALED)}: "
            "a chunk was lost or overtaken on its way"
        )
    after = chunk.span.stop
    for peer, request in room.requests.items():
        if request.target is None:
            continue
        wanted = request.target.num_pages
        if after > wanted or (chunk.is_last and after != wanted):
            return (
                f"the prefill server sends pages {chunk.first}..{after} "
                f"({'last' if chunk.is_last else 'not the last'} chunk), but decode rank {peer} "
                f"made room for {wanted} pages: do both servers see the same prompt, "
                "and the same --page-size?"
            )
    return None
