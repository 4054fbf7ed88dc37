# SPDX-License-Identifier: Apache-2.0
"""The segment files of a directory: made or opened, read and written past the kernel's cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvstore.memory.disk_space import check_free, reserve
from kvstore.memory.slab import UNIT_BYTES
from kvstore.tiers.directories import make_own

__all__ = ["SEGMENTS_MAX", "SegmentFiles", "aligned"]

logger = logging.getLogger(__name__)

SEGMENTS_MAX: Final = 256
"""Each keeps a descriptor open."""


class SegmentFiles:
    """All of them are open, have all of their blocks, and belong to this process alone until
    ``close``. Reads and writes are of whole units, from and to memory that begins at multiples of
    a unit; any thread may make them."""

    def __init__(self, directory: Path, nbytes: int, object_bytes_max: int) -> None:
        """Makes what is missing, and removes what is more than wanted.

        Args:
            directory: is made if it is not there.
            nbytes: of all files.
            object_bytes_max: a file has room for such an object at least.

        Raises:
            ValueError: the directory is another process's at the moment, can be read by other
                users, or has files that do not fit; or ``nbytes`` is too small.
            OSError: a file cannot be made, for example because the disk is full.
        """
        self._directory: Final = directory
        self._is_direct = True
        with contextlib.ExitStack() as undo:
            make_own(directory, "disk")
            self._lock: Final = os.open(
                directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            undo.callback(os.close, self._lock)
            self._take_lock()
            left = self._left_behind()
            self.segment_bytes: Final = self._size(left, nbytes, object_bytes_max)
            self.count: Final = min(nbytes // self.segment_bytes, SEGMENTS_MAX)
            if not self.count:
                raise ValueError(
                    f"disk_size={nbytes} is too small: {str(directory)!r} needs segments of"
                    f" {self.segment_bytes} bytes for objects of up to {object_bytes_max}"
                )
            surplus = left[self.count :]
            if surplus:
                logger.warning(
                    "%d segments of %s are removed: disk_size has no room for them",
                    len(surplus),
                    directory,
                )
            for path in surplus:
                path.unlink()
            self._fds: list[int] = []
            with self._named_in_errors():
                check_free(self._lock, (self.count - len(left[: self.count])) * self.segment_bytes)
            for number in range(self.count):
                if number >= len(left):
                    undo.callback(self._path(number).unlink, missing_ok=True)
                self._fds.append(self._open(self._path(number)))
                undo.callback(os.close, self._fds[-1])
            undo.pop_all()

    def close(self) -> None:
        """Others may use the directory. After all reads and writes."""
        for fd in self._fds:
            os.close(fd)
        os.close(self._lock)

    def read(self, segment: int, unit: int, buffers: Sequence[memoryview]) -> None:
        """Fills buffers from a unit of a segment on. ``OSError`` if not all of it comes."""
        wanted = sum(map(len, buffers))
        done = os.preadv(self._fds[segment], buffers, unit * UNIT_BYTES)
        if done != wanted:
            raise self._short("read", segment, done, wanted)

    def write(self, segment: int, unit: int, buffers: Sequence[memoryview]) -> None:
        """Writes buffers, in their order. ``OSError`` if not all of it was written."""
        wanted = sum(map(len, buffers))
        done = os.pwritev(self._fds[segment], buffers, unit * UNIT_BYTES)
        if done != wanted:
            raise self._short("written", segment, done, wanted)

    def _short(self, what: str, segment: int, done: int, wanted: int) -> OSError:
        return OSError(
            errno.EIO,
            f"{done} of {wanted} bytes were {what}",
            str(self._path(segment)),
        )

    def _path(self, number: int) -> Path:
        return self._directory / f"segment-{number:05}"

    def _left_behind(self) -> list[Path]:
        """The files that are there, in order, from the first on without a gap."""
        found: list[Path] = []
        while (path := self._path(len(found))).exists():
            found.append(path)
        return found

    def _size(self, left: Sequence[Path], nbytes: int, object_bytes_max: int) -> int:
        """Of a segment: as the files that are there have it."""
        needed = object_bytes_max + 2 * UNIT_BYTES
        size = next((one.stat().st_size for one in left if one.stat().st_size), 0)
        if not size:
            whole = max(nbytes // SEGMENTS_MAX, needed)
            return -(-whole // UNIT_BYTES) * UNIT_BYTES
        if size < needed or size % UNIT_BYTES:
            raise ValueError(
                f"disk={str(self._directory)!r} has segments of {size} bytes, which are too small"
                f" for objects of up to {object_bytes_max} (chunk_bytes): remove them, or give the"
                " settings with which they were made"
            )
        return size

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"disk={str(self._directory)!r} is in use by another process of the store: each"
                " needs a directory of its own"
            ) from None

    def _open(self, path: Path) -> int:
        fd = self._descriptor(path)
        status = os.fstat(fd)
        try:
            if not stat.S_ISREG(status.st_mode) or status.st_size not in (0, self.segment_bytes):
                raise ValueError(
                    f"{str(path)!r} of {status.st_size} bytes is no segment of"
                    f" {self.segment_bytes} bytes: remove it"
                )
            with self._named_in_errors():
                reserve(fd, self.segment_bytes)
        except (OSError, ValueError):
            os.close(fd)
            raise
        return fd

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Says in an error that has no room, or another cause, what was to be made and where."""
        try:
            yield
        except OSError as exc:
            raise OSError(
                exc.errno,
                f"{self.count} segments of {self.segment_bytes} bytes cannot be made"
                f" ({exc.strerror}): give less as disk_size, or make room",
                str(self._directory),
            ) from exc

    def _descriptor(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if self._is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
            self._is_direct = False
            logger.warning(
                "the file system of %s refuses O_DIRECT: what is read and written goes through the"
                " kernel's cache, which takes memory besides",
                self._directory,
            )
        return os.open(path, flags, 0o600)


def aligned(nbytes: int) -> memoryview:
    """Memory of its own for reads and writes."""
    return memoryview(mmap.mmap(-1, nbytes))
