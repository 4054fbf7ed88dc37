# SPDX-License-Identifier: Apache-2.0
"""A shelf above a tier: what becomes of objects on their way down and up. Pure, as the shelf is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from kvstore.memory.slab import class_of
from kvstore.objects.changes import KEY_BYTES, REMOVED, Records, form_of
from kvstore.rules.ledger import PARTS, Leaving, below_changes
from kvstore.rules.pinned_table import PinShelf
from kvstore.tiers.base import Found

__all__ = ["DeepShelf", "LiftState", "Lifted"]


class LiftState(IntEnum):
    """What an owner says of an object that somebody wants to have in memory."""

    #: It is in memory.
    HERE = 1
    #: It is neither in memory nor below, or could not be read.
    GONE = 2
    #: It lies below still: ask again.
    LATER = 3
    #: It has a slot, and is to be read into it. Not an answer.
    TAKEN = 4


@dataclass(frozen=True, slots=True)
class Lifted:
    """The answer for one object. Slot and generation are of those in memory."""

    state: LiftState
    slot: int = 0
    generation: int = 0


_GONE: Final = Lifted(LiftState.GONE)
_LATER: Final = Lifted(LiftState.LATER)


class DeepShelf(PinShelf):
    """Not thread-safe. Without a tier it is a ``Shelf``."""

    @property
    def parts(self) -> int:
        """What ``snapshot`` counts: the slab's chunks, and parts of what lies below."""
        return self.slab.chunks + (PARTS if self.ledger.has_tier else 0)

    def snapshot(self, first_chunk: int, chunks: int) -> Records:
        """See ``Shelf.snapshot``. Behind the chunks come the parts of what lies below alone."""
        names, forms = [], []
        first, end = (
            min(max(one - self.slab.chunks, 0), PARTS)
            for one in (first_chunk, first_chunk + chunks)
        )
        for number in range(first, end):
            for name, form in self.ledger.part(number).items():
                if name not in self._objects:
                    names.append(name)
                    forms.append(form)
        return np.concatenate([super().snapshot(first_chunk, chunks), below_changes(names, forms)])

    def adopt_below(self, found: Sequence[Found]) -> int:
        """Takes over what lies below, which a former owner has left there. Returns how many objects
        these are: those that are too large for this memory are not among them."""
        names, forms = [], []
        fitting = [one for one in found if one.nbytes <= self.slab.object_bytes_max]
        for one in fitting:
            form = form_of(one.name[KEY_BYTES:], one.nbytes)
            self.ledger.add(one.name, form)
            if one.name not in self._objects:
                names.append(one.name)
                forms.append(form)
        if names:
            self._log.append(below_changes(names, forms))
        return len(fitting)

    # -- down

    def content_of(self, slot: int) -> tuple[int, int]:
        """Size and checksum of the object that lies in a slot, or lay there until it was removed
        while the slot was held."""
        header = self._headers[slot]
        return int(header["nbytes"]), int(header["checksum"])

    def leave_all(self) -> None:
        """Has all objects written below that are not there yet. They go from memory."""
        for name, one in self._objects.items():
            if name not in self.ledger and self.ledger.leave(
                name, one.slot, one.units, is_pressed=False
            ):
                self._policies[one.units].remove(name)

    def left(self, leaving: Sequence[Leaving], stored: Sequence[bool]) -> None:
        """Objects were written below, or could not be."""
        gone = []
        for one, is_stored in zip(leaving, stored, strict=True):
            self.ledger.left(one)
            found = self._objects.get(one.name)
            if found is None or found.slot != one.slot:  # It was removed meanwhile.
                self.slab.give_back(one.slot)
                if is_stored:
                    self.ledger.unwanted(one.name)
                continue
            if is_stored:
                self.ledger.add(one.name, found.form)
                self.ledger.counts.moved_down += 1
            if one.is_kept:
                self._policies[one.units].add(one.name)
            else:
                self.ledger.counts.dropped += not is_stored
                gone.append(one.name)
        self._drop(gone)
        self.counts.evicted += len(gone)

    def sunk(self, names: Sequence[bytes]) -> None:
        """Objects do not lie below any more."""
        forms = [(name, self.ledger.discard(name)) for name in names]
        only = [
            (name, form) for name, form in forms if form is not None and name not in self._objects
        ]
        if only:
            self._log.append(
                below_changes([name for name, _ in only], [form for _, form in only], REMOVED)
            )

    # -- up

    def lift(self, names: Sequence[bytes], nbytes: int) -> list[Lifted]:
        """Slots for objects of one size that lie below. For each that is ``TAKEN``, call
        ``landed``. Others may leave for them; ``LATER`` if no slot is free yet."""
        units = self.slab.serving(class_of(nbytes))
        forms = {one: form_of(one, nbytes) for one in {name[KEY_BYTES:] for name in names}}
        wanted = sum(name in self.ledger and name not in self._objects for name in names)
        self._make_free(units, wanted)
        return [self._lift(name, forms[name[KEY_BYTES:]], units) for name in names]

    def _lift(self, name: bytes, form: int, units: int) -> Lifted:
        one = self._objects.get(name)
        if one is not None and one.form == form:
            self._touch(name, one)
            return Lifted(LiftState.HERE, one.slot, one.generation)
        if self.ledger.form(name) != form:
            return _GONE
        if name in self.ledger.lifting:
            return _LATER
        slot = self.slab.take(units)
        if slot is None:
            if not self.slab.has_chunk(units):
                self._starved[units] += 1
            return _LATER
        self.ledger.lifting[name] = slot
        return Lifted(LiftState.TAKEN, slot)

    def _make_free(self, units: int, count: int) -> None:
        """What is lifted lies below, and can wait there until others have been written: none is
        lost for it."""
        short = count - self.slab.free_slots(units) - self.ledger.leaving_in(units)
        if units in self._policies and short > 0:
            self.counts.evicted += len(self._evict(units, short, is_pressed=False))

    def landed(
        self, names: Sequence[bytes], nbytes: int, checksums: Sequence[int | None]
    ) -> list[Lifted]:
        """Objects of one signature that had ``TAKEN`` slots were read into them, or could not be
        (None): these do not lie below any more."""
        right: list[tuple[bytes, int, int]] = []
        for name, checksum in zip(names, checksums, strict=True):
            slot = self.ledger.lifting.pop(name)
            # It may have been removed meanwhile, and even stored anew.
            if checksum is None or name not in self.ledger or name in self._objects:
                self.slab.give_back(slot)
            else:
                right.append((name, slot, checksum))
        self.sunk([name for name, one in zip(names, checksums, strict=True) if one is None])
        if right:
            self._fill(
                [name[:KEY_BYTES] for name, _, _ in right],
                right[0][0][KEY_BYTES:],
                nbytes,
                [slot for _, slot, _ in right],
                [checksum for _, _, checksum in right],
            )
        self.ledger.counts.lifted += len(right)
        found = [self._objects.get(name) for name in names]
        return [
            _GONE if one is None else Lifted(LiftState.HERE, one.slot, one.generation)
            for one in found
        ]
