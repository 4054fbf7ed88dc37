# SPDX-License-Identifier: Apache-2.0
"""Memory that Mooncake's store hands out."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from typing import ClassVar

__all__ = ["BufferHandle", "MooncakeHostMemAllocator"]

logger = logging.getLogger(__name__)


class BufferHandle(bytearray):
    """What ``get_buffer`` gives: the bytes of one object, with Mooncake's methods."""

    def size(self) -> int:
        """In bytes."""
        return len(self)

    def ptr(self) -> int:
        """Where they lie, for as long as the handle lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


class MooncakeHostMemAllocator:
    """Memory of the host, by pages. All allocators know the memory of all, as Mooncake's do: one
    that goes away frees nothing."""

    _lock: ClassVar = threading.Lock()
    _given: ClassVar[dict[int, mmap.mmap]] = {}

    def alloc(self, size: int) -> int:
        """The address of ``size`` zeroed bytes; 0 if there are none, and the log says why."""
        try:
            made = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as exc:
            logger.error("mooncake.store over kvstore: no %s bytes for the host: %s", size, exc)
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        with self._lock:
            self._given[address] = made
        return address

    def free(self, ptr: int) -> int:
        """0; -1 if nothing begins there."""
        with self._lock:
            made = self._given.pop(ptr, None)
        if made is None:
            logger.error("mooncake.store over kvstore: no memory was given out at %#x", ptr)
            return -1
        made.close()
        return 0
