# SPDX-License-Identifier: Apache-2.0
"""Objects by Mooncake's keys, of any size and in memory of any shape."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.large import PART_BYTES, LargeObjects
from kvstore.objects.changes import Keys, keys_of_digests
from kvstore.objects.outcomes import Got, Pinned, Put, Removed
from kvstore.objects.pieces import Pieces
from kvstore.store import Store, stopped
from sglang_mooncake.faces.mooncake_store.codes import (
    INVALID,
    MISSING,
    OF_GET,
    OF_PUT,
    OF_REMOVE,
    OK,
)

__all__ = ["Keys", "Memory", "Objects", "Range"]

logger = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16
TIMEOUT_S: Final = 30.0
"""Of one call. Mooncake waits 60 s for a transfer."""
PIN_TO_ASK_S: Final = 0.001
REMOVE_TIMEOUT_S: Final = 2.0
PAUSE_S: Final = 0.05

_GONE: Final = (Got.MISSING, Got.REJECTED, Got.MOVED, Got.CORRUPTED)
"""Outcomes after which a large object is known to lack a part."""

Outcome = TypeVar("Outcome", int, Put, Got)


@dataclass(frozen=True, slots=True)
class Memory:
    """Where one object is read to, or stored from: registered memory, in pieces."""

    addresses: tuple[int, ...]
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, addresses: Sequence[int], nbytes: Sequence[int]) -> Memory:
        """Without pieces of no bytes. ``ValueError`` if the two differ in length, or nothing is
        left."""
        if len(addresses) != len(nbytes):
            raise ValueError(f"{len(addresses)} buffers and {len(nbytes)} sizes")
        if not all(nbytes):
            addresses = [one for one, size in zip(addresses, nbytes, strict=True) if size]
            nbytes = [one for one in nbytes if one]
        if not nbytes:
            raise ValueError("an object has at least one byte")
        return cls(tuple(addresses), tuple(nbytes))

    @property
    def total(self) -> int:
        return sum(self.nbytes)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one object, from ``offset`` on, and where they go."""

    row: int
    object_bytes: int
    offset: int
    memory: Memory


