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

from te.memory_kinds.base import Export, Exported
from te.reasons import Reason
from te.transports.samehost._core import SamehostLink

__all__ = ["Say", "SharedMemory", "Shares", "Sharing"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedMemory:
    """A region that peers on this host may map."""

    #: The region's serial number: a later region at the same address has another.
    serial: int
    address: int
    nbytes: int
    export: Export


Say = Callable[[SharedMemory, int, Exported | None, float], str | None]
"""Has the peer map a part of memory, or unmap all of it (None): with the number of this word, until
a time of the monotonic clock. Why it has not, or None."""


class Shares:
    """What one peer has mapped. Any thread may call anything."""

    def __init__(self, link: SamehostLink, say: Say) -> None:
        self._link = link
        self._say = say
        self._lock = threading.Lock()
        self._number = 0
        #: Serials of what it has mapped, or may have.
        self._mapped: set[int] = set()
        #: And of what it has said so.
        self._confirmed: set[int] = set()
        #: What has been logged: the same holds for many regions.
        self._problems: set[str] = set()
        #: Whether it did not answer in time: registering memory waits for it no more.
        self.is_silent = False

    def has(self, serial: int) -> bool:
        """Whether all of a region is mapped."""
        return serial in self._confirmed

    @property
    def alive(self) -> bool:
        """Whether there is anything to be told."""
        return self._link.alive

    def share(
        self, memory: SharedMemory, is_current: Callable[[int], bool], deadline_s: float
    ) -> None:
        """Has the peer map it, unless it has, or it is registered no more. The link works without,
        only slower; the log says why."""
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not self._lock.acquire(timeout=left_s):
            return
        try:
            if memory.serial in self._mapped or not is_current(memory.serial) or not self.alive:
                return
            self._mapped.add(memory.serial)
            problem = self._share_parts(memory, deadline_s)
            if problem is None:
                self._link.mapped_by_peer(memory.serial, True)
                self._confirmed.add(memory.serial)
            elif self.alive and problem not in self._problems:
                self._problems.add(problem)
                logger.warning(
                    "a peer on this host cannot map %d bytes of this engine's memory and copies"
                    " them more slowly: %s",
                    memory.nbytes,
                    problem,
                )
        finally:
            self._lock.release()

    def _share_parts(self, memory: SharedMemory, deadline_s: float) -> str | None:
        """Under the lock."""
        try:
            for part in memory.export.parts():
                problem = self._tell(memory, part, deadline_s)
                if problem is not None:
                    return problem
        except OSError as exc:
            return f"they cannot be exported: {exc.strerror}"
        return None

    def unshare(self, memory: SharedMemory, timeout_s: float) -> None:
        """Has the peer unmap it; the link dies if that is not confirmed in time."""
        deadline_s = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            logger.warning(
                "a peer does not answer a request to unmap memory: its link is closed, because "
                "it could read freed memory"
            )
            self._link.die(Reason.PEER_CLOSED)
            return
        try:
            if memory.serial not in self._mapped or not self.alive:
                return
            self._link.mapped_by_peer(memory.serial, False)
            self._confirmed.discard(memory.serial)
            problem = self._tell(memory, None, deadline_s)
            self._mapped.discard(memory.serial)
        finally:
            self._lock.release()
        if problem is not None:
            logger.warning("a peer does not unmap %d bytes: %s", memory.nbytes, problem)
            self._link.die(Reason.PEER_CLOSED)

    def _tell(self, memory: SharedMemory, part: Exported | None, deadline_s: float) -> str | None:
        self._number += 1
        return self._say(memory, self._number, part, deadline_s)


class Sharing:
    """The shares of all links of an engine to peers on this host. Any thread may call anything."""

    def __init__(self, current: Callable[[], tuple[SharedMemory, ...]]) -> None:
        """``current`` says what is registered now."""
        self._current = current
        self._lock = threading.Lock()
        self._links: list[Shares] = []

    def attach(self, shares: Shares) -> None:
        """A link has been opened, and its peer may map what is registered."""
        with self._lock:
            self._links = [one for one in self._links if one.alive] + [shares]

    def share_files(self, shares: Shares, deadline_s: float) -> None:
        """Behind ``attach``: has the peer map memory files, in 0.5 ms each."""
        self._share(shares, deadline_s, by_files=True)

    def share_handles(self, shares: Shares, deadline_s: float) -> None:
        """The same of memory that a kind maps there. A GPU server has hundreds of regions, and a
        driver takes its time: meanwhile the link works without."""
        told = self._share(shares, deadline_s, by_files=False)
        if told and shares.alive:
            logger.info(
                "a peer on this host copies %d of %d regions by its own GPU; the others go through"
                " host memory",
                sum(shares.has(memory.serial) for memory in told),
                len(told),
            )

    def _share(self, shares: Shares, deadline_s: float, by_files: bool) -> tuple[SharedMemory, ...]:
        # First the list, then the memory: what goes meanwhile finds the link, or is not seen.
        found = tuple(one for one in self._current() if (one.export.handles == "") == by_files)
        for memory in found:
            shares.share(memory, self._is_current, deadline_s)
        return found

    def add(self, memory: SharedMemory, timeout_s: float) -> None:
        """Memory was registered. Peers for which no time is left copy it more slowly."""
        deadline_s = time.monotonic() + timeout_s
        for shares in self._alive():
            if not shares.is_silent:
                shares.share(memory, self._is_current, deadline_s)
                if time.monotonic() >= deadline_s:
                    shares.is_silent = True
                    return

    def remove(self, memory: SharedMemory, timeout_s: float) -> None:
        """Memory is registered no more; after it returns no live link has it mapped."""
        for shares in self._alive():
            shares.unshare(memory, timeout_s)

    def _is_current(self, serial: int) -> bool:
        return any(one.serial == serial for one in self._current())

    def _alive(self) -> list[Shares]:
        with self._lock:
            return [one for one in self._links if one.alive]
