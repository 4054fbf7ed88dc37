# SPDX-License-Identifier: Apache-2.0
"""Who may fill a slot of one owner, and what becomes of what was written there. Pure.

A slot is *free*, *claimed* by somebody who writes it, or *live*: its object may be read.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.memory.slab import class_of
from kvstore.objects.changes import KEY_BYTES, Keys
from kvstore.rules.evicting_table import EvictingTable
from kvstore.rules.stored_objects import TableParts

__all__ = ["Claim", "ObjectTable", "Verdict", "are_equal", "texts_of"]

ID_BITS: Final = 63
"""Of a claim's id, which is never 0."""
AHEAD_FREE: Final = 4
"""Claims ahead are made while there are so many times as many free slots."""


class Verdict(Enum):
    """What an owner says of an object that somebody wants to store."""

    GRANTED = "granted"
    #: Somebody has stored it already.
    EXISTS = "exists"
    #: Somebody else is storing it at the moment.
    BEING_STORED = "being stored"
    #: No slot is free; the owner makes room meanwhile.
    NO_SPACE = "no space"
    #: Larger than any slot can be.
    TOO_LARGE = "too large"
    #: Of an owner that lends nothing: no owner of another host has stored it.
    NOT_COPIED = "not copied"


@dataclass(frozen=True)
class Claim:
    """Slots that one client may fill until a deadline."""

    id: int
    signature: bytes
    nbytes: int
    deadline_s: float
    #: One for each object that was asked for.
    verdicts: Sequence[Verdict]
    #: Of the granted ones, in order; none of a claim ahead.
    keys: Sequence[bytes]
    slots: Sequence[int]
    #: See ``ObjectTable.claim``.
    brings: bool = False

    def part(self, chosen: Sequence[bool]) -> Claim:
        """With some of the granted objects."""
        keys, slots = list(compress(self.keys, chosen)), list(compress(self.slots, chosen))
        return replace(self, keys=keys, slots=slots)


def are_equal(verdicts: Sequence[object]) -> bool:
    """Whether all are the same, and there are some. So it is with nearly all puts, and to make one
    verdict of a text, or the other way round, takes as long as to copy an object of 4 KiB."""
    return len(verdicts) > 0 and verdicts.count(verdicts[0]) == len(verdicts)


def texts_of(verdicts: Sequence[Verdict]) -> list[str]:
    """As messages have them."""
    if are_equal(verdicts):
        return [verdicts[0].value] * len(verdicts)
    return [one.value for one in verdicts]


