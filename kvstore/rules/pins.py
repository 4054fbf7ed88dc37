# SPDX-License-Identifier: Apache-2.0
"""Which objects of an owner must not be evicted, and until when. Pure.

Several clients may pin one object, each for its own time: it stays until each of them has unpinned
it, or until the longest time is over. Pins have a bound, so that an owner always has memory that it
can give to others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["PIN_S_MAX", "Pins"]

PIN_S_MAX: Final = 86_400.0
"""A pin lasts no longer than a day: who needs more renews it, and so shows that it lives."""


@dataclass
class _Pin:
    units: int
    count: int
    until_s: float


class Pins:
    """Not thread-safe."""

    def __init__(self, units_max: int) -> None:
        """``units_max``: of all pinned objects together."""
        self.units_max: Final = units_max
        #: Of all pinned objects together.
        self.units = 0
        self._pins: dict[bytes, _Pin] = {}
        self._next_s = math.inf

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: bytes) -> bool:
        return name in self._pins

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pins)

    def add(self, name: bytes, units: int, until_s: float) -> bool:
        """One pin more; False if there is no room for it within the bound."""
        found = self._pins.get(name)
        if found is None:
            if self.units + units > self.units_max:
                return False
            self.units += units
            found = self._pins[name] = _Pin(units, 0, until_s)
        found.count += 1
        found.until_s = max(found.until_s, until_s)
        self._next_s = min(self._next_s, found.until_s)
        return True

    def take(self, name: bytes) -> bool:
        """One pin less, of an object that has one; whether that was the last."""
        found = self._pins[name]
        found.count -= 1
        if found.count:
            return False
        self.drop(name)
        return True

    def drop(self, name: bytes) -> None:
        """An object that has pins has none from now on."""
        self.units -= self._pins.pop(name).units

    def take_overdue(self, now_s: float) -> list[bytes]:
        """The objects whose time is over, which have no pins from now on. Looks at all of them only
        if there may be one."""
        if now_s < self._next_s:
            return []
        overdue = [name for name, one in self._pins.items() if one.until_s <= now_s]
        for name in overdue:
            self.drop(name)
        self._next_s = min((one.until_s for one in self._pins.values()), default=math.inf)
        return overdue
