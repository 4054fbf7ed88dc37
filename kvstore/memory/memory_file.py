# SPDX-License-Identifier: Apache-2.0
"""An owner's memory that the next owner can take over: other processes hold it by descriptors to
read from, and it is freed with the last of them.

``te.allocate`` makes memory that nobody else can ever write, so that no next owner could. Here that
is left to the descriptors: those that others get are open for reading, and a mapping of them cannot
be written.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from typing import Final

__all__ = ["MemoryFile"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile:
    """In this process's memory, to be read and written, until nobody refers to its buffer."""

    def __init__(self, fd: int, nbytes: int, name: str, is_adopted: bool) -> None:
        """See ``make`` and ``adopt``. The descriptor is this one's from now on."""
        try:
            #: Supports the buffer protocol.
            self.buffer: Final = mmap.mmap(fd, nbytes)
            with contextlib.suppress(OSError):  # Transparent huge pages are a matter of policy.
                self.buffer.madvise(mmap.MADV_HUGEPAGE)
            #: For others.
            self.readable_fd: Final = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        #: Tells it from all others.
        self.name: Final = name
        #: Whether there may be objects in it.
        self.is_adopted: Final = is_adopted

    @classmethod
    def make(cls, nbytes: int) -> MemoryFile:
        """New memory of zeros. ``OSError`` if there is not enough."""
        fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # Who has it mapped must never find it shorter, and nobody may forbid to write it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return cls(fd, nbytes, secrets.token_hex(16), False)

    @classmethod
    def adopt(cls, fd: int, nbytes: int, name: str) -> MemoryFile:
        """The memory of a former owner, by a descriptor that somebody else has kept; that one stays
        open. ``ValueError`` if it is no such memory, or of another size; ``OSError``."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise ValueError(f"it is no memory file: {exc.strerror}") from exc
        if seals != _SEALS or os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise ValueError(f"it was not made by an owner of the store (seals {seals:#x})")
        found = os.fstat(fd).st_size
        if found != nbytes:
            raise ValueError(f"it has {found} bytes, and {nbytes} are needed")
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        return cls(writable, nbytes, name, True)

    def close(self) -> None:
        """Others can get it no more; to be called once. The buffer stays as long as somebody refers
        to it."""
        os.close(self.readable_fd)
