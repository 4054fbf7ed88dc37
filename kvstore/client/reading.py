# SPDX-License-Identifier: Apache-2.0
"""Reads objects out of owners' slots, and tells afterwards which of them are what was wanted.

The bytes are read first, and the slots' headers after that: see ``kvstore.objects.headers``. Where
bytes are compared with the checksums in their headers, both come in one read: whichever came first,
bytes that have the checksum of the wanted object's header are that object's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import te
from kvstore import _bytes
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import Keys, Records
from kvstore.objects.copying import Codes, Copier
from kvstore.objects.headers import HEADER, HEADER_BYTES, expected_at
from kvstore.objects.outcomes import Got
from kvstore.objects.pieces import U64, Pieces
from kvstore.protocol.calling import Window
from kvstore.rate_limited_log import RateLimitedLog

__all__ = [
    "HEADERS_MAX",
    "ROOMS",
    "Group",
    "HeaderRoom",
    "HeaderRooms",
    "Source",
    "StillLanding",
    "cancel",
    "stopped",
]

logger = logging.getLogger(__name__)

HEADERS_MAX: Final = 4096
"""Objects of one owner that one group reads."""
ROOMS: Final = 16
WARN_EVERY_S: Final = 10.0
_GOT: Final = {_bytes.RIGHT: Got.RIGHT, _bytes.MOVED: Got.MOVED}


class HeaderRoom(NamedTuple):
    """Memory for the headers of one group."""

    address: int
    records: Records
    give_back: Callable[[], None]

    def pieces(self, count: int) -> Pieces:
        """Where so many headers come to."""
        places = np.arange(count, dtype=np.uint64) * np.uint64(HEADER_BYTES)
        return Pieces.whole(places + np.uint64(self.address), HEADER_BYTES)


class HeaderRooms:
    """Registered memory for headers: rooms, each of which one read uses at a time."""

    def __init__(self, engine: Callable[[], te.Engine]) -> None:
        """``engine`` is asked when a room is taken for the first time."""
        self._engine = engine
        self._region: te.Region | None = None
        self._buffer: Any = None
        self._records: Records = np.empty((0, 0), HEADER)
        #: Those that nobody uses: taking one, and giving it back, needs no lock.
        self._free: list[int] = []
        self._waiting = 0
        self._condition = threading.Condition()

    def _make(self) -> None:
        """With the lock."""
        self._buffer = te.allocate(ROOMS * HEADERS_MAX * HEADER_BYTES)
        self._records = np.frombuffer(self._buffer, HEADER).reshape(ROOMS, HEADERS_MAX)
        self._region = self._engine().register(self._buffer, remote="none")
        self._free += range(ROOMS)

    def take(self, timeout_s: float) -> HeaderRoom | None:
        """A room, which must be given back once nothing lands there any more; None if none became
        free in time."""
        room = self._pop()
        if room is not None:
            return room
        with self._condition:
            if self._region is None:
                self._make()
            self._waiting += 1
            try:
                return self._condition.wait_for(self._pop, timeout_s)
            finally:
                self._waiting -= 1

    def _pop(self) -> HeaderRoom | None:
        try:
            room = self._free.pop()
        except IndexError:
            return None
        assert self._region is not None
        address = self._region.address + room * HEADERS_MAX * HEADER_BYTES
        return HeaderRoom(address, self._records[room], partial(self._give_back, room))

    def _give_back(self, room: int) -> None:
        self._free.append(room)
        if self._waiting:  # Whoever begins to wait now looks behind that, and finds this room.
            with self._condition:
                self._condition.notify()


@dataclass(frozen=True)
class Source:
    """One owner, as somebody reads from it."""

    number: int
    #: None if nobody reads from it by te, or can now.
    link: te.Peer | None
    headers_address: int
    slots_address: int
    #: Its memory in this process; None if it is not there.
    window: Window | None = None
    #: Whether it is another host's, and this host's owner can be asked for what it has.
    is_far: bool = False

    @property
    def peer(self) -> te.Peer:
        """To read from, and write to, by te. ``te.TransferFailed`` without a connection."""
        if self.link is None:
            raise te.TransferFailed(f"te has no connection to owner {self.number} of the store now")
        return self.link

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
    #: When each of them was begun, by ``time.monotonic``.
    begun_s: list[float] = field(default_factory=list)
    #: Where the headers come to that are read with the bytes.
    room: HeaderRoom | None = None
    #: The last read of headers alone.
    headers_read: te.Transfer | None = None
    #: Reads that have not stopped when they were cancelled.
    going_on: list[te.Transfer] = field(default_factory=list)
    #: The headers that were read last, for ``Load``.
    found: Records | None = None
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
        """``keys`` and ``places`` are of the whole request, ``rows`` of this group, in order."""
        if len(rows) < len(keys):
            keys, places = keys[rows], places[rows]
        wanted, slots = expected_at(keys, signature, nbytes, places)
        return cls(source, rows, slots, wanted)

    def of_all(self, pieces: Pieces) -> Pieces:
        """This group's rows of the memory for the whole request."""
        return pieces if len(self.rows) == len(pieces) else pieces.of(self.rows)

    def tell(self, codes: Codes, outcomes: list[Got], wrong: Got = Got.CORRUPTED) -> None:
        """Gives this group's rows their outcomes. ``wrong``: that of ``_bytes.CORRUPTED``."""
        got = [Got.RIGHT] * len(codes)
        if codes.tobytes().count(_bytes.RIGHT) < len(codes):  # A tenth of the time of ``any``.
            got = [wrong if one == _bytes.CORRUPTED else _GOT[one] for one in codes.tolist()]
        if len(got) == len(outcomes):
            outcomes[:] = got
            return
        for row, one in zip(self.rows, got, strict=True):
            outcomes[row] = one

    def bring(
        self, pieces: Pieces, window: Window, copier: Copier, verify: bool, offset: int = 0
    ) -> Codes:
        """Copies these objects out of a window, and tells what came. ``pieces`` has this group's
        rows, and the processor can write there; they lie ``offset`` bytes behind the begin."""
        if not window.has(int(self.slots.max()), offset + pieces.object_bytes):
            # What the owner has announced cannot be.
            return np.full(len(pieces), _bytes.MOVED, np.uint8)
        slots = np.uint64(window.slots_address + offset) + self.slots * np.uint64(UNIT_BYTES)
        headers = np.uint64(window.headers_address) + self.slots * np.uint64(HEADER_BYTES)
        return copier.bring(slots, headers, self.wanted, pieces, verify)

    def begin(self, pieces: Pieces, offset: int) -> None:
        """Begins to read the pieces of these objects that lie ``offset`` bytes behind the begin of
        their slots. ``pieces`` has this group's rows."""
        if self.failed is not None:
            return
        self._read(pieces.blocks(self.source.slots(self.slots), offset, to_slots=False))

    def begin_with_headers(self, pieces: Pieces, rooms: HeaderRooms) -> None:
        """Begins to read these objects and their headers at once; if there is no room for headers
        now, ``check`` reads them. For bytes that are compared with their checksums."""
        room = rooms.take(0.0)
        if room is None:
            self.begin(pieces, 0)
            return
        self.room = room
        slots, headers = self.source.slots_address, self.source.headers_address
        self._read(pieces.blocks_and_headers(self.slots, slots, UNIT_BYTES, headers, room.address))

    def _read(self, blocks: te.Blocks) -> None:
        begun_s = time.monotonic()
        try:
            self.transfers.append(self.source.peer.read(blocks))
        except (te.QueueFull, te.TransferFailed) as exc:
            self.fail(Got.UNREACHABLE, str(exc))
        else:
            self.begun_s.append(begun_s)

    @property
    def took_s(self) -> float:
        """From the begin of the first read to the end of the last one, or until now: whenever they
        were waited for."""
        if len(self.begun_s) == 1:
            return self.transfers[0].duration_s
        ends_s = (
            begun_s + transfer.duration_s
            for begun_s, transfer in zip(self.begun_s, self.transfers, strict=True)
        )
        return max(ends_s) - self.begun_s[0] if self.begun_s else 0.0

    def wait(self, deadline_s: float) -> None:
        """Waits for all reads that have begun. When one fails or is late, all are cancelled; after
        that nothing lands any more."""
        for part in range(len(self.transfers)):
            self.wait_for(part, deadline_s)
        if self.failed is not None:
            self.cancel()

    def cancel(self) -> None:
        """Nothing lands any more after this. Raises what the function ``cancel`` raises."""
        cancel([self])

    def stop(self) -> bool:
        """Cancels all reads; whether nothing lands any more, or some did not stop in time
        (``going_on``)."""
        reads = [*self.transfers, *([] if self.headers_read is None else [self.headers_read])]
        self.going_on = [one for one in reads if not _stops(one)]
        if not self.going_on:
            self._give_room_back()
        return not self.going_on

    def _give_room_back(self) -> None:
        """Nothing lands there any more."""
        if self.room is not None:
            self.room.give_back()
            self.room = None

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

    def check(self, rooms: HeaderRooms, deadline_s: float) -> Records | None:
        """After the bytes that count are there: what the headers of the slots say, behind them or
        with them. None if they cannot be read, and the group has failed."""
        came_along = self.room is not None
        if self.room is None:
            self.room = rooms.take(max(deadline_s - time.monotonic(), 0.0))
        if self.room is None:
            self.fail(Got.TIMED_OUT, "too many reads at once: no memory for headers became free")
            return None
        if not came_along:
            self._read_headers(self.room, deadline_s)
        if self.failed is not None:
            self.cancel()
            return None
        # By way of bytes: numpy copies records field by field.
        found = np.frombuffer(self.room.records[: len(self.rows)].tobytes(), HEADER)
        self._give_room_back()
        return found

    def _read_headers(self, room: HeaderRoom, deadline_s: float) -> None:
        try:
            headers = self.source.headers(self.slots)
            blocks = room.pieces(len(headers)).blocks(headers, 0, to_slots=False)
            self.headers_read = self.source.peer.read(blocks)
        except (te.QueueFull, te.TransferFailed) as exc:
            self.fail(Got.UNREACHABLE, str(exc))
        else:
            self._await(self.headers_read, deadline_s)


