# SPDX-License-Identifier: Apache-2.0
"""Which objects of an owner lie below its memory, or are on their way down or up. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import ADDED, BELOW, CHANGE, Records, keys_of_digests

__all__ = ["PARTS", "Leaving", "Ledger", "LedgerCounts", "below_changes"]

PARTS: Final = 256
"""A snapshot is asked for in so many parts: by the first byte of the key."""


@dataclass(slots=True)
class Leaving:
    """An object that is being written below. Its slot stays its own until then."""

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

    moved_down: int = 0
    lifted: int = 0
    #: Objects that were evicted without a copy below: the tier was too slow, or did not take them.
    dropped: int = 0


class Ledger:
    """Not thread-safe. A *name* is key and signature."""

    def __init__(self, leaving_bytes_max: int) -> None:
        """``leaving_bytes_max``: memory of objects that wait to be written below and go from memory
        then. As much may wait of those that were read meanwhile, and stay. 0 if there is no tier.
        """
        self.counts: Final = LedgerCounts()
        self.has_tier: Final = leaving_bytes_max > 0
        #: By name: those on their way down.
        self.leaving: Final[dict[bytes, Leaving]] = {}
        #: By name: those on their way up, and the slots that they come to.
        self.lifting: Final[dict[bytes, int]] = {}
        self._leaving_bytes_max = leaving_bytes_max
        self._leaving_bytes = 0
        self._kept_bytes = 0
        self._held: set[int] = set()
        self._forms: list[dict[bytes, int]] = [{} for _ in range(PARTS)]
        self._to_write: list[Leaving] = []
        self._unwanted: list[bytes] = []

    # -- what lies below

    def __contains__(self, name: bytes) -> bool:
        return name in self._forms[name[0]]

    def __len__(self) -> int:
        return sum(map(len, self._forms))

    def __iter__(self) -> Iterator[bytes]:
        for one in self._forms:
            yield from one

    def form(self, name: bytes) -> int | None:
        """Of an object that lies below; else None."""
        return self._forms[name[0]].get(name)

    def add(self, name: bytes, form: int) -> None:
        """The object lies below now."""
        self._forms[name[0]][name] = form

    def discard(self, name: bytes) -> int | None:
        """It does not any more. Its form, or None if it did not."""
        return self._forms[name[0]].pop(name, None)

    def part(self, number: int) -> dict[bytes, int]:
        """Names and forms of a part of those below."""
        return self._forms[number]

    def unwanted(self, name: bytes) -> None:
        """The tier is to forget it for good."""
        self._unwanted.append(name)

    # -- on the way down

    def is_held(self, slot: int) -> bool:
        """Whether the slot is read at the moment, to be written below."""
        return slot in self._held

    def leaving_in(self, units: int) -> int:
        """Slots of a class that become free once what is in them was written."""
        return sum(1 for one in self.leaving.values() if one.units == units and not one.is_kept)

    @property
    def late(self) -> set[int]:
        """The classes that wait for slots since ``note_late``."""
        return {one.units for one in self.leaving.values() if one.is_late and not one.is_kept}

    def note_late(self) -> None:
        """What is on its way now has had its time when room is made again."""
        for one in self.leaving.values():
            one.is_late = True

    def leave(self, name: bytes, slot: int, units: int, *, is_pressed: bool = True) -> bool:
        """Has an object written below. False if there is no tier, too many wait already, or a
        former object of that name is being written still. ``is_pressed=False``: however many wait.
        """
        nbytes = units * UNIT_BYTES
        if not self.has_tier or name in self.leaving:
            return False
        # One goes at any size: else large objects never would.
        full = self._leaving_bytes and self._leaving_bytes + nbytes > self._leaving_bytes_max
        if full and is_pressed:
            return False
        leaving = self.leaving[name] = Leaving(name, slot, units)
        self._to_write.append(leaving)
        self._held.add(slot)
        self._leaving_bytes += nbytes
        return True

    def keep(self, one: Leaving) -> None:
        """It was read meanwhile: it stays in memory once it is written, and takes no place of those
        that go. Those beyond what may wait go nevertheless: else, while a tier hangs, what is read
        would fill the memory with objects that cannot go."""
        nbytes = one.units * UNIT_BYTES
        full = self._kept_bytes and self._kept_bytes + nbytes > self._leaving_bytes_max
        if one.is_kept or full:
            return
        one.is_kept = True
        self._leaving_bytes -= nbytes
        self._kept_bytes += nbytes

    @property
    def has_work(self) -> bool:
        """Whether ``take`` has something."""
        return bool(self._to_write or self._unwanted)

    def take(self, limit: int) -> tuple[list[bytes], list[Leaving]]:
        """For who writes: what the tier is to forget first, and what it is to write then, so many
        at most."""
        unwanted, self._unwanted = self._unwanted, []
        some, self._to_write = self._to_write[:limit], self._to_write[limit:]
        return unwanted, some

    def left(self, one: Leaving) -> None:
        """It was written, or could not be."""
        del self.leaving[one.name]
        self._held.discard(one.slot)
        nbytes = one.units * UNIT_BYTES
        if one.is_kept:
            self._kept_bytes -= nbytes
        else:
            self._leaving_bytes -= nbytes


def below_changes(names: Sequence[bytes], forms: Sequence[int], op: int = ADDED) -> Records:
    """Of objects that lie below, or do not any more: dtype ``CHANGE``."""
    changes = np.zeros(len(names), CHANGE)
    if names:
        changes["key"] = keys_of_digests(names).view("V16").reshape(-1)
    changes["form"], changes["slot"], changes["op"] = forms, BELOW, op
    return changes
