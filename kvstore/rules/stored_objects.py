# SPDX-License-Identifier: Apache-2.0
"""The objects of one owner: what lies in which slot, what becomes of it, and what others are told
of that. Pure: it changes the headers' array and its own tables, and knows no clock, no te and no
lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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

__all__ = ["StoredObjects", "TableParts"]


class _Object(NamedTuple):  # made in a quarter of a dataclass's time
    slot: int
    units: int
    generation: int
    fingerprint: int


@dataclass
class Counts:
    """What has happened to objects since the start."""

    verdicts: Counter[str] = field(default_factory=Counter)
    published: int = 0
    abandoned: int = 0
    evicted: int = 0
    removed: int = 0


@dataclass(frozen=True)
class TableParts:
    """What a table of objects is made of, all of it the table's alone from then on."""

    slab: Slab
    #: Dtype ``HEADER``, one for each unit of the slab; all zero but before ``adopt``.
    headers: Records
    #: For the objects of one class each.
    new_policy: Callable[[], Policy]
    log: ChangeLog
    ledger: Ledger


class StoredObjects:
    """Those in the slots of a slab. Not thread-safe."""

    def __init__(self, parts: TableParts) -> None:
        self.slab: Final = parts.slab
        self.ledger: Final = parts.ledger
        self.counts: Final = Counts()
        self._headers = parts.headers
        self._new_policy = parts.new_policy
        self._log = parts.log
        self._objects: dict[bytes, _Object] = {}
        self._policies: dict[int, Keeping] = {}

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

    # -- what happens to them

    def touch(self, keys: Keys, signature: bytes) -> None:
        """Says that objects were read; those that are gone are left out."""
        for key in keys:
            name = key.tobytes() + signature
            found = self._objects.get(name)
            if found is not None:
                self._touch(name, found)

    def _touch(self, name: bytes, one: _Object) -> None:
        demoting = self.ledger.demoting.get(name)
        if demoting is None or demoting.slot != one.slot:
            self._policies[one.units].touch(name)
        else:
            self.ledger.keep(demoting)

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
        changes = np.zeros(len(gone), CHANGE)
        changes["key"] = keys_of_digests(gone).view("V16").reshape(-1)
        changes["fingerprint"] = [one.fingerprint for one in objects]
        changes["slot"], changes["op"] = slots, REMOVED
        changes["generation"] = [one.generation for one in objects]
        lower = np.array([name in self.ledger for name in gone], np.bool_)
        changes["slot"][lower], changes["generation"][lower] = LOWER_TIER, 0
        changes["op"][lower] = ADDED
        self._log.append(changes)
        return gone

    def _policy(self, units: int) -> Keeping:
        found = self._policies.get(units)
        if found is None:
            found = self._policies[units] = Keeping(self._new_policy())
        return found

    def _names_in(self, chunk: int) -> list[bytes]:
        """Of the objects of a chunk."""
        slots = self.slab.slots_of(chunk)
        headers = self._headers[slots.start : slots.stop : slots.step]
        live = headers[headers["state"] == LIVE]
        return [one["key"].tobytes() + one["signature"].tobytes() for one in live]

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
