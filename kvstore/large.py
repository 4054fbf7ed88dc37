# SPDX-License-Identifier: Apache-2.0
"""Objects that are larger than a chunk of an owner's memory: they are stored in parts, each under a
key of its own. Owners know nothing of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.objects.changes import Keys, keys_of_digests
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.objects.pieces import Pieces
from kvstore.store import Store, stopped

__all__ = ["LargeObjects"]

PART_BYTES: Final = 16 << 20
"""Fits a chunk of any owner that lends 256 MiB or more."""
SIZE_BYTES: Final = 8
"""Under the object's own key lies how large it is, as u64, little-endian."""

Outcome = TypeVar("Outcome", Got, Put)
_TELLING: Final = (Removed.MISSING, Removed.REMOVED, Removed.UNREACHABLE).index


class LargeObjects:
    """Of one process. Thread-safe, as ``Store`` is; all methods but ``exists`` block."""

    def __init__(self, store: Store, part_bytes: int = PART_BYTES) -> None:
        """``part_bytes``: all who use an object give the same."""
        self._store = store
        self._part_bytes = part_bytes

    def exists(self, keys: Keys, signature: bytes, nbytes: int) -> npt.NDArray[np.bool_]:
        """Whether all parts are stored. See ``Store.exists``."""
        found = np.ones(len(keys), np.bool_)
        for first, end in self._parts(nbytes):
            part_keys = _part_keys(keys, nbytes, first, end)
            found &= self._store.exists(part_keys, signature, end - first)
        return found

    def sizes(self, keys: Keys, signature: bytes, timeout_s: float = 5.0) -> npt.NDArray[np.int64]:
        """The size of each object, in bytes; 0 for one that is not stored."""
        sizes = np.zeros(len(keys), np.uint64)
        if not len(keys):
            return sizes.astype(np.int64)
        region = self._store.register(sizes)
        try:
            with stopped():  # Callers do not know of this memory.
                found = self._store.get(keys, _of_sizes(signature), _of(sizes), timeout_s)
        finally:
            self._store.deregister(region)
        sizes[[one is not Got.RIGHT for one in found]] = 0
        return sizes.astype(np.int64)

    def put(
        self, keys: Keys, signature: bytes, source: Pieces, timeout_s: float = 10.0
    ) -> list[Put]:
        """See ``Store.put``. Parts of an object that was not stored whole stay until they are
        evicted."""
        until_s = time.monotonic() + timeout_s

        def put_part(part_keys: Keys, part: Pieces) -> list[Put]:
            return self._store.put(part_keys, signature, part, until_s - time.monotonic())

        good = (Put.EXISTS, Put.STORED)
        outcomes = self._each(keys, source, put_part, good)
        sizes = np.full(len(keys), source.object_bytes, np.uint64)
        whole = [row for row, one in enumerate(outcomes) if one in good]
        if not whole:
            return outcomes
        region = self._store.register(sizes)
        try:  # Last: who finds it finds the parts.
            left_s = until_s - time.monotonic()
            told = self._store.put(keys[whole], _of_sizes(signature), _of(sizes).of(whole), left_s)
        finally:
            self._store.deregister(region)
        for row, one in zip(whole, told, strict=True):
            if one not in good:
                outcomes[row] = one
        return outcomes

    def get(
        self, keys: Keys, signature: bytes, destination: Pieces, timeout_s: float = 5.0
    ) -> list[Got]:
        """See ``Store.get``."""
        until_s = time.monotonic() + timeout_s

        def get_part(part_keys: Keys, part: Pieces) -> list[Got]:
            return self._store.get(part_keys, signature, part, until_s - time.monotonic())

        return self._each(keys, destination, get_part, (Got.RIGHT,))

    def get_range(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        offset: int,
        destination: Pieces,
        timeout_s: float = 5.0,
    ) -> list[Got]:
        """See ``Store.get_range``."""
        if not 0 <= offset <= nbytes - destination.object_bytes:
            raise ValueError(
                f"{destination.object_bytes} bytes from {offset} on are no part of an object of"
                f" {nbytes} bytes"
            )
        until_s = time.monotonic() + timeout_s
        outcomes = [Got.RIGHT] * len(keys)
        for first, end in self._parts(nbytes):
            begin, until = max(first, offset), min(end, offset + destination.object_bytes)
            rows = [row for row, one in enumerate(outcomes) if one is Got.RIGHT]
            if begin >= until or not rows:
                continue
            some = self._store.get_range(
                _part_keys(keys[rows], nbytes, first, end),
                signature,
                end - first,
                begin - first,
                destination.cut(begin - offset, until - offset).of(rows),
                until_s - time.monotonic(),
            )
            for row, one in zip(rows, some, strict=True):
                outcomes[row] = one
        return outcomes

    def remove(self, keys: Keys, signature: bytes, nbytes: int) -> list[Removed]:
        """See ``Store.remove``; ``nbytes``: the size of each."""
        outcomes = self._store.remove(keys, _of_sizes(signature))  # First, as it is put last.
        for first, end in self._parts(nbytes):
            some = self._store.remove(_part_keys(keys, nbytes, first, end), signature)
            outcomes = [max(both, key=_TELLING) for both in zip(outcomes, some, strict=True)]
        return outcomes

    def clear(self, signature: bytes) -> int:
        """See ``Store.clear``: how many objects, not how many parts."""
        objects = self._store.clear(_of_sizes(signature))
        self._store.clear(signature)
        return objects

    def _each(
        self,
        keys: Keys,
        pieces: Pieces,
        do: Callable[[Keys, Pieces], list[Outcome]],
        good: tuple[Outcome, ...],
    ) -> list[Outcome]:
        """Part by part, those of objects of which one has failed are left out. ``good``: outcomes
        that are no failure; of an object the last one of them counts that a part has had."""
        outcomes = [good[0]] * len(keys)
        for first, end in self._parts(pieces.object_bytes):
            rows = [row for row, one in enumerate(outcomes) if one in good]
            part_keys = _part_keys(keys[rows], pieces.object_bytes, first, end)
            some = do(part_keys, pieces.cut(first, end).of(rows))
            for row, one in zip(rows, some, strict=True):
                if one not in good or good.index(one) > good.index(outcomes[row]):
                    outcomes[row] = one
        return outcomes

    def _parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """The bytes of each."""
        for first in range(0, nbytes, self._part_bytes):
            yield first, min(first + self._part_bytes, nbytes)


def _part_keys(keys: Keys, nbytes: int, first: int, end: int) -> Keys:
    """Of these bytes of objects of so many. Objects of another size have no part in common with
    them, nor have those that somebody else has cut otherwise."""
    named = b"".join(one.to_bytes(8, "little") for one in (nbytes, first, end))
    return keys_of_digests([hashlib.blake2b(one.tobytes() + named).digest() for one in keys])


def _of_sizes(signature: bytes) -> bytes:
    return hashlib.blake2b(signature + b"size", digest_size=16).digest()


def _of(sizes: npt.NDArray[np.uint64]) -> Pieces:
    start = sizes.ctypes.data + np.arange(len(sizes), dtype=np.uint64) * np.uint64(SIZE_BYTES)
    return Pieces.whole(start, SIZE_BYTES)
