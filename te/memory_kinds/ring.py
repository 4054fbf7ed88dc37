# SPDX-License-Identifier: Apache-2.0
"""The host memory through which memory is staged that the kernel cannot touch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from te.buffers import allocate
from te.core.engine import Engine as Plane
from te.memory_kinds.base import MemoryKind

__all__ = ["Ring"]


class Ring:
    """One engine's: made with the first region that needs it, pinned by each kind that uses it. One
    thread at a time."""

    def __init__(self, plane: Plane, nbytes: int, slot_bytes: int) -> None:
        """``nbytes``: for all workers of the ``plane``, in both directions."""
        self._plane = plane
        self._sizes = nbytes, slot_bytes
        self._memory: np.ndarray | None = None
        self._unpin: dict[MemoryKind, Callable[[], None]] = {}

    def use(self, kind: MemoryKind) -> None:
        """Makes it ready for copies of the kind; ``OSError`` without memory."""
        if kind in self._unpin:
            return
        if self._memory is None:
            nbytes, slot_bytes = self._sizes
            memory = np.frombuffer(allocate(nbytes), np.uint8)
            self._plane.stage(memory.ctypes.data, nbytes, slot_bytes)
            self._memory = memory
        self._unpin[kind] = kind.pin(self._memory.ctypes.data, self._memory.nbytes)

    @property
    def kinds(self) -> tuple[MemoryKind, ...]:
        """The kinds that use the ring. Any thread may ask."""
        return tuple(self._unpin)

    @property
    def trouble(self) -> str:
        """What each kind that uses the ring complains of; empty if none does. Any thread."""
        return "; ".join(kind.trouble for kind in self.kinds if kind.trouble)

    def close(self, timeout_s: float) -> bool:
        """Once the workers have ended; False if a device is still copying at the end of that time:
        then the memory is kept, and it is to be tried again."""
        if not self._plane.unstage(timeout_s):
            return False
        while self._unpin:
            self._unpin.popitem()[1]()
        return True
