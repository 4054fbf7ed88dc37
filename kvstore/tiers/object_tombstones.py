# SPDX-License-Identifier: Apache-2.0
"""What was removed from an object store, told at once in objects of their own: to remove it from
its bundles takes its time, and a process that is killed meanwhile would find it again.

Each has names, as a file of ``Tombstones`` has. It is deleted when its bundles tell the same by
themselves. What it names is dropped at the next start, also what was stored again since.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable
from typing import Final

from kvstore.tiers.bucket import Bucket, BucketError
from kvstore.tiers.bundleheads import removed_head, removed_of
from kvstore.tiers.tombstones import Names, all_of

__all__ = ["KIND", "ObjectTombstones"]

KIND: Final = "buried"
"""What the names of these objects end with, before the number of the layout."""
AT_ONCE: Final = 32


class ObjectTombstones:
    """Of one prefix. All methods are thread-safe; those that wait say so."""

    def __init__(self, bucket: Bucket, left: Iterable[tuple[bytes, int]]) -> None:
        """
        Args:
            bucket: stays its tier's.
            left: ids and sizes of those that a former process has left behind.
        """
        self._bucket = bucket
        self._left = dict(left)
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        #: By id: those that say what may still be in a bundle, and those that are to be deleted.
        self._needed: set[bytes] = set()
        self._over: set[bytes] = set()
        self._writing = 0
        self._is_closed = False

    @property
    def is_empty(self) -> bool:
        """Whether ``reset`` has nothing to do."""
        return not self._needed

    def close(self) -> None:
        """Nothing is written after this. Waits for what is being written."""
        with self._lock:
            self._is_closed = True
            self._written.wait_for(lambda: not self._writing)  # Each has the bucket's deadline.

    def read(self) -> Names:
        """What a former process has told. What cannot be right stands for everything: it is not
        known what it has named. Raises ``BucketError`` if something cannot be read. Waits."""
        found = self._bucket.each(self._read, list(self._left), AT_ONCE)
        dead: set[bytes] = set()
        is_all = False
        for one in found:
            if isinstance(one, BucketError):
                raise one
            is_all |= one is None
            dead |= one or set()
        return Names(dead, is_all=is_all)

    def reset_left(self) -> None:
        """As ``reset``, of what a former process has told."""
        with self._lock:
            self._over |= self._left.keys()

    def remove(self, names: Collection[bytes]) -> None:
        """Objects are not found any more, whoever is killed. Raises ``OSError``. Waits."""
        if not names:
            return
        one = os.urandom(16)
        with self._lock:
            if self._is_closed:
                raise OSError("it is being closed")
            self._writing += 1
            self._needed.add(one)  # Also if nobody answers: it may have been written.
        try:
            (outcome,) = self._bucket.each(self._write, [(one, removed_head(one, names))], 1)
        finally:
            with self._lock:
                self._writing -= 1
                self._written.notify_all()
        if isinstance(outcome, BucketError):
            raise OSError(str(outcome)) from outcome

    def clear(self, signature: bytes) -> None:
        """All objects of a signature are not. Raises ``OSError``. Waits."""
        self.remove([all_of(signature)])

    def reset(self) -> None:
        """All of it was removed from the tier itself. ``delete`` does the rest."""
        with self._lock:
            self._over |= self._needed
            self._needed.clear()

    def delete(self) -> list[BucketError]:
        """Deletes what is not needed any more: the bundles tell it all. Waits. Returns what went
        wrong; it is tried again."""
        with self._lock:
            over = list(self._over)
        failed = []
        for one, outcome in zip(over, self._bucket.each(self._delete, over, AT_ONCE), strict=True):
            if isinstance(outcome, BucketError):
                failed.append(outcome)
                continue
            with self._lock:
                self._over.discard(one)
        return failed

    async def _read(self, one: bytes) -> set[bytes] | None:
        raw = await self._bucket.begin(_name(one), self._left[one]) if self._left[one] else b""
        return removed_of(raw, one)

    async def _write(self, job: tuple[bytes, bytes]) -> None:
        one, raw = job
        await self._bucket.put(_name(one), raw)

    async def _delete(self, one: bytes) -> None:
        await self._bucket.delete(_name(one))


def _name(one: bytes) -> str:
    return f"{one.hex()}.{KIND}1"
