# SPDX-License-Identifier: Apache-2.0
"""The objects of one owner: who may fill a slot, what is in it, what has to go. Pure: it changes
the headers' array and its own tables, and knows no clock, no te and no lock.

A slot is *free*, *claimed* by somebody who writes it, or *live*: its object may be read. An object
is evicted by marking its header; only after that can the slot be claimed again. If there is a
lower tier, an object that has no copy there is written there first (``kvstore.rules.ledger``).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import compress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import _bytes
from kvstore.memory.policies import Keeping, Policy
from kvstore.memory.slab import Slab, class_of, class_of_left
from kvstore.objects.changes import (
    ADDED,
    CHANGE,
    KEY_BYTES,
    LOWER_TIER,
    REMOVED,
    Keys,
    Records,
    fingerprint_of,
    keys_of_digests,
)
from kvstore.objects.headers import LIVE, MAGIC
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger, lower_tier_changes

__all__ = ["Claim", "ObjectTable", "Verdict"]

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


class _Object(NamedTuple):  # made in a quarter of a dataclass's time
    slot: int
    units: int
    generation: int
    fingerprint: int


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


@dataclass
class Counts:
    """What has happened to objects since the start."""

    verdicts: Counter[str] = field(default_factory=Counter)
    published: int = 0
    abandoned: int = 0
    evicted: int = 0
    removed: int = 0


class ObjectTable:
    """The slots of a slab and the objects in them. Not thread-safe."""

    def __init__(
        self,
        slab: Slab,
        headers: Records,
        new_policy: Callable[[], Policy],
        log: ChangeLog,
        ledger: Ledger,
    ) -> None:
        """`headers`: dtype ``HEADER``, one for each unit of the slab, all zero."""
        self.slab: Final = slab
        self.ledger: Final = ledger
        self.counts: Final = Counts()
        self._headers = headers
        self._new_policy = new_policy
        self._log = log
        self._objects: dict[bytes, _Object] = {}
        self._policies: dict[int, Keeping] = {}
        self._claims: dict[int, Claim] = {}
        self._claimed: set[bytes] = set()
        #: Of claims that bring objects from elsewhere.
        self._brought: set[bytes] = set()
        #: By class: objects that found no slot since the last ``make_room``.
        self._starved: Counter[int] = Counter()
        #: By class: objects that had to go for others since chunks were compared the last time.
        self._replaced: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._objects)

    def adopt(self, checksum: Callable[[int, int], int]) -> tuple[int, int]:
        """Takes over what the headers say, which a former owner of the memory has left behind; only
        before anything is claimed. Whatever cannot be right is dropped.

        A former owner that was killed leaves nothing half written behind: it marks a header before
        the slot changes. Of one whose machine was, some memory may not have reached the disk.

        Args:
            checksum: of the bytes of an object, by its slot and size.

        Returns how many objects there are, and how many were dropped.
        """
        found = np.flatnonzero(self._headers["state"] != 0).tolist()
        chunks: dict[int, dict[bytes, _Object]] = {}
        names: set[bytes] = set()
        for slot in found:
            one = self._left_behind(slot, checksum)
            header = self._headers[slot]
            name = header["key"].tobytes() + header["signature"].tobytes()
            if one is None or name in names:
                header["state"] = 0
                continue
            names.add(name)
            chunks.setdefault(slot // self.slab.chunk_units, {})[name] = one
        for chunk, objects in chunks.items():
            self._adopt(chunk, objects)
        if self._objects:
            self._log.append(self.snapshot(0, self.slab.chunks))
        return len(self._objects), len(found) - len(self._objects)

    def _adopt(self, chunk: int, objects: dict[bytes, _Object]) -> None:
        size = self.slab.chunk_units
        lying = [(one.slot % size, one.units) for one in objects.values()]
        units, kept = class_of_left(lying, size)
        fitting = set(kept)
        for number, (name, one) in enumerate(objects.items()):
            if number in fitting:
                self._objects[name] = one._replace(units=units)
                self._policy(units).add(name)
            else:
                self._headers["state"][one.slot] = 0
        slots = [one.slot for number, one in enumerate(objects.values()) if number in fitting]
        self.slab.adopt(chunk, units, slots)

    # -- storing

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

    # -- what happens to stored objects

    def touch(self, keys: Keys, signature: bytes) -> None:
        """Says that objects were read; those that are gone are left out."""
        for key in keys:
            name = key.tobytes() + signature
            found = self._objects.get(name)
            if found is not None:
                self._touch(name, found)

    def remove(self, keys: Keys, signature: bytes) -> list[bool]:
        """Removes objects; returns which of them there were."""
        names = [one.tobytes() + signature for one in keys]
        found = [one in self._objects or one in self.ledger for one in names]
        self._remove(list(dict.fromkeys(compress(names, found))))
        return found

    def clear(self, signature: bytes) -> int:
        """Removes all objects of a signature; returns how many there were."""
        names = dict.fromkeys((*self._objects, *self.ledger))
        return self._remove([one for one in names if one.endswith(signature)])

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

    def _make_room_for(self, units: int, names: Sequence[bytes], nbytes: int) -> None:
        """Others leave for those of these objects that need slots. Those that have no copy in the
        tier wait until they are written there: none is lost for it."""
        distinct, evicted = set(names), -1
        while evicted != self.counts.evicted:  # Some of these may leave, and need slots again.
            evicted = self.counts.evicted
            wanted = sum(self._verdict(name, nbytes) is Verdict.GRANTED for name in distinct)
            self._make_free(units, wanted, is_pressed=not self.ledger.has_tier)

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

    def _names_in(self, chunk: int) -> list[bytes]:
        """Of the objects of a chunk."""
        slots = self.slab.slots_of(chunk)
        headers = self._headers[slots.start : slots.stop : slots.step]
        live = headers[headers["state"] == LIVE]
        return [one["key"].tobytes() + one["signature"].tobytes() for one in live]

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

    def _touch(self, name: bytes, one: _Object) -> None:
        demoting = self.ledger.demoting.get(name)
        if demoting is None or demoting.slot != one.slot:
            self._policies[one.units].touch(name)
        else:
            self.ledger.keep(demoting)

    def _remove(self, names: Sequence[bytes]) -> int:
        """Objects that are there, in memory or in the lower tier."""
        tiered = {name: n for name in names if (n := self.ledger.discard(name)) is not None}
        for name in tiered:
            self.ledger.unwanted(name)
        here = [name for name in names if name in self._objects]
        for name in here:
            if not self.ledger.is_held(self._objects[name].slot):
                self._policies[self._objects[name].units].remove(name)
        alone = {name: n for name, n in tiered.items() if name not in self._objects}
        self._drop(here)
        self._log.append(lower_tier_changes(alone, REMOVED))
        self.counts.removed += len(names)
        return len(names)

    def _fill(
        self,
        keys: Sequence[bytes],
        signature: bytes,
        nbytes: int,
        slots: Sequence[int],
        checksums: npt.ArrayLike,
    ) -> Sequence[int]:
        """Objects whose bytes are in their slots can be read; returns their generations."""
        fingerprint = fingerprint_of(signature, nbytes)
        changes = np.empty(len(slots), CHANGE)
        sums = np.asarray(checksums, np.uint64)
        at = np.array(slots, np.uint64)
        whole = b"".join(keys)
        _bytes.fill(
            self._headers, at, whole, signature, nbytes, fingerprint, MAGIC, LIVE, sums, changes
        )
        units = self.slab.class_at(slots[0])  # All were taken for one claim or promotion.
        numbers: list[int] = changes["generation"].tolist()
        names = [key + signature for key in keys]
        for name, slot, generation in zip(names, slots, numbers, strict=True):
            self._objects[name] = _Object(slot, units, generation, fingerprint)
        self._policy(units).add_all(names)
        self._log.append(changes)
        return numbers

    # -- what others are told

    def sizes(self, keys: Keys, signature: bytes) -> list[int]:
        """Of each object, in bytes; 0 for one that is not there."""
        sizes: list[int] = []
        for key in keys:
            name = key.tobytes() + signature
            one = self._objects.get(name)
            nbytes = self.ledger.nbytes(name) if one is None else self._headers["nbytes"][one.slot]
            sizes.append(int(nbytes or 0))
        return sizes

    def places(self, keys: Keys, signature: bytes, nbytes: int) -> list[tuple[int, int]]:
        """Slot and generation of each object of this size, as changes have them; 0 and 0 for one
        that is not there."""
        names, found = [one.tobytes() + signature for one in keys], list[tuple[int, int]]()
        fingerprint = fingerprint_of(signature, nbytes)
        for name in names:
            one = self._objects.get(name)
            if one is not None and one.fingerprint == fingerprint:
                found.append((one.slot, one.generation))
            else:
                found.append((LOWER_TIER * (self.ledger.nbytes(name) == nbytes), 0))
        return found

    def snapshot(self, first_chunk: int, chunks: int) -> Records:
        """What lies in some chunks, as additions: dtype ``CHANGE``."""
        parts = []
        for chunk in range(first_chunk, min(first_chunk + chunks, self.slab.chunks)):
            slots = self.slab.slots_of(chunk)
            if not slots:
                continue
            headers = self._headers[slots.start : slots.stop : slots.step]
            live = np.flatnonzero(headers["state"] == LIVE)
            found = np.zeros(len(live), CHANGE)
            for one in ("key", "fingerprint", "generation"):
                found[one] = headers[one][live]
            found["slot"] = slots.start + live * slots.step
            found["op"] = ADDED
            parts.append(found)
        return np.concatenate(parts) if parts else np.zeros(0, CHANGE)

    def _left_behind(self, slot: int, checksum: Callable[[int, int], int]) -> _Object | None:
        """What a header says, if it can be believed."""
        header = self._headers[slot]
        nbytes, signature = int(header["nbytes"]), header["signature"].tobytes()
        if header["magic"] != MAGIC or header["state"] != LIVE:
            return None
        if not 1 <= nbytes <= self.slab.object_bytes_max:
            return None
        units = class_of(nbytes)
        fingerprint = fingerprint_of(signature, nbytes)
        if header["fingerprint"] != fingerprint or header["checksum"] != checksum(slot, nbytes):
            return None
        return _Object(slot, units, int(header["generation"]), fingerprint)

    def _policy(self, units: int) -> Keeping:
        found = self._policies.get(units)
        if found is None:
            found = self._policies[units] = Keeping(self._new_policy())
        return found

    def _kept_chunks(self) -> set[int]:
        """Chunks with objects that must not go."""
        return set()

    def _is_kept(self, name: bytes) -> bool:  # noqa: ARG002 - of those that may be
        """Whether an object must not go."""
        return False

    def _count(self, verdicts: Sequence[Verdict]) -> None:
        for one in Verdict:  # To hash each would take longer than all else here.
            if number := verdicts.count(one):
                self.counts.verdicts[one.value] += number

    def _verdict(self, name: bytes, nbytes: int) -> Verdict:
        if nbytes > self.slab.object_bytes_max:
            return Verdict.TOO_LARGE
        if name in self._objects or name in self.ledger:
            return Verdict.EXISTS
        return Verdict.BEING_STORED if name in self._claimed else Verdict.GRANTED

    def _drop(self, names: Iterable[bytes]) -> Sequence[bytes]:
        """Of objects that no policy knows any more."""
        gone = list(names)
        if not gone:
            return gone
        objects = [self._objects.pop(name) for name in gone]
        slots = [one.slot for one in objects]
        self._headers["state"][slots] = 0  # Before anybody can claim the slots.
        for slot in slots:
            if not self.ledger.is_held(slot):  # Else whoever demotes it gives it back.
                self.slab.give_back(slot)
        changes = _changes(
            gone,
            [one.fingerprint for one in objects],
            slots,
            [one.generation for one in objects],
            REMOVED,
        )
        lower = np.array([name in self.ledger for name in gone], np.bool_)
        changes["slot"][lower], changes["generation"][lower] = LOWER_TIER, 0
        changes["op"][lower] = ADDED
        self._log.append(changes)
        return gone


def _changes(
    keys: Sequence[bytes],
    fingerprints: npt.ArrayLike,
    slots: npt.ArrayLike,
    generations: npt.ArrayLike,
    op: int,
) -> Records:
    """``keys`` may have more behind their 16 bytes."""
    changes = np.zeros(len(keys), CHANGE)
    changes["key"] = keys_of_digests(keys).view("V16").reshape(-1)
    changes["fingerprint"], changes["slot"], changes["generation"] = (
        fingerprints,
        slots,
        generations,
    )
    changes["op"] = op
    return changes
