# SPDX-License-Identifier: Apache-2.0
"""Memory cut into slots: which slots there are, and which are free. Pure: it never touches the
memory.

A slab is a row of units of 4 KiB, cut into chunks. A chunk belongs to one size class, and has slots
of that size; a free chunk belongs to none. A slot is named by its first unit, so that its address
and the address of its header follow from the name alone.

    | headers: 64 bytes for each unit | chunk 0: slots of one class | chunk 1 ... |

While there are chunks enough, each size of objects has a class of its own. When there are not,
neighbours share one: its slots are as large as the next power of two. So few chunks serve all sizes
that there can be, and no size has to take the chunk of another again and again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import Final

from kvstore.objects.headers import HEADER_BYTES

__all__ = ["UNIT_BYTES", "Slab", "Slots", "class_of", "class_of_left", "classes_up_to"]

UNIT_BYTES: Final = 4096
"""Slots begin and end at multiples of it, as direct I/O demands."""
_STEPS: Final = 8
"""Classes in each doubling: a slot is at most 1/8 larger than its object (above 32 KiB)."""


def class_of(nbytes: int) -> int:
    """The units of a slot for an object of so many bytes: the next size class."""
    units = max(-(-nbytes // UNIT_BYTES), 1)
    step = 1 << max((units - 1).bit_length() - _STEPS.bit_length(), 0)
    return -(-units // step) * step


def classes_up_to(units: int) -> list[int]:
    """All classes whose slots have so many units at most, ascending."""
    found, one = [], 1
    while one <= units:
        found.append(one)
        one = class_of(one * UNIT_BYTES + 1)
    return found


class Slots:
    """Chunks of equal size, and which of their slots are free. Not thread-safe."""

    def __init__(self, chunks: int, chunk_units: int) -> None:
        self.chunks: Final = chunks
        self.chunk_units: Final = chunk_units
        self._free_chunks = list(range(self.chunks - 1, -1, -1))
        self._class_of_chunk: list[int] = [0] * self.chunks
        #: By class: how many chunks belong to it.
        self._chunks: Counter[int] = Counter()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._taken_in_chunk = [0] * self.chunks
        #: Chunks that belong to a class, and have no slot that is taken.
        self._empty: set[int] = set()
        #: By chunk: the class that it goes to when its last slot is given back.
        self._promised: dict[int, int] = {}

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
        own = self._chunks[units] + sum(1 for one in self._promised.values() if one == units)
        own -= sum(1 for one in self._promised if self._class_of_chunk[one] == units)
        return (own + self._spare(units)) * (self.chunk_units // units)

    def free_slots(self, units: int) -> int:
        """Slots of a class that can be taken, those of chunks with nothing in them included."""
        return len(self._free[units]) + self._spare(units) * (self.chunk_units // units)

    def has_chunk(self, units: int) -> bool:
        """Whether the class has a chunk."""
        return self._chunks[units] > 0

    def class_at(self, slot: int) -> int:
        """The class of a slot that is taken."""
        return self._class_of_chunk[slot // self.chunk_units]

    def serving(self, units: int) -> int:
        """The class whose slots the objects of a class get: its own as long as the chunks are many
        times as many as the classes, else one that it shares with its neighbours."""
        units = min(units, self.chunk_units)
        if self._chunks[units]:
            return units
        if self._spare(units) and len(self._in_use() | {units}) <= self._own_max:
            return units
        return self._shared(units)

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
        self._taken_in_chunk[chunk] -= 1
        if chunk in self._promised:
            self._keep_promise(chunk)
            return
        self._free[self._class_of_chunk[chunk]].append(slot)
        if not self._taken_in_chunk[chunk]:
            self._empty.add(chunk)

    def adopt(self, chunk: int, units: int, slots: Collection[int]) -> None:
        """A free chunk belongs to a class, and these of its slots are taken: there are objects in
        them, which somebody has left behind."""
        self._free_chunks.remove(chunk)
        self._belong(chunk, units)
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
        """The chunk that a class takes from another one, and none of ``kept``; None if there is
        none. Classes that have several come first, then those that can share another class's slots:
        so no class has to take back what it has lost. Of these it is the chunk with the least in
        it."""
        others = [
            i
            for i, one in enumerate(self._class_of_chunk)
            if one not in (0, units) and i not in kept and i not in self._promised
        ]
        return min(others, key=self._loss, default=None)

    def chunk_to_yield(self, units: int, kept: Collection[int] = ()) -> int | None:
        """The chunk with the least in it that a class can do without, and none of ``kept``: it has
        others, or there are too many classes for one of its own. None if there is none."""
        own = [
            i
            for i, one in enumerate(self._class_of_chunk)
            if one == units and i not in kept and i not in self._promised
        ]
        is_crowded = len(self._in_use()) > self._own_max
        if len(own) < 2 and not (is_crowded and units != self._shared(units)):
            return None
        return min(own, key=lambda i: self._taken_in_chunk[i], default=None)

    def promise(self, chunk: int, units: int) -> None:
        """The chunk goes to another class as soon as its last slot is given back. Nobody takes one
        of its slots until then."""
        former = self._class_of_chunk[chunk]
        self._forget_slots(chunk, former)
        self._promised[chunk] = units
        self._keep_promise(chunk)

    @property
    def promised(self) -> Collection[int]:
        """The chunks that were promised and have something in them still."""
        return self._promised.keys()

    def is_promised(self, units: int) -> bool:
        """Whether a class waits for a chunk."""
        return units in self._promised.values()

    @property
    def _own_max(self) -> int:
        """So many classes at most get a first chunk of their own."""
        return max(self.chunks // 2, 1)

    def _shared(self, units: int) -> int:
        """The class that serves a class and its neighbours."""
        return min(1 << (units - 1).bit_length(), self.chunk_units)

    def _in_use(self) -> set[int]:
        """The classes that have something in a chunk."""
        return {one for i, one in enumerate(self._class_of_chunk) if one and i not in self._empty}

    def _loss(self, chunk: int) -> tuple[int, int]:
        """How much is lost with a chunk: the smaller the less."""
        units = self._class_of_chunk[chunk]
        is_last = self._chunks[units] == 1
        rank = 0 if not is_last else 1 if units != self._shared(units) else 2
        return rank, self._taken_in_chunk[chunk] * units

    def _keep_promise(self, chunk: int) -> None:
        if not self._taken_in_chunk[chunk]:
            units = self._promised.pop(chunk)
            self._belong(chunk, units)
            self._empty.add(chunk)
            self._free[units].extend(reversed(self.slots_of(chunk)))

    def _belong(self, chunk: int, units: int) -> None:
        self._chunks[self._class_of_chunk[chunk]] -= 1
        self._class_of_chunk[chunk] = units
        self._chunks[units] += 1

    def _forget_slots(self, chunk: int, units: int) -> None:
        """Nobody takes a slot of the chunk any more."""
        self._empty.discard(chunk)
        self._free[units] = [one for one in self._free[units] if one // self.chunk_units != chunk]

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
            self._forget_slots(chunk, self._class_of_chunk[chunk])
        self._belong(chunk, units)
        self._empty.add(chunk)
        self._free[units].extend(reversed(self.slots_of(chunk)))
        return True


def class_of_left(slots: Iterable[tuple[int, int]], chunk_units: int) -> tuple[int, list[int]]:
    """What a chunk was cut into, by the objects that were left behind in it.

    Args:
        slots: for each object the unit of the chunk where it begins, and its own class.
        chunk_units: of the chunk.

    Returns a class whose slots can hold them, and which of them: by their numbers. An object that
    cannot lie beside those before it is left out.
    """
    possible = [*classes_up_to(chunk_units - 1), chunk_units]
    kept = []
    for number, (unit, units) in enumerate(slots):
        fitting = [
            one
            for one in possible
            if one >= min(units, chunk_units) and not unit % one and unit + one <= chunk_units
        ]
        if fitting:
            possible = fitting
            kept.append(number)
    return possible[0], kept


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
