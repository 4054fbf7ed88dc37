# SPDX-License-Identifier: Apache-2.0
"""Memory whose pages the kernel asks this process for, by userfaultfd(2): whoever touches one that
is not served yet waits in the kernel, as for a page that has to come from a slow disk."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np
from te_far import DEADLINE_S, is_readable

SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
UFFDIO_API, UFFDIO_REGISTER, UFFDIO_COPY = 0xC018AA3F, 0xC020AA00, 0xC028AA03
API, MODE_MISSING = 0xAA, 1


def is_allowed() -> bool:
    """Whether this process may freeze memory."""
    fd = _userfaultfd()
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def _userfaultfd() -> int:
    """A descriptor, or -1 with errno set."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(SYS_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
    return fd


class FrozenMemory:
    """Private pages, frozen until `serve`."""

    def __init__(self, nbytes: int) -> None:
        """Needs root, or vm.unprivileged_userfaultfd=1: faults inside of system calls count."""
        self._map = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._export = (ctypes.c_char * nbytes).from_buffer(self._map)
        self.address, self.nbytes = ctypes.addressof(self._export), nbytes
        self._fd = _userfaultfd()
        assert self._fd >= 0, f"userfaultfd: {os.strerror(ctypes.get_errno())}"
        self._call(UFFDIO_API, struct.pack("<QQQ", API, 0, 0))
        self._call(UFFDIO_REGISTER, struct.pack("<QQQQ", self.address, nbytes, MODE_MISSING, 0))

    def _call(self, request: int, argument: bytes) -> None:
        fcntl.ioctl(self._fd, request, bytearray(argument))

    def wait_until_touched(self) -> None:
        """Somebody waits for a page."""
        assert is_readable(self._fd, DEADLINE_S), "nobody has touched the frozen memory"
        os.read(self._fd, 4096)

    def serve(self, content: np.ndarray) -> None:
        """Gives all pages at once; who waits goes on."""
        assert content.nbytes == self.nbytes
        self._call(
            UFFDIO_COPY,
            struct.pack("<QQQQq", self.address, content.ctypes.data, self.nbytes, 0, 0),
        )

    def close(self) -> None:
        """Whoever still waits finds zeros."""
        os.close(self._fd)


@contextlib.contextmanager
def frozen_memory(nbytes: int) -> Iterator[FrozenMemory]:
    memory = FrozenMemory(nbytes)
    try:
        yield memory
    finally:
        memory.close()
