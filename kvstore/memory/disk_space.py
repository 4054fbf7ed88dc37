# SPDX-License-Identifier: Apache-2.0
"""Blocks of a file system for files that are used whole.

posix_fallocate(3) of more than there is takes all that there is before it fails, and whoever writes
to the same file system meanwhile is told that it is full. So these look before they take."""

from __future__ import annotations

import errno
import os
from typing import Final

__all__ = ["check_free", "reserve"]

_STAT_BLOCK_NBYTES: Final = 512  # of st_blocks, whatever the file system's own are: stat(3type)


def check_free(fd: int, nbytes: int) -> None:
    """Raises ``OSError`` (ENOSPC) if the file system of an open file or directory has less than
    ``nbytes`` bytes left for this user."""
    free = os.fstatvfs(fd)
    if nbytes > free.f_bavail * free.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def reserve(fd: int, nbytes: int) -> None:
    """Gives the file all of its blocks, so that no write to its first ``nbytes`` bytes finds the
    file system full. ``OSError`` if it has too little, or as posix_fallocate(3) says."""
    check_free(fd, nbytes - os.fstat(fd).st_blocks * _STAT_BLOCK_NBYTES)
    os.posix_fallocate(fd, 0, nbytes)
