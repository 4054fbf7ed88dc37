# SPDX-License-Identifier: Apache-2.0
"""A table some of whose objects are pinned: they are not evicted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Pinned
from kvstore.rules.object_table import ObjectTable
from kvstore.rules.pins import Pins
from kvstore.rules.stored_objects import TableParts

__all__ = ["PINNED_PART", "PinnedTable"]

PINNED_PART: Final = 0.5
"""Of the memory, that pins may take at most: the rest is for what comes and goes."""


class PinnedTable(ObjectTable):
    """Not thread-safe."""

    def __init__(self, parts: TableParts) -> None:
        super().__init__(parts)
        self.pins: Final = Pins(int(parts.slab.units * PINNED_PART))

    def pin(self, keys: Keys, signature: bytes, until_s: float) -> tuple[list[Pinned], str]:
        """One pin more for each object that is here, until a time of the owner's clock. One answer
        for each key, and why some were refused."""
        answers: list[Pinned] = []
        for key in keys:
            name = key.tobytes() + signature
            one = self._objects.get(name)
            if one is None or self.ledger.is_held(one.slot):  # Or it leaves at the moment.
                answers.append(Pinned.MISSING)
                continue
            is_new = name not in self.pins
            if not self.pins.add(name, one.units, until_s):
                answers.append(Pinned.REFUSED)
                continue
            if is_new:
                self._policy(one.units).keep(name)
            answers.append(Pinned.PINNED)
        return answers, self._why(answers.count(Pinned.REFUSED))

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """One pin less for each object that has one."""
        for key in keys:
            name = key.tobytes() + signature
            if name in self.pins and self.pins.take(name):
                self._release(name)

    def unpin_overdue(self, now_s: float) -> int:
        """Ends the pins whose time is over; returns of how many objects."""
        names = self.pins.take_overdue(now_s)
        for name in names:
            self._release(name)
        return len(names)

    def _release(self, name: bytes) -> None:
        self._policy(self._objects[name].units).release(name)

    def _kept_chunks(self) -> set[int]:
        return {self._objects[name].slot // self.slab.chunk_units for name in self.pins}

    def _is_kept(self, name: bytes) -> bool:
        return name in self.pins

    def _drop(self, names: Iterable[bytes]) -> Sequence[bytes]:
        gone = super()._drop(names)
        for name in gone:
            if name in self.pins:
                self.pins.drop(name)
        return gone

    def _why(self, refused: int) -> str:
        if not refused:
            return ""
        return (
            f"an owner's pins take at most {self.pins.units_max * UNIT_BYTES} bytes, which is"
            f" {PINNED_PART:.0%} of its memory; {self.pins.units * UNIT_BYTES} bytes are pinned,"
            f" and {refused} objects were refused"
        )
