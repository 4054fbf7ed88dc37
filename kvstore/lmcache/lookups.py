# SPDX-License-Identifier: Apache-2.0
"""LMCache's look-ups: what is found is pinned until it is loaded, as far as it can be."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from lmcache.lmcache_native import Bitmap

from kvstore.lmcache.accounts import ObjectSpec
from kvstore.lmcache.locks import Locks
from kvstore.lmcache.names import Layout, keys_of_objects, rows_by, signature_of
from kvstore.lmcache.tasks import Lane
from kvstore.objects.outcomes import Pinned
from kvstore.store import Store

__all__ = ["LookUps"]

LOCK_S: Final = 300.0
"""A lock that LMCache does not take back ends by itself: as long as LMCache's own locks of what it
reads."""
LOCKS_MAX: Final = 65_536

Question: TypeAlias = tuple[Sequence[Any], Mapping[int, Any]]
"""LMCache's keys, and the layouts of its object groups."""
Found: TypeAlias = dict[bytes, list[int]]
"""The rows of what was found, by signature; by b"" where that is not known."""


class LookUps:
    """Thread-safe. An owner that does not answer costs the locks at it, and no hits."""

    def __init__(
        self,
        store: Store,
        weights: str,
        specs: Callable[[Sequence[Any]], Mapping[Any, ObjectSpec]],
        numbers: itertools.count[int],
    ) -> None:
        """
        Args:
            specs: what this process has stored objects with.
            numbers: of tasks.
        """
        self._store, self._weights, self._specs = store, weights, specs
        self._numbers = numbers
        self._lock = threading.Lock()
        self._locks = Locks(LOCKS_MAX)
        self._lane: Lane[Question, Any] = Lane(
            "look-up", self._do, lambda question: Bitmap(len(question[0]))
        )
        self._unlocks: Lane[dict[bytes, list[Any]], None] = Lane(
            "unlock", self._unpin, lambda _: None
        )

    @property
    def event_fd(self) -> int:
        """Readable when there are answers."""
        return self._lane.results.event_fd

    def submit(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> int:
        """Queues a look-up; with too many that wait, it finds nothing."""
        task = next(self._numbers)
        self._lane.submit(task, (keys, layouts))
        return task

    def take(self, task: int) -> Any:
        """A bitmap of what was found, once; None else."""
        return self._lane.results.take(task)

    def unlock(self, keys: Sequence[Any]) -> None:
        """Takes back one lock of each key that has one. Never blocks and never fails: a pin that is
        not taken back ends by itself."""
        with self._lock:
            locks = self._locks.take(keys, time.monotonic())
        if locks:
            self._unlocks.submit(next(self._numbers), locks)

    def locked(self, keys: Sequence[Any]) -> set[Any]:
        """Those that this process has locked."""
        with self._lock:
            return self._locks.held(keys, time.monotonic())

    def count(self) -> int:
        """Objects that are locked."""
        with self._lock:
            return self._locks.count(time.monotonic())

    def close(self, timeout_s: float) -> None:
        """Waits for what is under way. Idempotent. ``TimeoutError`` if it takes longer."""
        with contextlib.ExitStack() as both:
            both.callback(self._unlocks.close, timeout_s)
            both.callback(self._lane.close, timeout_s)

    def _do(self, question: Question) -> Any:
        keys, layouts = question
        found = Bitmap(len(keys))
        for signature, rows in self._find(keys, layouts).items():
            found.batched_set(rows)
            if signature:
                self._pin([keys[row] for row in rows], signature)
        return found

    def _find(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> Found:
        """What is stored, as far as this process knows. Asks nobody."""
        digests = keys_of_objects(keys)
        found: Found = {}
        for group, rows in rows_by(keys, lambda key: key.object_group_id):
            said = layouts.get(group)
            if said is None or not said.shapes:
                hits = np.asarray(rows)[self._store.known(digests[rows])].tolist()
                specs = self._specs([keys[row] for row in hits])
                for row in hits:
                    spec = specs.get(keys[row])
                    found.setdefault(b"" if spec is None else spec.signature, []).append(row)
            else:
                layout = Layout.of(said.shapes, said.dtypes)
                signature = signature_of(self._weights, layout)
                is_here = self._store.exists(digests[rows], signature, layout.nbytes)
                found.setdefault(signature, []).extend(np.asarray(rows)[is_here].tolist())
        return found

    def _pin(self, keys: Sequence[Any], signature: bytes) -> None:
        """What cannot be pinned (it lies on a disk, too much is pinned, its owner does not answer)
        is found nevertheless; its load tells."""
        until_s = time.monotonic() + LOCK_S  # Before the store's own time ends.
        with self._lock:
            keys = keys[: self._locks.room(until_s - LOCK_S)]
        outcomes = self._store.pin(keys_of_objects(keys), signature, LOCK_S) if keys else []
        with self._lock:
            for key, one in zip(keys, outcomes, strict=True):
                if one is Pinned.PINNED:
                    self._locks.add(key, signature, until_s)

    def _unpin(self, locks: Mapping[bytes, Sequence[Any]]) -> None:
        for signature, keys in locks.items():
            self._store.unpin(keys_of_objects(keys), signature)
