# SPDX-License-Identifier: Apache-2.0
"""Reads objects out of owners' slots, and tells afterwards which of them are what was wanted.

The bytes are read first, and the slots' headers after that: see ``kvstore.headers``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

import te
from kvstore.changes import Keys, Records
from kvstore.headers import HEADER, HEADER_BYTES, expected, tell_apart
from kvstore.outcomes import Got
from kvstore.pieces import U64, Pieces
from kvstore.slab import UNIT_BYTES

__all__ = ["HEADERS_MAX", "Group", "HeaderRooms", "Source"]

HEADERS_MAX: Final = 4096
"""Objects of one owner that one group reads."""
ROOMS: Final = 16


class HeaderRooms:
    """Registered memory for headers: rooms, each of which one read uses at a time."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine = engine
        self._buffer = te.allocate(ROOMS * HEADERS_MAX * HEADER_BYTES)
        self._region = engine.register(self._buffer, remote="none")
        self._records = np.frombuffer(self._buffer, HEADER).reshape(ROOMS, HEADERS_MAX)
        self._free = list(range(ROOMS))
        self._condition = threading.Condition()

    def take(self, timeout_s: float) -> int | None:
        """A room; None if none became free in time."""
        with self._condition:
            if not self._condition.wait_for(lambda: bool(self._free), timeout_s):
                return None
            return self._free.pop()

    def give_back(self, room: int) -> None:
        """Nothing lands there any more."""
        with self._condition:
            self._free.append(room)
            self._condition.notify()

    def address(self, room: int) -> int:
        """Where a room begins."""
        return self._region.address + room * HEADERS_MAX * HEADER_BYTES

    def records(self, room: int, count: int) -> Records:
        """The first headers in a room; no copy."""
        return self._records[room, :count]


@dataclass(frozen=True)
class Source:
    """One owner, as somebody reads from it."""

    number: int
    peer: te.Peer
    headers_address: int
    slots_address: int

    def slots(self, numbers: U64) -> U64:
        """Where slots begin."""
        return np.uint64(self.slots_address) + numbers * np.uint64(UNIT_BYTES)

    def headers(self, numbers: U64) -> U64:
        """Where the headers of slots begin."""
        return np.uint64(self.headers_address) + numbers * np.uint64(HEADER_BYTES)


@dataclass
class Group:
    """Objects of one owner that are read together. For one thread at a time."""

    source: Source
    #: Their rows in the request.
    rows: Sequence[int]
    slots: U64
    #: What their headers must be.
    wanted: Records
    transfers: list[te.Transfer] = field(default_factory=list)
    #: Of the headers that were read last, for ``Load``.
    checksums: list[int] = field(default_factory=list)
    #: Why no object of the group can be right any more.
    failed: Got | None = None
    #: te's words for that.
    reason: str = ""

    @classmethod
    def of(
        cls,
        source: Source,
        rows: Sequence[int],
        keys: Keys,
        signature: bytes,
        nbytes: int,
        places: Records,
    ) -> Group:
        """``keys`` and ``places`` are of the whole request, ``rows`` of this group."""
        found = places[rows]
        return cls(
            source,
            rows,
            found["slot"].astype(np.uint64),
            expected(keys[rows], signature, nbytes, found["generation"]),
        )

    def begin(self, pieces: Pieces, offset: int) -> None:
        """Begins to read the pieces of these objects that lie ``offset`` bytes behind the begin of
        their slots. ``pieces`` has this group's rows."""
        if self.failed is not None:
            return
        blocks = pieces.blocks(self.source.slots(self.slots), offset, to_slots=False)
        try:
            self.transfers.append(self.source.peer.read(blocks))
        except te.QueueFull as exc:
            self.fail(Got.UNREACHABLE, str(exc))

    def wait(self, deadline_s: float) -> None:
        """Waits for all reads that have begun. When one fails or is late, all are cancelled; after
        that nothing lands any more."""
        for part in range(len(self.transfers)):
            self.wait_for(part, deadline_s)
        if self.failed is not None:
            for transfer in self.transfers:
                transfer.cancel()

    def wait_for(self, part: int, deadline_s: float) -> None:
        """Waits for one read, by its number. If it fails, so has the group: call ``wait``."""
        if self.failed is None:
            self._await(self.transfers[part], deadline_s)

    def _await(self, transfer: te.Transfer, deadline_s: float) -> None:
        try:
            transfer.wait(max(deadline_s - time.monotonic(), 0.0))
        except te.WaitTimeout as exc:
            self.fail(Got.TIMED_OUT, str(exc))
        except te.TransferFailed as exc:
            self.fail(Got.UNREACHABLE, str(exc))

    def fail(self, outcome: Got, reason: str) -> None:
        """No object of the group will be right."""
        self.failed, self.reason = outcome, reason

    def check(self, rooms: HeaderRooms, deadline_s: float) -> tuple[list[bool], list[int]]:
        """After the bytes that count are there: which slots still have the objects that were
        wanted, and the checksums in their headers. May fail the whole group."""
        count = len(self.rows)
        room = rooms.take(max(deadline_s - time.monotonic(), 0.0))
        if room is None:
            self.fail(Got.TIMED_OUT, "too many reads at once: no memory for headers became free")
            return [], []
        try:
            place = np.uint64(rooms.address(room)) + np.arange(count, dtype=np.uint64) * np.uint64(
                HEADER_BYTES
            )
            blocks = te.Blocks.of(self.source.headers(self.slots), place, HEADER_BYTES).merged()
            try:
                transfer = self.source.peer.read(blocks)
            except te.QueueFull as exc:
                self.fail(Got.UNREACHABLE, str(exc))
                return [], []
            self._await(transfer, deadline_s)
            if self.failed is not None:
                transfer.cancel()
                return [], []
            found = rooms.records(room, count).copy()
        finally:
            rooms.give_back(room)
        return tell_apart(found, self.wanted).tolist(), found["checksum"].tolist()
