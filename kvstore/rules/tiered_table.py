# SPDX-License-Identifier: Apache-2.0
"""A table above a tier: what becomes of objects that are demoted and promoted. Pure, as the table
is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from kvstore.memory.slab import class_of
from kvstore.objects.changes import KEY_BYTES, REMOVED, Records
from kvstore.rules.ledger import PARTS, Demoting, lower_tier_changes
from kvstore.rules.pinned_table import PinnedTable
from kvstore.tiers.base import Found

__all__ = ["Promoted", "PromotionState", "TieredTable"]


class PromotionState(IntEnum):
    """What an owner says of an object that somebody wants to have in memory."""

    #: It is in memory.
    HERE = 1
    #: It is neither in memory nor in the lower tier, or could not be read.
    GONE = 2
    #: It lies in the lower tier still: ask again.
    LATER = 3
    #: It has a slot, and is to be read into it. Not an answer.
    TAKEN = 4


@dataclass(frozen=True, slots=True)
class Promoted:
    """The answer for one object. Slot and generation are of those in memory."""

    state: PromotionState
    slot: int = 0
    generation: int = 0


_GONE: Final = Promoted(PromotionState.GONE)
_LATER: Final = Promoted(PromotionState.LATER)


class TieredTable(PinnedTable):
    """Not thread-safe. Without a tier it is a ``ObjectTable``."""

    @property
    def parts(self) -> int:
        """What ``snapshot`` counts: the slab's chunks, and parts of what lies in the lower tier."""
        return self.slab.chunks + (PARTS if self.ledger.has_tier else 0)

    def snapshot(self, first_chunk: int, chunks: int) -> Records:
        """See ``StoredObjects.snapshot``. Behind the chunks come the parts of what lies in the
        lower tier alone."""
        alone: dict[bytes, int] = {}
        first, end = (
            min(max(one - self.slab.chunks, 0), PARTS)
            for one in (first_chunk, first_chunk + chunks)
        )
        for number in range(first, end):
            part = self.ledger.part(number).items()
            alone |= {name: nbytes for name, nbytes in part if name not in self._objects}
        return np.concatenate([super().snapshot(first_chunk, chunks), lower_tier_changes(alone)])

    def adopt_lower_tier(self, found: Sequence[Found]) -> int:
        """Takes over what lies in the lower tier, which a former owner has left there. Returns how
        many objects these are: those that are too large for this memory are not among them."""
        max_bytes = self.slab.object_bytes_max
        fitting = {one.name: one.nbytes for one in found if one.nbytes <= max_bytes}
        for name, nbytes in fitting.items():
            self.ledger.add(name, nbytes)
        alone = {name: n for name, n in fitting.items() if name not in self._objects}
        if alone:
            self._log.append(lower_tier_changes(alone))
        return len(fitting)

    # -- demoting

    def content_of(self, slot: int) -> tuple[int, int]:
        """Size and checksum of the object that lies in a slot, or lay there until it was removed
        while the slot was held."""
        header = self._headers[slot]
        return int(header["nbytes"]), int(header["checksum"])

    def demote_all(self) -> None:
        """Has all objects written to the lower tier that are not there yet. They go from memory."""
        for name, one in self._objects.items():
            if name not in self.ledger and self.ledger.demote(
                name, one.slot, one.units, is_pressed=False
            ):
                self._policies[one.units].remove(name)

    def demoted(self, demoting: Sequence[Demoting], stored: Sequence[bool]) -> None:
        """Objects were written to the lower tier, or could not be."""
        gone = []
        for one, is_stored in zip(demoting, stored, strict=True):
            self.ledger.demoted(one)
            found = self._objects.get(one.name)
            if found is None or found.slot != one.slot:  # It was removed meanwhile.
                self.slab.give_back(one.slot)
                if is_stored:
                    self.ledger.unwanted(one.name)
                continue
            if is_stored:
                self.ledger.add(one.name, self.content_of(one.slot)[0])
                self.ledger.counts.demoted += 1
            if one.is_kept:
                self._policies[one.units].add(one.name)
            else:
                self.ledger.counts.dropped += not is_stored
                gone.append(one.name)
        self._drop(gone)
        self.counts.evicted += len(gone)

    def gone_from_tier(self, names: Sequence[bytes]) -> None:
        """Objects do not lie in the lower tier any more."""
        gone = {name: n for name in names if (n := self.ledger.discard(name)) is not None}
        alone = {name: n for name, n in gone.items() if name not in self._objects}
        if alone:
            self._log.append(lower_tier_changes(alone, REMOVED))

    # -- promoting

    def promote(self, names: Sequence[bytes], nbytes: int) -> list[Promoted]:
        """Slots for objects of one size that lie in the lower tier. For each that is ``TAKEN``,
        call ``landed``. Others may leave for them; ``LATER`` if no slot is free yet."""
        units = self.slab.serving(class_of(nbytes))
        wanted = sum(name in self.ledger and name not in self._objects for name in names)
        # It can wait where it lies until others have been written there.
        self._make_free(units, wanted, is_pressed=False)
        return [self._promote(name, nbytes, units) for name in names]

    def _promote(self, name: bytes, nbytes: int, units: int) -> Promoted:
        one = self._objects.get(name)
        if one is not None and self.content_of(one.slot)[0] == nbytes:
            self._touch(name, one)
            return Promoted(PromotionState.HERE, one.slot, one.generation)
        if self.ledger.nbytes(name) != nbytes:
            return _GONE
        if name in self.ledger.promoting:
            return _LATER
        slot = self.slab.take(units)
        if slot is None:
            if not self.slab.has_chunk(units):
                self._starved[units] += 1
            return _LATER
        self.ledger.promoting[name] = slot
        return Promoted(PromotionState.TAKEN, slot)

    def landed(
        self, names: Sequence[bytes], nbytes: int, checksums: Sequence[int | None]
    ) -> list[Promoted]:
        """Objects of one signature that had ``TAKEN`` slots were read into them, or could not be
        (None): these do not lie in the lower tier any more."""
        right: list[tuple[bytes, int, int]] = []
        for name, checksum in zip(names, checksums, strict=True):
            slot = self.ledger.promoting.pop(name)
            # It may have been removed meanwhile, and even stored anew.
            if checksum is None or name not in self.ledger or name in self._objects:
                self.slab.give_back(slot)
            else:
                right.append((name, slot, checksum))
        self.gone_from_tier(
            [name for name, one in zip(names, checksums, strict=True) if one is None]
        )
        if right:
            self._fill(
                [name[:KEY_BYTES] for name, _, _ in right],
                right[0][0][KEY_BYTES:],
                nbytes,
                [slot for _, slot, _ in right],
                [checksum for _, _, checksum in right],
            )
        self.ledger.counts.promoted += len(right)
        found = [self._objects.get(name) for name in names]
        return [
            _GONE if one is None else Promoted(PromotionState.HERE, one.slot, one.generation)
            for one in found
        ]
