# SPDX-License-Identifier: Apache-2.0
"""Stored objects some of which have to leave for others: which, and when. Pure.

An object is evicted by marking its header; only after that can its slot be claimed again. If there
is a lower tier, an object that has no copy there is written there first (``kvstore.rules.ledger``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvstore.rules.stored_objects import StoredObjects, TableParts

__all__ = ["EvictingTable"]


class EvictingTable(StoredObjects):
    """Room is made in it. Not thread-safe."""

    def __init__(self, parts: TableParts) -> None:
        super().__init__(parts)
        #: By class: objects that found no slot since the last ``make_room``.
        self._starved: Counter[int] = Counter()
        #: By class: objects that had to go for others since chunks were compared the last time.
        self._replaced: Counter[int] = Counter()

    def make_room(self, low: float, high: float) -> int:
        """Evicts objects until each class has free slots again, or will have them once those are
        written to the lower tier that leave; returns how many went.

        Args:
            low: a class is left alone as long as this part of its slots is free.
            high: the part of its slots that is free afterwards.
        """
        gone: list[bytes] = []
        late = self.ledger.late  # The tier is too slow for these classes.
        for units in self._policies:
            capacity = self.slab.capacity(units)
            free = self.slab.free_slots(units) + self.ledger.demoting_in(units)
            if free >= max(low * capacity, 1):
                continue
            gone += self._evict(units, max(int(high * capacity), 1) - free)
        for units, refused in self._starved.items():
            if self.slab.free_slots(units) or self.slab.is_promised(units):
                continue
            if units in late:
                gone += self._evict(units, refused, is_dropped=True)
            elif not self.ledger.demoting_in(units):
                self._take_chunk(units, self.slab.chunk_to_empty(units, self._kept_chunks()))
        self._balance()
        gone += self._empty_promised()
        self._starved.clear()
        self.ledger.note_late()
        self.counts.evicted += len(gone)
        return len(gone)

    def _make_free(self, units: int, count: int, *, is_pressed: bool) -> None:
        """Objects of a class leave until so many of its slots are free, or will be once those are
        written to the lower tier. ``is_pressed``: see ``_let_go``."""
        short = count - self.slab.free_slots(units) - self.ledger.demoting_in(units)
        if units in self._policies and short > 0:
            self.counts.evicted += len(self._evict(units, short, is_pressed=is_pressed))

    def _balance(self) -> None:
        """A class that has replaced all of its objects gets a chunk of one that has replaced less
        than half as many for its size. So memory goes where it is wanted, and a move costs no more
        objects than had to go without it."""
        rates = {
            units: self._replaced[units] / max(self.slab.capacity(units), 1)
            for units in self._policies
        }
        hot = max(rates, key=lambda one: rates[one], default=0)
        if not hot or rates[hot] < 1:
            return
        self._replaced.clear()
        kept = self._kept_chunks()
        for units in sorted(rates, key=lambda one: rates[one]):
            if rates[units] >= rates[hot] / 2:
                return
            chunk = self.slab.chunk_to_yield(units, kept)
            if chunk is not None:
                self._take_chunk(hot, chunk)
                return

    def _take_chunk(self, units: int, chunk: int | None) -> None:
        if chunk is not None:
            self.slab.promise(chunk, units)

    def _empty_promised(self) -> Sequence[bytes]:
        """Objects go whose chunk another class waits for, also those that came since."""
        names = [
            name
            for chunk in tuple(self.slab.promised)
            for name in self._names_in(chunk)
            if not self.ledger.is_held(self._objects[name].slot) and not self._is_kept(name)
        ]
        for name in names:
            self._policies[self._objects[name].units].remove(name)
        return self._let_go(names)

    def _evict(
        self, units: int, count: int, *, is_dropped: bool = False, is_pressed: bool = True
    ) -> Sequence[bytes]:
        """So many objects of a class leave, if there are so many; returns those that are gone
        already, which are all if they shall be dropped. ``is_pressed``: see ``_let_go``."""
        policy = self._policies[units]
        victims = [name for _ in range(count) if (name := policy.evict()) is not None]
        self._replaced[units] += len(victims)
        return self._let_go(victims, is_dropped=is_dropped, is_pressed=is_pressed)

    def _let_go(
        self, names: Iterable[bytes], *, is_dropped: bool = False, is_pressed: bool = True
    ) -> Sequence[bytes]:
        """Of objects that no policy knows any more: those without a copy in the lower tier are to
        be written there first, if that can be. Returns the others, which are gone.
        ``is_pressed=False``: for who can wait. However many wait for the tier, none goes without a
        copy."""
        gone = []
        for name in names:
            one = self._objects[name]
            if name not in self.ledger:
                if not is_dropped and self.ledger.demote(
                    name, one.slot, one.units, is_pressed=is_pressed
                ):
                    continue
                if not is_pressed:  # A former object of its name is being written: it stays.
                    self._policies[one.units].add(name)
                    continue
                self.ledger.counts.dropped += self.ledger.has_tier
            gone.append(name)
        return self._drop(gone)

    def _kept_chunks(self) -> set[int]:
        """Chunks with objects that must not go."""
        return set()

    def _is_kept(self, name: bytes) -> bool:  # noqa: ARG002 - of those that may be
        """Whether an object must not go."""
        return False
