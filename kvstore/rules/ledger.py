# SPDX-License-Identifier: Apache-2.0
"""Which objects of an owner lie in its lower tier, or are being demoted or promoted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import (
    ADDED,
    CHANGE,
    KEY_BYTES,
    LOWER_TIER,
    Records,
    fingerprint_of,
    keys_of_digests,
)

__all__ = ["PARTS", "Demoting", "Ledger", "LedgerCounts", "lower_tier_changes"]

PARTS: Final = 256
"""A snapshot is asked for in so many parts: by the first byte of the key."""


@dataclass(slots=True)
class Demoting:
    """An object that is being written to the lower tier. Its slot stays its own until then."""

    name: bytes
    slot: int
    units: int
    #: It was read meanwhile, and stays in memory afterwards.
    is_kept: bool = False
    #: It was on its way already when room was made the last time.
    is_late: bool = False


@dataclass
class LedgerCounts:
    """What has happened since the start."""

    demoted: int = 0
    promoted: int = 0
    #: Objects that were evicted without a copy in the lower tier: the tier was too slow, or did not
    #: take them.
    dropped: int = 0


class Ledger:
    """Not thread-safe. A *name* is key and signature."""

    def __init__(self, demoting_bytes_max: int) -> None:
        """``demoting_bytes_max``: memory of objects that wait to be written to the lower tier and
        go from memory then. As much may wait of those that were read meanwhile, and stay. 0 if
        there is no tier."""
        self.counts: Final = LedgerCounts()
        self.has_tier: Final = demoting_bytes_max > 0
        #: By name: those being demoted.
        self.demoting: Final[dict[bytes, Demoting]] = {}
        #: By name: those being promoted, and the slots that they come to.
        self.promoting: Final[dict[bytes, int]] = {}
        self._demoting_bytes_max = demoting_bytes_max
        self._demoting_bytes = 0
        self._kept_bytes = 0
        self._held: set[int] = set()
        self._sizes: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self._to_write: list[Demoting] = []
        self._unwanted: list[bytes] = []

    # -- what lies in the lower tier

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes[name[0]]

    def __len__(self) -> int:
        return sum(map(len, self._sizes))

    def __iter__(self) -> Iterator[bytes]:
        for one in self._sizes:
            yield from one

    def nbytes(self, name: bytes) -> int | None:
        """The size of an object that lies in the lower tier; else None."""
        return self._sizes[name[0]].get(name)

    def add(self, name: bytes, nbytes: int) -> None:
        """The object lies in the lower tier now."""
        self._sizes[name[0]][name] = nbytes

    def discard(self, name: bytes) -> int | None:
        """It does not any more. Its size, or None if it did not."""
        return self._sizes[name[0]].pop(name, None)

    def part(self, number: int) -> dict[bytes, int]:
        """Names and sizes of a part of those in the tier."""
        return self._sizes[number]

    def unwanted(self, name: bytes) -> None:
        """The tier is to forget it for good."""
        self._unwanted.append(name)

    # -- demoting

    def is_held(self, slot: int) -> bool:
        """Whether the slot is read at the moment, to be written to the lower tier."""
        return slot in self._held

    def demoting_in(self, units: int) -> int:
        """Slots of a class that become free once what is in them was written."""
        return sum(1 for one in self.demoting.values() if one.units == units and not one.is_kept)

    @property
    def late(self) -> set[int]:
        """The classes that wait for slots since ``note_late``."""
        return {one.units for one in self.demoting.values() if one.is_late and not one.is_kept}

    def note_late(self) -> None:
        """What is on its way now has had its time when room is made again."""
        for one in self.demoting.values():
            one.is_late = True

    def demote(self, name: bytes, slot: int, units: int, *, is_pressed: bool = True) -> bool:
        """Has an object written to the lower tier. False if there is no tier, too many wait
        already, or a former object of that name is being written still. ``is_pressed=False``:
        however many wait."""
        nbytes = units * UNIT_BYTES
        if not self.has_tier or name in self.demoting:
            return False
        # One goes at any size: else large objects never would.
        full = self._demoting_bytes and self._demoting_bytes + nbytes > self._demoting_bytes_max
        if full and is_pressed:
            return False
        demoting = self.demoting[name] = Demoting(name, slot, units)
        self._to_write.append(demoting)
        self._held.add(slot)
        self._demoting_bytes += nbytes
        return True

    def keep(self, one: Demoting) -> None:
        """It was read meanwhile: it stays in memory once it is written, and takes no place of those
        that go. Those beyond what may wait go nevertheless: else, while a tier hangs, what is read
        would fill the memory with objects that cannot go."""
        nbytes = one.units * UNIT_BYTES
        full = self._kept_bytes and self._kept_bytes + nbytes > self._demoting_bytes_max
        if one.is_kept or full:
            return
        one.is_kept = True
        self._demoting_bytes -= nbytes
        self._kept_bytes += nbytes

    @property
    def has_work(self) -> bool:
        """Whether ``take`` has something."""
        return bool(self._to_write or self._unwanted)

    def take(self, limit: int) -> tuple[list[bytes], list[Demoting]]:
        """For who writes: what the tier is to forget first, and what it is to write then, so many
        at most."""
        unwanted, self._unwanted = self._unwanted, []
        some, self._to_write = self._to_write[:limit], self._to_write[limit:]
        return unwanted, some

    def demoted(self, one: Demoting) -> None:
        """It was written, or could not be."""
        del self.demoting[one.name]
        self._held.discard(one.slot)
        nbytes = one.units * UNIT_BYTES
        if one.is_kept:
            self._kept_bytes -= nbytes
        else:
            self._demoting_bytes -= nbytes


def lower_tier_changes(objects: Mapping[bytes, int], op: int = ADDED) -> Records:
    """Of objects that lie in the lower tier, or do not any more, by name with their sizes: dtype
    ``CHANGE``."""
    changes = np.zeros(len(objects), CHANGE)
    if objects:
        changes["key"] = keys_of_digests(list(objects)).view("V16").reshape(-1)
    changes["fingerprint"] = [fingerprint_of(one[KEY_BYTES:], n) for one, n in objects.items()]
    changes["slot"], changes["op"] = LOWER_TIER, op
    return changes
