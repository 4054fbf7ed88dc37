# SPDX-License-Identifier: Apache-2.0
"""A slab's memory as a file that outlives its process: mapped, so that what is written to the
memory is in the file, whoever is killed.

    | head: 4 KiB | slab |

The kernel writes changed pages to the disk in its own time. After a crash of the machine some of
them are of another time than the rest: checksums tell (``ObjectTable.adopt``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Final

from kvstore.memory.disk_space import reserve
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.headers import MAGIC

__all__ = ["SlabFile"]

_HEAD: Final = struct.Struct("<8sIIQQ")
_NAME: Final = b"kvstore\0"
_VERSION: Final = 1


class SlabFile:
    """One that is open, and belongs to this process alone until it ends."""

    def __init__(self, path: Path, nbytes: int, chunk_bytes: int) -> None:
        """Makes the file, with all of its blocks, or opens the one that is there.

        Args:
            path: on a disk, or on a tmpfs such as /dev/shm.
            nbytes: of the slab.
            chunk_bytes: of the slab's chunks.

        Raises:
            ValueError: the file is another process's at the moment, can be read by other users, or
                is of a slab with other settings, or of something else; or there is no space for it.
            OSError: it cannot be made for another reason.
        """
        self._path: Final = path
        self._wanted: Final = _HEAD.pack(_NAME, _VERSION, MAGIC, nbytes, chunk_bytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.ExitStack() as undo:
            self._fd: Final = os.open(path, flags, 0o600)
            undo.callback(os.close, self._fd)
            self._check_own()
            self._make_or_check(UNIT_BYTES + nbytes)
            #: Of the slab; zero in a file that was made.
            self.buffer: Final = memoryview(mmap.mmap(self._fd, UNIT_BYTES + nbytes))[UNIT_BYTES:]
            undo.pop_all()

    def close(self) -> None:
        """Others may open it: nobody may write to the memory from now on, which stays mapped as
        long as somebody refers to it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # The mapping has a duplicate of the descriptor.
        os.close(self._fd)

    def _check_own(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"file={str(self._path)!r} is no regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(
                f"file={str(self._path)!r} belongs to user {status.st_uid} and has the mode"
                f" {stat.filemode(status.st_mode)}: it must be this user's ({os.geteuid()}), and"
                " closed to all others (chmod 600)"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"file={str(self._path)!r} is in use by another process of the store: each needs a"
                " file of its own"
            ) from None

    def _make_or_check(self, nbytes: int) -> None:
        """The head is written last: a file without one was not finished, and has nothing in it."""
        size = os.fstat(self._fd).st_size
        head = os.pread(self._fd, _HEAD.size, 0)
        if head.strip(b"\0"):
            if head != self._wanted or size != nbytes:
                raise ValueError(
                    f"file={str(self._path)!r} of {size} bytes was not made with these settings"
                    f" (memory, chunk_bytes; they give {nbytes} bytes) and this version: give those"
                    " with which it was made, or remove it"
                )
            return
        os.ftruncate(self._fd, 0)
        try:
            reserve(self._fd, nbytes)
        except OSError as error:
            os.ftruncate(self._fd, 0)
            if not size:
                self._path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            free = os.fstatvfs(self._fd)
            raise ValueError(
                f"file={str(self._path)!r} needs {nbytes} bytes, and its file system has"
                f" {free.f_bavail * free.f_frsize} left"
            ) from error
        os.pwrite(self._fd, self._wanted, 0)