class ObjectTable(EvictingTable):
    """Slots are claimed, and objects stored in them. Not thread-safe."""

    def __init__(self, parts: TableParts) -> None:
        super().__init__(parts)
        self._claims: dict[int, Claim] = {}
        self._claimed: set[bytes] = set()
        #: Of claims that bring objects from elsewhere.
        self._brought: set[bytes] = set()

    def claim(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        deadline_s: float,
        *,
        brings: bool = False,
    ) -> Claim:
        """Slots for objects of one signature and size. No slot is taken for a key that is stored
        or claimed already. Others of the class leave for them. ``brings``: the objects are read
        from elsewhere, which may fail, so that none leaves for them, and whoever stores one
        meanwhile has a slot all the same."""
        units = self.slab.serving(class_of(nbytes))
        verdicts: list[Verdict] = []
        granted: list[bytes] = []
        slots: list[int] = []
        raw = keys.tobytes()
        names = [raw[at : at + KEY_BYTES] + signature for at in range(0, len(raw), KEY_BYTES)]
        if not brings and self.slab.free_slots(units) < len(names):
            self._make_room_for(units, names, nbytes)
        for name in names:
            slot = None
            verdict = self._verdict(name, nbytes)
            if brings and name in self._brought and verdict is Verdict.GRANTED:
                verdict = Verdict.BEING_STORED
            if verdict is Verdict.GRANTED:
                slot = self.slab.take(units)
                if slot is None:
                    verdict = Verdict.NO_SPACE
                    self._starved[units] += 1
            if slot is not None:
                (self._brought if brings else self._claimed).add(name)
                granted.append(name[: -len(signature)])
                slots.append(slot)
            verdicts.append(verdict)
        self._count(verdicts)
        # Nobody guesses it: whoever names a claim may end it.
        claim_id = secrets.randbits(ID_BITS) | 1
        claim = Claim(claim_id, signature, nbytes, deadline_s, verdicts, granted, slots, brings)
        if slots:
            self._claims[claim.id] = claim
        return claim

    def claim_ahead(self, count: int, nbytes: int, deadline_s: float) -> Claim | None:
        """Slots for objects that are named when they are published, so that nobody who stores the
        same waits for them. None while a class has less than ``AHEAD_FREE`` times as many free
        slots."""
        units = self.slab.serving(class_of(nbytes))
        if nbytes > self.slab.object_bytes_max or (
            self.slab.free_slots(units) < AHEAD_FREE * count
        ):
            return None
        slots = [slot for _ in range(count) if (slot := self.slab.take(units)) is not None]
        claim_id = secrets.randbits(ID_BITS) | 1
        claim = Claim(claim_id, b"", nbytes, deadline_s, [Verdict.GRANTED] * len(slots), (), slots)
        self._claims[claim_id] = claim
        return claim

    def name(self, claim: Claim, keys: Keys, signature: bytes) -> Claim:
        """Of a claim ahead that was taken: what lies in its first slots. Those of objects that are
        stored already or being stored are free then, as are those that nothing was written to; the
        others are to be published."""
        verdicts: list[Verdict] = []
        granted: list[bytes] = []
        slots: list[int] = []
        for key, slot in zip(keys, claim.slots, strict=False):
            name = key.tobytes() + signature
            verdicts.append(self._verdict(name, claim.nbytes))
            if verdicts[-1] is Verdict.GRANTED:
                self._claimed.add(name)
                granted.append(key.tobytes())
                slots.append(slot)
        for slot in set(claim.slots).difference(slots):
            self.slab.give_back(slot)
        self._count(verdicts)
        return Claim(claim.id, signature, claim.nbytes, claim.deadline_s, verdicts, granted, slots)

    def take_claim(self, claim_id: int) -> Claim | None:
        """Ends a claim, whose slots stay taken until ``publish`` or ``abandon``. None if it is over
        already, because its deadline has passed or somebody ended it."""
        return self._claims.pop(claim_id, None)

    def overdue(self, now_s: float) -> Sequence[Claim]:
        """The claims whose deadline has passed."""
        return [one for one in self._claims.values() if one.deadline_s < now_s]

    def publish(self, claim: Claim, checksums: npt.ArrayLike) -> None:
        """Makes the objects of a claim readable. All their bytes are there, and nobody can write to
        their slots any more. Those that were brought, and that somebody has stored meanwhile or is
        storing, are left out."""
        self._ended(claim)
        if claim.brings:
            verdicts = [self._verdict(key + claim.signature, claim.nbytes) for key in claim.keys]
            chosen = [one is Verdict.GRANTED for one in verdicts]
            self.abandon(claim.part([not one for one in chosen]))
            claim, checksums = claim.part(chosen), np.asarray(checksums, np.uint64)[chosen]
        if claim.slots:
            self._fill(claim.keys, claim.signature, claim.nbytes, claim.slots, checksums)
        self.counts.published += len(claim.slots)

    def publish_some(
        self, claim: Claim, checksums: npt.NDArray[np.uint64], chosen: Sequence[bool]
    ) -> None:
        """``publish`` for the chosen ones of a claim's granted objects, ``abandon`` for the
        others."""
        if any(chosen):
            self.publish(claim.part(chosen), checksums[np.asarray(chosen)])
        self.abandon(claim.part([not one for one in chosen]))

    def abandon(self, claim: Claim) -> None:
        """Frees the slots of a claim. Nobody can write to them any more."""
        self._ended(claim)
        for slot in claim.slots:
            self.slab.give_back(slot)
        self.counts.abandoned += len(claim.keys)

    def _ended(self, claim: Claim) -> None:
        names = self._brought if claim.brings else self._claimed
        names.difference_update(key + claim.signature for key in claim.keys)

    def _make_room_for(self, units: int, names: Sequence[bytes], nbytes: int) -> None:
        """Others leave for those of these objects that need slots. Those that have no copy in the
        tier wait until they are written there: none is lost for it."""
        distinct, evicted = set(names), -1
        while evicted != self.counts.evicted:  # Some of these may leave, and need slots again.
            evicted = self.counts.evicted
            wanted = sum(self._verdict(name, nbytes) is Verdict.GRANTED for name in distinct)
            self._make_free(units, wanted, is_pressed=not self.ledger.has_tier)

    def _count(self, verdicts: Sequence[Verdict]) -> None:
        if are_equal(verdicts):
            self.counts.verdicts[verdicts[0].value] += len(verdicts)
            return
        for one in Verdict:  # To hash each would take longer than all else here.
            if number := verdicts.count(one):
                self.counts.verdicts[one.value] += number

    def _verdict(self, name: bytes, nbytes: int) -> Verdict:
        if nbytes > self.slab.object_bytes_max:
            return Verdict.TOO_LARGE
        if name in self._objects or name in self.ledger:
            return Verdict.EXISTS
        return Verdict.BEING_STORED if name in self._claimed else Verdict.GRANTED