class Objects:
    """Of one deployment: others find the same keys only under the same name. Any thread may call
    anything; everything but ``exist`` blocks."""

    def __init__(self, store: Store, deployment: str, timeout_s: float = TIMEOUT_S) -> None:
        self._store: Final = store
        self._large: Final = LargeObjects(store)
        self._timeout_s = timeout_s
        self._person = _digest(b"mooncake.store/1", deployment.encode())
        self._small = _digest(self._person, b"whole")
        self._parts = _digest(self._person, b"in parts")

    def keys(self, names: Sequence[str]) -> Keys:
        """Different deployments have no key in common."""
        return keys_of_digests([_digest(self._person, one.encode()) for one in names])

    def exist(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """As far as this process knows. A large object may lack a part all the same; the get that
        notices it removes it."""
        return self._store.known(keys)

    def sizes(self, keys: Keys) -> npt.NDArray[np.int64]:
        """In bytes; 0 for one that is not stored."""
        sizes = self._store.sizes(keys, self._small)
        rows = np.flatnonzero(sizes == 0)
        rows = rows[self.exist(keys[rows])] if len(rows) else rows
        if len(rows):
            sizes[rows] = self._large.sizes(keys[rows], self._parts, self._timeout_s)
        return sizes

    def put(self, keys: Keys, sources: Sequence[Memory]) -> list[int]:
        """Mooncake's number for each."""
        outcomes = [Put.FAILED] * len(keys)
        for rows, pieces in _groups(sources):
            if pieces.object_bytes <= PART_BYTES:
                some = self._store.put(keys[rows], self._small, pieces, self._timeout_s)
            else:
                some = self._large.put(keys[rows], self._parts, pieces, self._timeout_s)
            _place(outcomes, rows, some)
        return [OF_PUT[one] for one in outcomes]

    def replace(self, keys: Keys, sources: Sequence[Memory]) -> list[int]:
        """As `put`, after what is there has been removed; others find neither meanwhile."""
        removed, stored = self.remove(keys), self.put(keys, sources)
        # What could not be removed may be the old value still.
        pairs = zip(removed, stored, strict=True)
        return [new if old in (OK, MISSING) else old for old, new in pairs]

    def get(self, keys: Keys, rooms: Sequence[Memory]) -> list[int]:
        """The size of each object, or Mooncake's number for why it did not come. Memory that is
        larger than its object is filled from its beginning. Nothing lands there any more after
        this, also if it raises ``StillLanding``."""
        outcomes = self._get_exactly(keys, range(len(keys)), rooms)
        numbers = [
            room.total if one is Got.RIGHT else OF_GET[one]
            for one, room in zip(outcomes, rooms, strict=True)
        ]
        rows = [row for row, one in enumerate(outcomes) if one in (Got.MISSING, Got.REJECTED)]
        if not rows:
            return numbers
        found = self.exist(keys[rows])
        rows = [row for row, one in zip(rows, found, strict=True) if one]
        sizes = dict(zip(rows, self.sizes(keys[rows]).tolist(), strict=True)) if rows else {}
        shorter = [row for row, size in sizes.items() if 0 < size < rooms[row].total]
        cut = [_beginning(rooms[row], sizes[row]) for row in shorter]
        again = self._get_exactly(keys, shorter, cut)
        for row, one in zip(shorter, again, strict=True):
            numbers[row] = sizes[row] if one is Got.RIGHT else OF_GET[one]
        for row, size in sizes.items():
            if size > rooms[row].total:
                numbers[row] = INVALID
        return numbers

    def get_ranges(self, keys: Keys, ranges: Sequence[Range]) -> list[int]:
        """Of objects whose size is known: as many bytes as each has, or Mooncake's number. ``row``:
        which of the keys. Nothing lands any more, as for `get`."""
        numbers = [MISSING] * len(ranges)
        by_place: dict[tuple[int, int], list[int]] = {}
        for at, one in enumerate(ranges):
            by_place.setdefault((one.object_bytes, one.offset), []).append(at)
        for (nbytes, offset), some in by_place.items():
            get = self._store.get_range if nbytes <= PART_BYTES else self._large.get_range
            signature = self._small if nbytes <= PART_BYTES else self._parts
            for rows, pieces in _groups([ranges[at].memory for at in some]):
                these = [ranges[some[row]] for row in rows]
                wanted = keys[[one.row for one in these]]
                with stopped():
                    got = get(wanted, signature, nbytes, offset, pieces, self._timeout_s)
                for row, came in zip(rows, got, strict=True):
                    is_right = came is Got.RIGHT
                    numbers[some[row]] = pieces.object_bytes if is_right else OF_GET[came]
        return numbers

    def remove(self, keys: Keys) -> list[int]:
        """Mooncake's number for each."""
        existed, tries = self.exist(keys), 1
        deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
        outcomes = self._store.remove(keys, self._small)
        while Removed.UNREACHABLE in outcomes and time.monotonic() < deadline_s:
            time.sleep(PAUSE_S)  # One that has come just now, or gone, is told apart soon.
            outcomes, tries = self._store.remove(keys, self._small), tries + 1
        rows = [row for row, one in enumerate(outcomes) if one is Removed.MISSING]
        sizes = self._large.sizes(keys[rows], self._parts, self._timeout_s).tolist()
        for row, size in zip(rows, sizes, strict=True):
            if size:
                outcomes[row] = self._large.remove(keys[[row]], self._parts, size)[0]
            elif existed[row] and tries > 1:
                outcomes[row] = Removed.REMOVED  # By a try before, at those that could be asked.
        return [OF_REMOVE[one] for one in outcomes]

    def clear(self) -> int:
        """How many were removed, copies counted."""
        return self._store.clear(self._small) + self._large.clear(self._parts)

    def are_in_memory(self, keys: Keys) -> list[bool]:
        """Of objects that exist: not below it, on a disk. Asks by a pin of the shortest time."""
        pinned = self._store.pin(keys, self._small, PIN_TO_ASK_S)
        return [one is not Pinned.MISSING for one in pinned]

    def pin(self, keys: Keys, ttl_s: float) -> list[bool]:
        """Which of them stay in memory for so long; large ones do not."""
        pinned = self._store.pin(keys, self._small, ttl_s)
        return [one is Pinned.PINNED for one in pinned]

    def unpin(self, keys: Keys) -> None:
        """Takes one pin from each."""
        self._store.unpin(keys, self._small)

    def _get_exactly(self, keys: Keys, of: Sequence[int], rooms: Sequence[Memory]) -> list[Got]:
        """Objects that are as large as their memory. ``of``: the row of each room's key."""
        outcomes = [Got.MISSING] * len(rooms)
        for rows, pieces in _groups(rooms):
            wanted = keys[[of[row] for row in rows]]
            with stopped():
                if pieces.object_bytes <= PART_BYTES:
                    some = self._store.get(wanted, self._small, pieces, self._timeout_s)
                else:
                    some = self._get_parts(wanted, pieces)
            _place(outcomes, rows, some)
        return outcomes

    def _get_parts(self, keys: Keys, pieces: Pieces) -> list[Got]:
        """An object that is said to exist and lacks a part is removed: who asks whether it exists
        would neither get nor store it, for ever."""
        outcomes = self._large.get(keys, self._parts, pieces, self._timeout_s)
        rows = [row for row, one in enumerate(outcomes) if one in _GONE]
        if rows:
            sizes = self._large.sizes(keys[rows], self._parts, self._timeout_s)
            broken = [row for row, n in zip(rows, sizes, strict=True) if n == pieces.object_bytes]
            if broken:
                logger.info("%d objects lack a part, and are removed", len(broken))
                self._large.remove(keys[broken], self._parts, pieces.object_bytes)
        return outcomes


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def _groups(memories: Sequence[Memory]) -> Iterator[tuple[list[int], Pieces]]:
    """Rows of one shape, for which one call does."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for row, one in enumerate(memories):
        by_shape.setdefault(one.nbytes, []).append(row)
    for shape, rows in by_shape.items():
        addresses = np.array([memories[row].addresses for row in rows], np.uint64)
        yield rows, Pieces(addresses, np.array(shape, np.uint64))


def _place(outcomes: list[Outcome], rows: Sequence[int], some: Sequence[Outcome]) -> None:
    for row, one in zip(rows, some, strict=True):
        outcomes[row] = one


def _beginning(memory: Memory, nbytes: int) -> Memory:
    """The first bytes of it."""
    addresses, sizes = list[int](), list[int]()
    for address, size in zip(memory.addresses, memory.nbytes, strict=True):
        if nbytes <= 0:
            break
        addresses.append(address)
        sizes.append(min(size, nbytes))
        nbytes -= size
    return Memory(tuple(addresses), tuple(sizes))
