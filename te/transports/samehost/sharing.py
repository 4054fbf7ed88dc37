# SPDX-License-Identifier: Apache-2.0
"""Which memory of this engine the other side of a link has mapped: one owner for each link.

A mapping that outlives its region is copied from for whatever memory comes to that address later.
So nobody but ``Shares`` tells a peer to map or unmap, one word at a time; what a peer has been told
to map, or may have been, it is told to unmap, also while its link is still being made; and if it
does not confirm that, the link ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from te.core.handles import LinkHandle
from te.reasons import Reason

__all__ = ["Say", "SharedMemory", "Shares", "Sharing"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedMemory:
    """Memory that the engine allocated, which peers on this host may map."""

    #: Of its region: another one at the same address has another.
    serial: int
    address: int
    nbytes: int
    fd: int


Say = Callable[[SharedMemory, int, bool, float], str | None]
"""Has the peer map memory (True) or unmap it: with the number of this word, until a time of the
monotonic clock. Why it has not, or None."""


class Shares:
    """What one peer has mapped. Any thread may call anything."""

    def __init__(self, link: LinkHandle, say: Say) -> None:
        self._link = link
        self._say = say
        self._lock = threading.Lock()
        self._number = 0
        #: Serials of what it has mapped, or may have.
        self._mapped: set[int] = set()

    @property
    def alive(self) -> bool:
        """Whether there is anything to be told."""
        return self._link.alive

    def share(
        self, memory: SharedMemory, is_current: Callable[[int], bool], deadline_s: float
    ) -> None:
        """Has the peer map it, unless it has, or it is registered no more. The link works without,
        only slower; the log says why."""
        with self._lock:
            if memory.serial in self._mapped or not is_current(memory.serial) or not self.alive:
                return
            self._mapped.add(memory.serial)
            problem = self._tell(memory, True, deadline_s)
        if problem is not None:
            logger.warning("a peer does not map %d bytes: %s", memory.nbytes, problem)

    def unshare(self, memory: SharedMemory, timeout_s: float) -> None:
        """Has the peer unmap it; the link dies if that is not confirmed in time."""
        deadline_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            logger.warning("a peer does not answer: its link ends, as it may map freed memory")
            self._link.die(Reason.PEER_CLOSED)
            return
        try:
            if memory.serial not in self._mapped or not self.alive:
                return
            problem = self._tell(memory, False, deadline_s)
            self._mapped.discard(memory.serial)
        finally:
            self._lock.release()
        if problem is not None:
            logger.warning("a peer does not unmap %d bytes: %s", memory.nbytes, problem)
            self._link.die(Reason.PEER_CLOSED)

    def _tell(self, memory: SharedMemory, is_mapped: bool, deadline_s: float) -> str | None:
        self._number += 1
        return self._say(memory, self._number, is_mapped, deadline_s)


class Sharing:
    """The shares of all links of an engine to peers on this host. Any thread may call anything."""

    def __init__(self, current: Callable[[], tuple[SharedMemory, ...]]) -> None:
        """``current`` says what is registered now."""
        self._current = current
        self._lock = threading.Lock()
        self._links: list[Shares] = []

    def attach(self, shares: Shares, deadline_s: float) -> None:
        """A link has been opened, and its peer may map what is registered."""
        # First the list, then the memory: what goes meanwhile finds the link, or is not seen.
        with self._lock:
            self._links = [one for one in self._links if one.alive] + [shares]
        for memory in self._current():
            shares.share(memory, self._is_current, deadline_s)

    def add(self, memory: SharedMemory, timeout_s: float) -> None:
        """Memory was registered."""
        for shares in self._alive():
            shares.share(memory, self._is_current, time.monotonic() + timeout_s)

    def remove(self, memory: SharedMemory, timeout_s: float) -> None:
        """Memory is registered no more; after it returns no live link has it mapped."""
        for shares in self._alive():
            shares.unshare(memory, timeout_s)

    def _is_current(self, serial: int) -> bool:
        return any(one.serial == serial for one in self._current())

    def _alive(self) -> list[Shares]:
        with self._lock:
            return [one for one in self._links if one.alive]