class StillLanding(te.FenceTimeout):
    """Reads did not stop in time: the memory that they read into must not be used before ``wait``
    has returned. For one thread."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups``: those that have not stopped."""
        self._groups = groups
        nbytes = sum(one.nbytes for one in self.transfers)
        owners = ", ".join(sorted({str(one.source.number) for one in groups}))
        super().__init__(
            f"{len(self.transfers)} reads of {nbytes} bytes from owners of the store ({owners}) did"
            " not stop in time"
        )

    @property
    def transfers(self) -> list[te.Transfer]:
        """Those that go on, as far as is known."""
        return [read for group in self._groups for read in group.going_on]

    def wait(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Returns when nothing lands any more, however long that takes: if it returned before, its
        caller would use the memory again. Cancels again and again (te's ``cancel`` waits by
        itself), and warns meanwhile. The end of the engine, by ``Store.close``, ends it, too."""
        log = RateLimitedLog(logger, clock, WARN_EVERY_S)
        while self._groups:
            log.warn("waiting until nothing lands any more in the memory of a get: %s", self)
            self._groups = [one for one in self._groups if not one.stop()]


def cancel(groups: Sequence[Group]) -> None:
    """Nothing lands any more after this. All are cancelled, also those behind one that does not
    stop; ``StillLanding`` is raised then."""
    left = [one for one in groups if not one.stop()]
    if left:
        raise StillLanding(left)


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Around gets whose caller uses the memory again whatever they return or raise: where reads do
    not stop in time, ``StillLanding`` is raised only once nothing lands any more."""
    try:
        yield
    except StillLanding as exc:
        exc.wait()
        raise


def _stops(read: te.Transfer) -> bool:
    """Cancels it; whether nothing of it lands any more."""
    try:
        read.cancel()
    except te.FenceTimeout:
        return False
    return True
