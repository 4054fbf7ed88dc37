# SPDX-License-Identifier: Apache-2.0
"""Memory files that two processes of a host have mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np

__all__ = ["Mapped"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Mapped:
    """One of them, in this process's memory until nobody refers to it any more."""

    def __init__(self, fd: int, is_written: bool = False) -> None:
        """Maps all of a memory file; ``fd`` can be closed after that. ``ValueError`` if somebody
        could make it shorter, or take huge pages out of it, which would end a process that reads
        there (SIGBUS); ``OSError`` if it cannot be mapped."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:  # It is no memory file.
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError("a memory file of another process could be made shorter")
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            raise ValueError("a memory file of another process is of huge pages")
        self.nbytes: Final = os.fstat(fd).st_size
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0)
        try:
            self.memory: Final = mmap.mmap(fd, self.nbytes, prot=prot)
        except OSError as exc:
            raise OSError(
                exc.errno,
                f"{exc.strerror}: {self.nbytes} bytes of another process cannot be mapped; raise"
                " this process's limit of address space (ulimit -v)",
            ) from exc
        # A core dump would give each hole of the file its page, and write all of it.
        self.memory.madvise(mmap.MADV_DONTDUMP)
        self.address: Final = int(np.frombuffer(self.memory, np.uint8).ctypes.data)

    @classmethod
    def make(cls, nbytes: int) -> tuple[Mapped, int]:
        """A new one that this process writes, and its descriptor, for the other process; whoever
        calls this closes it. ``OSError`` if there is no memory."""
        fd = os.memfd_create("kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, is_written=True), fd
        except BaseException:
            os.close(fd)
            raise
