# SPDX-License-Identifier: Apache-2.0
"""One use of a room number, as its scheduler holds it, and what the loop shows of it.

The loop alone changes what is known of a room (`Record`). Every other thread sees the room's latest
`RoomView`, which never changes: the rules put another one in its place, once, when they have dealt
with an event. So nobody sees a state that a room only passes through, or a reason without its end.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from sglang_mooncake.rooms.arrival import Expected
from sglang_mooncake.rooms.states import (
    ENDS,
    IllegalTransition,
    RoomState,
    Step,
    Transitions,
    after,
)

__all__ = ["Publisher", "Record", "Room", "RoomTable", "RoomTimes", "RoomView"]

_serial = itertools.count(1)


class RoomTimes(msgspec.Struct, frozen=True):
    """When a room reached what `story.py` tells of it, in seconds of the side's clock; 0.0 before.

    met_s: the other side is known, and ready.
    named_s: decode: the scheduler named the pages; prefill: it sent the last of them.
    planned_s: decode: the request was made; prefill: the writes of the last chunk were chosen.
    posted_s: prefill: the engine took the latest write.
    landed_s: decode: the scheduler saw that all had arrived.
    """

    met_s: float = 0.0
    named_s: float = 0.0
    planned_s: float = 0.0
    posted_s: float = 0.0
    landed_s: float = 0.0


class RoomView(msgspec.Struct, frozen=True):
    """What any thread may see of a room.

    reason: why the room ends badly; one sentence.
    end: that `ENDING` leads to.
    decode_prefix_len: prefill: tokens the decode server already holds (its radix cache), so they
        are not sent.
    landed_nbytes: of prefill, bytes of caches and state that have landed with every decode rank
        that was sent them (what SGLang's figures are made of); of decode, all that it was sent,
        once it has everything.
    expected: decode: what each source was asked for, from `REQUESTED` on.
    verified: decode: tags of the sources whose digests are equal to those of what has landed.
    exposed: a peer may write to (decode) or is sent (prefill) this room's pages, or was.
    num_pages: of decode, that were named; of prefill, that were sent so far.
    safe: decode: no write can land in this room's pages, now or later: they were never exposed, or
        the fence is confirmed. Until then pages that were named must not be used for anything else.
    peers: decode: whom this rank asks. `str` names each of them.
    """

    state: RoomState = RoomState.OPEN
    reason: str | None = None
    end: RoomState | None = None
    decode_prefix_len: int = 0
    landed_nbytes: int = 0
    expected: tuple[Expected, ...] = ()
    verified: frozenset[int] = frozenset()
    generation: int = 0
    exposed: bool = False
    num_pages: int = 0
    safe: bool = False
    times: RoomTimes = RoomTimes()
    peers: tuple[Any, ...] = ()

    @property
    def over(self) -> bool:
        """True when the outcome is final and no byte of this room moves any more."""
        return self.state in ENDS

    @property
    def decided(self) -> bool:
        """True once it is known how the room ends, though bytes of it may still move."""
        return self.over or self.state is RoomState.ENDING


@dataclass(slots=True, eq=False)
class Room:
    """
    opened_s: in seconds of the side's clock; deadlines count from here.
    view: replaced by the loop alone.

    The scheduler thread writes the rest, of decode rooms, before it tells the loop:

    linked: the links to all sources stood when they were chosen, so that the room is ready as soon
        as the loop has heard of it, and pages may be named without waiting for that. Those of a
        room whose link has ended meanwhile are kept.
    named: it has named its pages, so a peer may be asked to write into them at any moment.
    withdrawn: the request is given up. A room whose pages are not exposed by then never exposes
        them.
    registry: of the room's prefill ranks, once it may be told of the room.
    waiter: set by the loop when the room is over, for a scheduler that waits for that.
    """

    number: int
    opened_s: float
    view: RoomView = RoomView()  # noqa: RUF009 - it is frozen
    linked: bool = False
    named: bool = False
    withdrawn: bool = False
    registry: str = ""
    waiter: threading.Event | None = None
    serial: int = field(default_factory=lambda: next(_serial))

    @property
    def nameable(self) -> bool:
        """Decode: whether the scheduler may name its pages."""
        state = self.view.state
        return state is RoomState.READY or (state is RoomState.OPEN and self.linked)

    @property
    def releasable(self) -> bool:
        """Decode: whether the pages of this room, given up, may be used for something else."""
        return self.view.safe or not self.named


@dataclass(slots=True, eq=False)
class Record:
    """What the rules of both sides know of a room. `view` is what they have made of it so far, and
    `room.view` what they have shown."""

    room: Room
    view: RoomView = RoomView()  # noqa: RUF009 - it is frozen


AnyRecord = TypeVar("AnyRecord", bound=Record)


class RoomTable(Generic[AnyRecord]):
    """The rooms of one rank that are not over. Changed by the loop thread alone."""

    def __init__(self) -> None:
        self._rooms: dict[int, AnyRecord] = {}  # by serial: a number may be in use twice

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[AnyRecord]:
        """Those that are there now; they may go meanwhile."""
        return iter(list(self._rooms.values()))

    @property
    def rooms(self) -> list[Room]:
        """Any thread may ask."""
        return [record.room for record in self._rooms.copy().values()]  # the copy is one step

    def get(self, room: Room) -> AnyRecord | None:
        """None once it is over."""
        return self._rooms.get(room.serial)


class Publisher:
    """Changes records, and shows what has become of each at the end of an event."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions
        self._changed: dict[int, Record] = {}  # by serial

    def change(self, record: Record, **fields: Any) -> None:
        record.view = msgspec.structs.replace(record.view, **fields)
        self._changed[record.room.serial] = record

    def mark(self, record: Record, **times_s: float) -> None:
        """Notes when the room has reached something (`RoomTimes`)."""
        self.change(record, times=msgspec.structs.replace(record.view.times, **times_s))

    def advance(self, record: Record, *steps: Step, **fields: Any) -> None:
        """Moves the room by steps, one after the other, and changes other fields with it.

        Raises:
            IllegalTransition: its state does not allow that; nothing has changed.
        """
        view = record.view
        try:
            state = after(view.state, fields.get("end", view.end), self._transitions, steps)
        except IllegalTransition as error:
            raise IllegalTransition(f"room {record.room.number}: {error}") from None
        self.change(record, state=state, **fields)

    def publish(self) -> None:
        for record in self._changed.values():
            record.room.view = record.view
        self._changed.clear()
