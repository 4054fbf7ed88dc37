# SPDX-License-Identifier: Apache-2.0
"""Which objects this process has pinned for LMCache's look-ups, and until when. Pure.

A look-up locks what it finds, and LMCache takes each lock back once. In the store a lock is a pin,
which ends by itself. Pins of several processes are counted together: so a pin that may have ended
must not be taken back, which would take another process's.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Locks"]


class _Lock(NamedTuple):
    until_s: float
    signature: bytes


class Locks:
    """By LMCache's key. Not thread-safe."""

    def __init__(self, locks_max: int) -> None:
        self._max = locks_max
        self._count = 0
        #: Of each key, the oldest first.
        self._locks: dict[Any, deque[_Lock]] = {}

    def room(self, now_s: float) -> int:
        """How many more there may be."""
        if self._count >= self._max:
            self._forget_ended(now_s)
        return self._max - self._count

    def add(self, key: Any, signature: bytes, until_s: float) -> None:
        """One lock more of an object."""
        self._locks.setdefault(key, deque()).append(_Lock(until_s, signature))
        self._count += 1

    def take(self, keys: Iterable[Any], now_s: float) -> dict[bytes, list[Any]]:
        """One lock less of each key that has one: those whose pins are to be taken back, by
        signature."""
        found: dict[bytes, list[Any]] = defaultdict(list)
        for key in keys:
            self._forget_ended_of(key, now_s)
            if (locks := self._locks.get(key)) is not None:
                found[locks.popleft().signature].append(key)
                self._count -= 1
                if not locks:
                    del self._locks[key]
        return dict(found)

    def held(self, keys: Iterable[Any], now_s: float) -> set[Any]:
        """Those keys that are locked."""
        return {key for key in keys if key in self._locks and self._is_held(key, now_s)}

    def count(self, now_s: float) -> int:
        """Keys that are locked."""
        return sum(self._is_held(key, now_s) for key in self._locks)

    def _is_held(self, key: Any, now_s: float) -> bool:
        return self._locks[key][-1].until_s > now_s

    def _forget_ended(self, now_s: float) -> None:
        for key in list(self._locks):
            self._forget_ended_of(key, now_s)

    def _forget_ended_of(self, key: Any, now_s: float) -> None:
        locks = self._locks.get(key, deque())
        while locks and locks[0].until_s <= now_s:
            locks.popleft()
            self._count -= 1
            if not locks:
                del self._locks[key]
