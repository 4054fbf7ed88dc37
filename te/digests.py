# SPDX-License-Identifier: Apache-2.0
"""Digests of registered memory of any kind, and its bytes, for who wants to compare what lies in
two processes."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from te import _digests
from te.buffers import allocate
from te.core.engine import Engine as Plane
from te.errors import DigestError
from te.memory import RegionTable
from te.memory_kinds.base import MemoryKind, Reach

__all__ = ["Digester"]

#: Of pinned memory: two slots. One copy of a GPU takes 1 MiB to pay for being begun.
BOUNCE_NBYTES: Final = 2 << 20
#: So many units hold the interpreter's lock for a tenth of a millisecond.
UNITS_MAX: Final = 4096
CLOSE_TIMEOUT_S: Final = 1.0

_stuck: Final[list[object]] = []
"""Memory that a device may still write to, for as long as the process lives."""


class Digester:
    """Made by ``Engine.digester``. Any thread may call; one call goes on at a time."""

    def __init__(self, plane: Plane, memory: RegionTable) -> None:
        """Pins its memory for each kind that is registered now. ``te.DigestError``."""
        self._plane, self._memory = plane, memory
        self._lock = threading.Lock()
        self._bytes = np.frombuffer(allocate(BOUNCE_NBYTES), np.uint8)
        self._bounce = _digests.Bounce(self._bytes.ctypes.data, BOUNCE_NBYTES)
        self._unpin: list[Callable[[], None]] = []
        self._closed = False
        for kind in memory.kinds:
            if Reach.CPU in kind.reach:
                continue
            try:
                self._pin(kind)
            except OSError as exc:
                self.close()
                raise DigestError(
                    f"{kind.description} of {kind.name} cannot be read: {exc}"
                ) from exc

    def _pin(self, kind: MemoryKind) -> None:
        if not kind.has_copier:
            raise OSError(errno.EOPNOTSUPP, "te cannot copy it")
        self._unpin.append(kind.pin(self._bytes.ctypes.data, BOUNCE_NBYTES))

    def digests(
        self,
        addresses: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        timeout_s: float = 5.0,
    ) -> npt.NDArray[np.uint64]:
        """The xxh3-64 of each unit: of its pieces, one behind the other.

        The memory stays registered meanwhile: ``Engine.deregister`` waits for it as for a transfer
        that reads from it. Device memory is read by its copy engine; work that the device has yet
        to do is not waited for.

        Args:
            addresses: of the units, shape (n,).
            offsets: of the pieces of each unit, in bytes, shape (pieces,).
            sizes: of these pieces, in bytes, shape (pieces,).
            timeout_s: for all of a device's copies. Where it was too short no digest is made, and
                the memory cannot be deregistered, until they have ended.

        Raises:
            te.DigestError: a unit does not lie in one region, or could not be copied.
        """
        return self._read(addresses, offsets, sizes, timeout_s)

    def read(
        self,
        addresses: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        timeout_s: float = 5.0,
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """The bytes of each unit, shape (n, sum of sizes), and the digests of these bytes; see
        ``digests``, also for errors. The caller bounds how many they are."""
        copied = np.empty((len(addresses), int(sizes.sum())), np.uint8)
        return copied, self._read(addresses, offsets, sizes, timeout_s, copied)

    def _read(
        self,
        addresses: npt.NDArray[np.uint64],
        offsets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        timeout_s: float,
        copied: npt.NDArray[np.uint8] | None = None,
    ) -> npt.NDArray[np.uint64]:
        """The digests, and the bytes into ``copied``."""
        deadline_s = time.monotonic() + timeout_s
        found = np.empty(len(addresses), np.uint64)
        where = np.ascontiguousarray(addresses, np.uint64)
        shape = (np.ascontiguousarray(offsets, np.uint64), np.ascontiguousarray(sizes, np.uint64))
        with self._lock:
            if self._closed:
                raise DigestError("this digester is closed")
            for first in range(0, len(found), UNITS_MAX):
                some = slice(first, first + UNITS_MAX)
                problem, outside = _digests.digests(
                    self._plane,
                    self._bounce,
                    where[some],
                    *shape,
                    found[some],
                    max(deadline_s - time.monotonic(), 0.0),
                    None if copied is None else copied[some],
                )
                if outside >= 0:
                    address = int(where[first + outside]) + int(shape[0].min())
                    nbytes = int((shape[0] + shape[1]).max() - shape[0].min())
                    raise DigestError(self._memory.complaint(address, nbytes))
                if problem:
                    trouble = self._memory.trouble or os.strerror(problem)
                    raise DigestError(f"memory could not be read for a digest: {trouble}")
        return found

    def close(self) -> None:
        """Gives its memory back. Idempotent."""
        self._end(CLOSE_TIMEOUT_S)

    def __del__(self) -> None:
        self._end(0.0)

    def _end(self, timeout_s: float) -> None:
        with self._lock:
            self._closed = True
            if not self._bounce.settle(timeout_s):
                _stuck.append((self._bytes, self._bounce))
                return
            while self._unpin:
                self._unpin.pop()()
