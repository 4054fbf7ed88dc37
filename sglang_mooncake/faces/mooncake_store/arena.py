# SPDX-License-Identifier: Apache-2.0
"""Registered memory through which bytes of Python go into the store and out of it."""

from __future__ import annotations

import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.store import Store
from sglang_mooncake.faces.in_use import MemoryInUse

__all__ = ["Arena", "Gaps", "NoRoom"]

logger = logging.getLogger(__name__)

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
        #: Kept out of use: bytes may still land there.
        self.lost_nbytes = 0
        if self._nbytes:
            made = mmap.mmap(-1, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._address = store.register(made).address
            self._view = memoryview(made)

    @contextmanager
    def room(self, nbytes: int, timeout_s: float) -> Iterator[tuple[int, memoryview]]:
        """The address of ``nbytes`` that nobody else has meanwhile, and these. Nobody gets them
        again whose use ends with `MemoryInUse`. `NoRoom` if there are too few, or others have
        them for so long."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not nbytes or wanted > self._nbytes - self.lost_nbytes:
            raise NoRoom(f"{nbytes} bytes do not fit into the {self._size}")
        first = self._taken(wanted, timeout_s)
        is_mine = True
        try:
            yield self._address + first, self._view[first : first + nbytes]
        except MemoryInUse:
            is_mine = False
            raise
        finally:
            self._give_back(first, wanted, is_mine)

    def _give_back(self, first: int, nbytes: int, is_mine: bool) -> None:
        """is_mine: nobody else writes there."""
        with self._freed:
            if is_mine:
                self._gaps.give_back(first, nbytes)
                self._freed.notify_all()
                return
            self.lost_nbytes += nbytes
            logger.error(
                "mooncake.store over kvstore: %d of the %d bytes of setup's local_buffer_size are"
                " used no more until close, since bytes may still land there",
                self.lost_nbytes,
                self._nbytes,
            )

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
        lost = f" ({self.lost_nbytes} are lost until close)" if self.lost_nbytes else ""
        return f"{self._nbytes} of setup's local_buffer_size{lost}"
