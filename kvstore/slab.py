# SPDX-License-Identifier: Apache-2.0
"""Memory cut into slots: which slots there are, and which are free. Pure: it never touches the
memory.

A slab is a row of units of 4 KiB, cut into chunks. A chunk belongs to one size class, and has slots
of that size; a free chunk belongs to none. A slot is named by its first unit, so that its address
and the address of its header follow from the name alone.

    | headers: 64 bytes for each unit | chunk 0: slots of one class | chunk 1 ... |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Final

from kvstore.headers import HEADER_BYTES

__all__ = ["UNIT_BYTES", "Slab", "Slots", "class_of"]

UNIT_BYTES: Final = 4096
"""Slots begin and end at multiples of it, as direct I/O demands."""
_STEPS: Final = 8
"""Classes in each doubling: a slot is at most 1/8 larger than its object (above 32 KiB)."""


def class_of(nbytes: int) -> int:
    """The units of a slot for an object of so many bytes: the next size class."""
    units = max(-(-nbytes // UNIT_BYTES), 1)
    step = 1 << max((units - 1).bit_length() - _STEPS.bit_length(), 0)
    return -(-units // step) * step


class Slots:
    """Chunks of equal size, and which of their slots are free. Not thread-safe."""

    def __init__(self, chunks: int, chunk_units: int) -> None:
        self.chunks: Final = chunks
        self.chunk_units: Final = chunk_units
        self._free_chunks = list(range(self.chunks - 1, -1, -1))
        self._class_of_chunk: list[int] = [0] * self.chunks
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._taken_in_chunk = [0] * self.chunks
        #: Chunks that belong to a class, and have no slot that is taken.
        self._empty: set[int] = set()

    @property
    def object_bytes_max(self) -> int:
        """The largest object that fits."""
        return self.chunk_units * UNIT_BYTES

    @property
    def used_bytes(self) -> int:
        """Of all slots that are taken."""
        taken = zip(self._taken_in_chunk, self._class_of_chunk, strict=True)
        return sum(slots * units for slots, units in taken) * UNIT_BYTES

    def capacity(self, units: int) -> int:
        """Slots of a class, if it got all chunks that are its own or have nothing in them."""
        own = sum(1 for one in self._class_of_chunk if one == units)
        return (own + self._spare(units)) * (self.chunk_units // units)

    def free_slots(self, units: int) -> int:
        """Slots of a class that can be taken, those of chunks with nothing in them included."""
        return len(self._free[units]) + self._spare(units) * (self.chunk_units // units)

    def has_chunk(self, units: int) -> bool:
        """Whether the class has a chunk."""
        return units in self._class_of_chunk

    def take(self, units: int) -> int | None:
        """A free slot of a class; None if there is none."""
        free = self._free[units]
        if not free and not self._give_chunk(units):
            return None
        slot = free.pop()
        chunk = slot // self.chunk_units
        self._taken_in_chunk[chunk] += 1
        self._empty.discard(chunk)
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a slot that was taken."""
        chunk = slot // self.chunk_units
        self._free[self._class_of_chunk[chunk]].append(slot)
        self._taken_in_chunk[chunk] -= 1
        if not self._taken_in_chunk[chunk]:
            self._empty.add(chunk)

    def adopt(self, chunk: int, units: int, slots: Collection[int]) -> None:
        """A free chunk belongs to a class, and these of its slots are taken: there are objects in
        them, which somebody has left behind."""
        self._free_chunks.remove(chunk)
        self._class_of_chunk[chunk] = units
        taken = set(slots)
        self._free[units].extend(one for one in reversed(self.slots_of(chunk)) if one not in taken)
        self._taken_in_chunk[chunk] = len(taken)
        if not taken:
            self._empty.add(chunk)

    def slots_of(self, chunk: int) -> range:
        """The slots of a chunk, free or not; none if it belongs to no class."""
        units = self._class_of_chunk[chunk]
        if not units:
            return range(0)
        first = chunk * self.chunk_units
        return range(first, first + self.chunk_units // units * units, units)

    def chunk_to_empty(self, units: int, kept: Collection[int] = ()) -> int | None:
        """The chunk of another class with the least in it, and none of ``kept``; None if there is
        none."""
        others = [
            i
            for i, one in enumerate(self._class_of_chunk)
            if one not in (0, units) and i not in kept
        ]
        return min(
            others, key=lambda i: self._taken_in_chunk[i] * self._class_of_chunk[i], default=None
        )

    def _spare(self, units: int) -> int:
        """Chunks that this class could get: free ones, and empty ones of other classes."""
        others = sum(1 for one in self._empty if self._class_of_chunk[one] != units)
        return len(self._free_chunks) + others

    def _give_chunk(self, units: int) -> bool:
        if self._free_chunks:
            chunk = self._free_chunks.pop()
        else:
            chunk = min(self._empty, default=-1)  # None is of this class: it has no free slot.
            if chunk < 0:
                return False
            former = self._class_of_chunk[chunk]
            self._free[former] = [
                one for one in self._free[former] if one // self.chunk_units != chunk
            ]
        self._class_of_chunk[chunk] = units
        self._empty.add(chunk)
        self._free[units].extend(reversed(self.slots_of(chunk)))
        return True


class Slab(Slots):
    """The slots of a piece of memory. Not thread-safe."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        """``nbytes``: for headers and slots together. ``ValueError`` if no chunk fits."""
        if chunk_bytes < UNIT_BYTES or chunk_bytes % UNIT_BYTES:
            raise ValueError(f"chunk_bytes={chunk_bytes} must be a multiple of {UNIT_BYTES}")
        chunk_units = chunk_bytes // UNIT_BYTES
        per_chunk = chunk_bytes + chunk_units * HEADER_BYTES
        # The headers are rounded up to a unit, so that slots are aligned.
        chunks = max(nbytes - UNIT_BYTES, 0) // per_chunk
        if chunks < 1:
            raise ValueError(
                f"{nbytes} bytes are too few for one chunk of {chunk_bytes} bytes and its headers:"
                f" give at least {per_chunk + UNIT_BYTES}"
            )
        super().__init__(chunks, chunk_units)
        self.units: Final = self.chunks * self.chunk_units
        headers = self.units * HEADER_BYTES
        self.slots_offset: Final = -(-headers // UNIT_BYTES) * UNIT_BYTES
        self.nbytes: Final = self.slots_offset + self.units * UNIT_BYTES

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins, in bytes from the begin of the slab."""
        return self.slots_offset + slot * UNIT_BYTES
