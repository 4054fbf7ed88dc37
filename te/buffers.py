# SPDX-License-Identifier: Apache-2.0
"""Memory that other processes of the same host can map."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final, Self

__all__ = ["Buffer", "allocate"]

HUGE_PAGE_BYTES: Final = 2 << 20
F_SEAL_FUTURE_WRITE: Final = 0x10  # linux/fcntl.h; Python has no name for it yet


class Buffer(mmap.mmap):
    """Zeroed memory of ``nbytes`` bytes, rounded up to whole pages; made by ``te.allocate``.

    It supports the buffer protocol (``np.frombuffer``). The memory is freed with the last
    reference.
    """

    #: The memory file, and whether it is made of huge pages.
    fd: int = -1
    huge: bool = False

    def __new__(cls, fd: int, nbytes: int, huge: bool) -> Self:
        self = super().__new__(cls, fd, nbytes)
        self.fd = fd
        self.huge = huge
        return self

    def __init__(self, fd: int, nbytes: int, huge: bool) -> None:
        """``te.allocate`` makes buffers."""

    def __repr__(self) -> str:
        return f"Buffer({len(self)} bytes{', huge pages' if self.huge else ''})"

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def allocate(nbytes: int) -> Buffer:
    """Allocates memory to register with an engine. Peers on the same host that run as the same
    user, or as root, map it, and copy from it about twice as fast as from other memory. For other
    peers, where it is registered with ``remote="none"``, and before Linux 5.1, it is ordinary
    memory.

    The memory consists of huge pages if the system has reserved enough of them. Raises
    ``ValueError`` if ``nbytes`` is below 1, ``OSError`` if there is not enough memory.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes={nbytes} must be at least 1")
    with contextlib.suppress(OSError):
        return _map(nbytes, os.MFD_HUGETLB, HUGE_PAGE_BYTES)
    return _map(nbytes, 0, mmap.PAGESIZE)


def _map(nbytes: int, flags: int, page_nbytes: int) -> Buffer:
    nbytes = -(-nbytes // page_nbytes) * page_nbytes
    fd = os.memfd_create("te", flags | os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # A peer that has it mapped must never find it shorter.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        buffer = Buffer(fd, nbytes, flags != 0)
        with contextlib.suppress(OSError):  # Before Linux 5.1.
            # Peers get the descriptor to read from: nobody but this process shall write by it. And
            # nobody can take pages out of it any more, without which no peer maps it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError:
        os.close(fd)
        raise
    if not flags:
        with contextlib.suppress(OSError):  # Transparent huge pages are a matter of policy.
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
