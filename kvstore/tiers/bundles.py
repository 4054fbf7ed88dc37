# SPDX-License-Identifier: Apache-2.0
"""Which object lies in which bundle of an object store, and which bundles have to go. Pure.

A bundle is several objects that were written together; it is never changed, and goes as a whole.
It counts until the object store has confirmed that it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.memory.policies import Policy
from kvstore.tiers.base import Laid

__all__ = ["Bundle", "Bundles", "Page", "grouped"]


@dataclass(frozen=True, slots=True)
class Page:
    """An object within a bundle."""

    name: bytes
    nbytes: int
    #: xxh3-64 of its bytes.
    checksum: int
    #: From the begin of the bundle.
    offset: int


@dataclass(eq=False, slots=True)
class Bundle:
    """What is stored under one name in the object store. Equal to itself alone."""

    id: bytes
    #: Of all of it.
    nbytes: int
    pages: Mapping[bytes, Page]
    #: The names that are found in this bundle.
    live: set[bytes] = field(default_factory=set)
    #: The names that were removed for good: a restart must not find them.
    removed: set[bytes] = field(default_factory=set)


def grouped(objects: Sequence[Laid], bytes_max: int) -> list[slice]:
    """Cuts objects into runs of so many bytes at most; one that is larger is a run by itself."""
    runs: list[slice] = []
    first = nbytes = 0
    for i, one in enumerate(objects):
        if i > first and nbytes + one.nbytes > bytes_max:
            runs.append(slice(first, i))
            first, nbytes = i, 0
        nbytes += one.nbytes
    return [*runs, slice(first, len(objects))] if objects else runs


class Bundles:
    """Not thread-safe."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        """
        Args:
            capacity: of all bundles, in bytes.
            policy: of bundles, by their ids.
        """
        self.capacity: Final = capacity
        self._policy = policy
        self._bundles: dict[bytes, Bundle] = {}
        #: By name: the bundle where the object is found.
        self._where: dict[bytes, Bundle] = {}
        #: By name: bundles that have the object, too, in which it is not found any more.
        self._stale: dict[bytes, list[Bundle]] = {}
        #: By id: bytes of bundles that are to be deleted.
        self._to_delete: dict[bytes, int] = {}
        #: Of bundles that there are, and of those that are being written.
        self._bundle_bytes = self._reserved_bytes = 0
        #: Bytes of all objects that are found.
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._where)

    @property
    def used_bytes(self) -> int:
        """Of all bundles: those there are, being written, and to be deleted."""
        return self._bundle_bytes + self._reserved_bytes + sum(self._to_delete.values())

    @property
    def to_delete(self) -> list[bytes]:
        """The ids of bundles that are to be deleted."""
        return list(self._to_delete)

    def find(self, name: bytes) -> tuple[Bundle, Page] | None:
        """Where an object lies; None if it is not there."""
        bundle = self._where.get(name)
        return None if bundle is None else (bundle, bundle.pages[name])

    # -- what was left behind

    def adopt(self, bundle: Bundle) -> None:
        """Takes over a bundle that a former process has left, with what it has removed from it;
        older ones first, since these go for the others if they do not fit together."""
        self.make_room(bundle.nbytes)
        if bundle.nbytes > self.capacity:
            self.delete(bundle.id, bundle.nbytes)
        else:
            self._add(bundle)

    def delete(self, bundle_id: bytes, nbytes: int) -> None:
        """What a former process has left, and cannot be a bundle, is to be deleted."""
        self._to_delete[bundle_id] = nbytes

    def pages(self) -> Iterator[Page]:
        """All objects that are found."""
        for name, bundle in self._where.items():
            yield bundle.pages[name]

    # -- writing

    def make_room(self, nbytes: int) -> list[bytes]:
        """Marks bundles for deletion, so that one of so many bytes fits once they are deleted.
        Returns the names of the objects that are gone with them."""
        gone: list[bytes] = []
        wanted = self.capacity - nbytes
        # Bundles to delete count as room here: else they would push out others while they wait.
        while wanted >= 0 and self._bundle_bytes + self._reserved_bytes > wanted:
            victim = self._policy.evict()
            if victim is None:
                break
            gone += self._delete(self._bundles[victim])
        return gone

    def reserve(self, nbytes: int) -> bool:
        """Whether a bundle of so many bytes fits now; if so, it is to be written, and ``store`` or
        ``fail`` to be called."""
        fits = self.used_bytes + nbytes <= self.capacity
        self._reserved_bytes += nbytes * fits
        return fits

    def store(self, bundle: Bundle) -> None:
        """A bundle was written. Its objects are found there from now on."""
        self._reserved_bytes -= bundle.nbytes
        self._add(bundle)

    def fail(self, bundle: Bundle) -> None:
        """A bundle could not be written; or it is not known whether it was."""
        self._reserved_bytes -= bundle.nbytes
        self.delete(bundle.id, bundle.nbytes)

    def deleted(self, bundle_id: bytes) -> None:
        """A bundle that was to be deleted is not in the object store any more."""
        del self._to_delete[bundle_id]

    # -- what lies there

    def touch(self, name: bytes) -> None:
        """The object was read. It is there."""
        self._policy.touch(self._where[name].id)

    def forget(self, name: bytes, bundle: Bundle) -> bool:
        """The object cannot be read from that bundle. Whether it was found there until now."""
        if self._where.get(name) is not bundle:
            return False
        self._leave(name)
        return True

    def remove(self, names: Sequence[bytes]) -> list[Bundle]:
        """Removes objects for good. Returns the bundles that there still are and have them: what
        ``removed`` says of these now is to be kept."""
        changed: dict[bytes, Bundle] = {}
        for name in names:
            if name in self._where:
                self._leave(name)
            for one in self._stale.get(name, ()):
                if name not in one.removed:
                    one.removed.add(name)
                    changed[one.id] = one
        return [one for one in changed.values() if one.id in self._bundles]

    def _add(self, bundle: Bundle) -> None:
        self._bundles[bundle.id] = bundle
        self._bundle_bytes += bundle.nbytes
        self._policy.add(bundle.id)
        for name in bundle.pages:
            if name in bundle.removed:
                self._stale.setdefault(name, []).append(bundle)
                continue
            if name in self._where:
                self._leave(name)
            bundle.live.add(name)
            self._where[name] = bundle
            self.nbytes += bundle.pages[name].nbytes
        self._delete_if_empty(bundle)

    def _leave(self, name: bytes) -> None:
        """The object is not found any more; its bundle has it still."""
        bundle = self._where.pop(name)
        bundle.live.remove(name)
        self.nbytes -= bundle.pages[name].nbytes
        self._stale.setdefault(name, []).append(bundle)
        self._delete_if_empty(bundle)

    def _delete_if_empty(self, bundle: Bundle) -> None:
        if not bundle.live:
            self._policy.remove(bundle.id)
            self._delete(bundle)

    def _delete(self, bundle: Bundle) -> list[bytes]:
        """Of a bundle that the policy does not know any more. Returns what was found there."""
        del self._bundles[bundle.id]
        self._bundle_bytes -= bundle.nbytes
        self.delete(bundle.id, bundle.nbytes)
        for name in bundle.live:
            del self._where[name]
            self.nbytes -= bundle.pages[name].nbytes
        for name in bundle.pages.keys() - bundle.live:
            others = [one for one in self._stale[name] if one is not bundle]
            if others:
                self._stale[name] = others
            else:
                del self._stale[name]
        gone = list(bundle.live)
        bundle.live.clear()
        return gone
