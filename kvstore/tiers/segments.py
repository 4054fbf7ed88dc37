# SPDX-License-Identifier: Apache-2.0
"""Which object lies where in segment files, and which has to go for another one. Pure.

A segment belongs to one size class, as a chunk of memory does. Its places have a unit of 4 KiB for
their head and those of the object. When a segment goes to another class it gets a new *serial*, by
which heads of its former places are told from those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.memory.policies import Policy
from kvstore.memory.slab import Slots, class_of

__all__ = ["Place", "Segments", "Taken", "place_units"]


def place_units(nbytes: int) -> int:
    """The units of a place for an object of so many bytes, with its head."""
    return class_of(nbytes) + 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object lies, or is to be written."""

    slot: int
    nbytes: int
    #: Of its segment.
    serial: int
    #: Of this write: later ones have larger numbers.
    sequence: int


@dataclass(frozen=True)
class Taken:
    """A place for an object, or none."""

    place: Place | None
    #: The names of the objects that had to go.
    gone: Sequence[bytes]
    #: The segment, if its head is to be written before the place.
    fresh: int | None = None


class Segments:
    """Not thread-safe."""

    def __init__(self, count: int, segment_units: int, new_policy: Callable[[], Policy]) -> None:
        self.segment_units: Final = segment_units
        self._slots = Slots(count, segment_units)
        self._new_policy = new_policy
        self._places: dict[bytes, Place] = {}
        self._names: dict[int, bytes] = {}
        self._policies: dict[int, Policy] = {}
        #: By segment: its class and serial, as its head says them.
        self._heads: dict[int, tuple[int, int]] = {}
        self._serial = 0
        self._sequence = 0
        #: Bytes of all objects.
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def place(self, name: bytes) -> Place | None:
        """Where an object lies; None if it is not there."""
        return self._places.get(name)

    def segment_of(self, place: Place) -> tuple[int, int]:
        """The segment's number, and the unit within it where the place begins."""
        return divmod(place.slot, self.segment_units)

    def head(self, segment: int) -> tuple[int, int]:
        """A segment's class (units of its places) and serial."""
        return self._heads[segment]

    # -- what was left behind

    def adopt(self, heads: Mapping[int, tuple[int, int]], found: Mapping[bytes, Place]) -> None:
        """Takes over what heads say; only before anything else. No two objects are in one place.

        Args:
            heads: class and serial of each segment that has some.
            found: where objects lie.
        """
        taken: dict[int, list[int]] = {segment: [] for segment in heads}
        for name, place in sorted(found.items(), key=lambda one: one[1].sequence):
            taken[self.segment_of(place)[0]].append(place.slot)
            self._remember(name, place)
        for segment, (units, serial) in heads.items():
            self._slots.adopt(segment, units, taken[segment])
            self._heads[segment] = units, serial
            self._serial = max(self._serial, serial)
        self._sequence = max((one.sequence for one in found.values()), default=0)

    # -- writing

    def take(self, nbytes: int) -> Taken:
        """A place for an object, which is to be written there. Objects that were read longest ago
        go for it."""
        units = place_units(nbytes)
        if units > self.segment_units:
            return Taken(None, ())
        gone: list[bytes] = []
        slot = self._slots.take(units)
        if slot is None:
            policy = self._policies.get(units)
            victim = None if policy is None else policy.evict()
            gone = self._of_other_class(units) if victim is None else [victim]
            for name in gone:
                self.release(self._forget(name))
            slot = self._slots.take(units)
        if slot is None:
            return Taken(None, gone)
        self._sequence += 1
        segment, fresh = slot // self.segment_units, None
        if self._heads.get(segment, (0, 0))[0] != units:
            self._serial += 1
            self._heads[segment], fresh = (units, self._serial), segment
        place = Place(slot, nbytes, self._heads[segment][1], self._sequence)
        return Taken(place, gone, fresh)

    def store(self, name: bytes, place: Place) -> None:
        """An object was written to a place that was taken. One of the same name goes."""
        if name in self._places:
            self.release(self.remove(name))
        self._remember(name, place)

    def release(self, place: Place | None) -> None:
        """Frees a place: nothing was written to it, or nothing is there any more."""
        if place is not None:
            self._slots.give_back(place.slot)

    def head_failed(self, segment: int) -> None:
        """The segment's head was not written: the next one who takes a place in it is to try."""
        self._heads.pop(segment, None)

    # -- what lies there

    def touch(self, name: bytes) -> None:
        """The object was read. It is there."""
        self._policies[place_units(self._places[name].nbytes)].touch(name)

    def remove(self, name: bytes) -> Place | None:
        """Forgets an object; ``release`` its place afterwards. None if it is not there."""
        place = self._places.get(name)
        if place is not None:
            self._policies[place_units(place.nbytes)].remove(name)
            self._forget(name)
        return place

    def _remember(self, name: bytes, place: Place) -> None:
        self._places[name] = place
        self._names[place.slot] = name
        self.nbytes += place.nbytes
        units = place_units(place.nbytes)
        policy = self._policies.get(units)
        if policy is None:
            policy = self._policies[units] = self._new_policy()
        policy.add(name)

    def _forget(self, name: bytes) -> Place:
        """Of an object that no policy knows any more."""
        place = self._places.pop(name)
        del self._names[place.slot]
        self.nbytes -= place.nbytes
        return place

    def _of_other_class(self, units: int) -> list[bytes]:
        """The objects of the segment that this class is to have, out of their policies."""
        segment = self._slots.chunk_to_empty(units)
        if segment is None:
            return []
        names = [self._names.get(slot) for slot in self._slots.slots_of(segment)]
        found = [one for one in names if one is not None]
        for name in found:
            self._policies[place_units(self._places[name].nbytes)].remove(name)
        return found
