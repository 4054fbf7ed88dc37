# SPDX-License-Identifier: Apache-2.0
"""Registered memory through which bytes of Python go into the store and out of it."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.store import Store

__all__ = ["Arena", "Gaps", "NoRoom"]

ALIGNMENT: Final = 64


class NoRoom(Exception):
    """So many bytes are never free at once, or were not in time."""


class Gaps:
    """What is free of a range of bytes (pure): the first gap that is large enough is used."""

    def __init__(self, nbytes: int) -> None:
        #: (first, end), ascending; no two touch each other.
        self.gaps: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []

    def take(self, nbytes: int) -> int | None:
        """Where so many bytes begin now; None if there is no gap for them."""
        for at, (first, end) in enumerate(self.gaps):
            if end - first >= nbytes:
                rest = (first + nbytes, end)
                self.gaps[at : at + 1] = [rest] if rest[0] < end else []
                return first
        return None

    def give_back(self, first: int, nbytes: int) -> None:
        """What `take` gave."""
        end = first + nbytes
        at = sum(1 for one in self.gaps if one[0] < first)
        if at < len(self.gaps) and self.gaps[at][0] == end:
            end = self.gaps.pop(at)[1]
        if at and self.gaps[at - 1][1] == first:
            at -= 1
            first = self.gaps.pop(at)[0]
        self.gaps.insert(at, (first, end))


class Arena:
    """Any thread may call anything."""

    def __init__(self, store: Store, nbytes: int) -> None:
        """Registers so many bytes with the store, none for 0. ``te.RegistrationError`` and
        ``OSError`` as ``Store.register`` and ``mmap`` raise them."""
        self._nbytes = nbytes - nbytes % ALIGNMENT
        self._gaps = Gaps(self._nbytes)
        self._freed = threading.Condition()
        #: Who waits for room: first come, first served, or many small ones would keep a large one
        #: waiting for ever.
        self._waiting: deque[object] = deque()
        if self._nbytes:
            made = mmap.mmap(-1, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._address = store.register(made).address
            self._view = memoryview(made)

    @contextmanager
    def room(self, nbytes: int, timeout_s: float) -> Iterator[tuple[int, memoryview]]:
        """The address of ``nbytes`` that nobody else has meanwhile, and these. `NoRoom` if there
        are too few, or others have them for so long."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not nbytes or wanted > self._nbytes:
            raise NoRoom(f"{nbytes} bytes do not fit into the {self._size}")
        first = self._taken(wanted, timeout_s)
        try:
            yield self._address + first, self._view[first : first + nbytes]
        finally:
            with self._freed:
                self._gaps.give_back(first, wanted)
                self._freed.notify_all()

    def _taken(self, nbytes: int, timeout_s: float) -> int:
        turn, found = object(), list[int]()

        def take() -> bool:
            first = self._gaps.take(nbytes) if self._waiting[0] is turn else None
            if first is not None:
                found.append(first)
            return bool(found)

        with self._freed:
            self._waiting.append(turn)
            try:
                if self._freed.wait_for(take, timeout_s):
                    return found[0]
            finally:
                self._waiting.remove(turn)
                self._freed.notify_all()
            raise NoRoom(f"{nbytes} bytes of the {self._size} were not free within {timeout_s:g} s")

    @property
    def _size(self) -> str:
        return f"{self._nbytes} of setup's local_buffer_size"
