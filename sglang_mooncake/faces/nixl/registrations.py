# SPDX-License-Identifier: Apache-2.0
"""Which memory an agent has registered, how often, and which regions te needs for it. Pure.

NIXL takes the same range twice and ranges that overlap; te's regions are disjoint. So a
registration gets te's regions only for what no region covers yet, and a region stays until no
registration touches it any more.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_mooncake.faces.nixl.descriptors import RegDList
from sglang_mooncake.faces.nixl.names import Backend, Segment

__all__ = ["Range", "Registrations", "ranges_of"]

Region = TypeVar("Region")


class Range(NamedTuple):
    """A registration: who registers the same again must give it back as often."""

    segment: Segment
    device: int
    address: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def ranges_of(descs: RegDList) -> list[Range]:
    """``nixlBackendError`` for storage."""
    segment = descs.getType()
    if segment.is_storage:
        raise Backend(f"te moves memory, and nothing of {segment.name}")
    return [Range(segment, dev, address, nbytes) for address, nbytes, dev in descs.rows.tolist()]


@dataclass
class _Part(Generic[Region]):
    """One region, and how many registrations touch it."""

    address: int
    end: int
    region: Region
    holders: int = field(default=1)


class Registrations(Generic[Region]):
    """Not thread-safe: who has it has a lock."""

    def __init__(self) -> None:
        self._known: Counter[Range] = Counter()
        #: Disjoint, by address; the addresses once more, for bisect.
        self._parts: list[_Part[Region]] = []
        self._addresses: list[int] = []
        #: Rises with each change, so that of two accounts the later one is known.
        self.generation: int = 0

    def __contains__(self, one: Range) -> bool:
        return one in self._known

    def times(self, one: Range) -> int:
        """How often it is registered."""
        return self._known.get(one, 0)

    def gaps(self, one: Range) -> list[tuple[int, int]]:
        """(address, bytes) of what no region covers, in order: regions are to be made there."""
        found = []
        at = one.address
        for part in self._touched(one):
            if part.address > at:
                found.append((at, part.address - at))
            at = part.end
        if at < one.end:
            found.append((at, one.end - at))
        return found

    def add(self, one: Range, regions: list[tuple[int, int, Region]]) -> None:
        """A registration, with the regions (address, bytes, region) that fill all its gaps."""
        for part in self._touched(one):
            part.holders += 1
        for address, nbytes, region in regions:
            i = bisect.bisect(self._addresses, address)
            self._addresses.insert(i, address)
            self._parts.insert(i, _Part(address, address + nbytes, region))
        self._known[one] += 1
        self.generation += 1

    def freed(self, *ranges: Range) -> list[Region]:
        """The regions that nobody needs once all of these are given back. ``KeyError`` if one is
        not known."""
        holders: Counter[int] = Counter()
        parts: dict[int, _Part[Region]] = {}
        for one in ranges:
            if one not in self._known:
                raise KeyError(one)
            for part in self._touched(one):
                parts[part.address] = part
                holders[part.address] += 1
        return [part.region for at, part in parts.items() if part.holders == holders[at]]

    def remove(self, one: Range) -> None:
        """Gives one registration back, and forgets the regions that `freed` names for it."""
        touched = self._touched(one)
        self._known[one] -= 1
        if not self._known[one]:
            del self._known[one]
        for part in touched:
            part.holders -= 1
            if not part.holders:
                i = bisect.bisect_left(self._addresses, part.address)
                del self._addresses[i], self._parts[i]
        self.generation += 1

    def ranges(self) -> list[Range]:
        """Of all registrations, each once."""
        return list(self._known)

    def cover(self) -> npt.NDArray[np.uint64]:
        """Shape (n, 2) of (address, bytes), as `prepared.Cover` wants it."""
        rows = [(one.address, one.nbytes) for one in self._known]
        return np.array(rows, np.uint64).reshape(-1, 2)

    def regions(self) -> list[Region]:
        return [part.region for part in self._parts]

    def _touched(self, one: Range) -> list[_Part[Region]]:
        first = bisect.bisect(self._addresses, one.address) - 1
        if first < 0 or self._parts[first].end <= one.address:
            first += 1
        last = bisect.bisect_left(self._addresses, one.end)
        return self._parts[first:last]
