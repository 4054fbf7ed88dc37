# SPDX-License-Identifier: Apache-2.0
"""Bytes that differ between the two sides of a hand-over, as this rank has them, in files for who
looks for the cause. A thread writes them: a disk that is slow keeps no request waiting."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bootstrap_server.admission.refusals import Pace

__all__ = ["FILES_MAX", "KeptBytes"]

logger = logging.getLogger(__name__)

#: In the directory, of all ranks that share it; those that are there are of the first differences,
#: which mostly tell more than those behind them.
FILES_MAX = 64
#: Requests whose bytes are in memory: they are being read, are yet to be written, or are being
#: written.
_UNWRITTEN_MAX = 4
#: So long after a file that could not be written no other is tried.
_REST_S = 10.0
_CLOSE_TIMEOUT_S = 5.0

Cells = Mapping[str, npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, eq=False)
class _Difference:
    room: int
    reason: str
    cells: Cells


class KeptBytes:
    """Files `difference-NN.npz` (`numpy.load`): each cell by its name, `rank`, `room` and `reason`.
    Only their owner may read them, since they are of somebody's prompt.

    Args:
        rank: whose memory had these bytes.

    Raises:
        OSError: there is no such directory, and it cannot be made.
    """

    def __init__(self, directory: Path, rank: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory, self._rank = directory, rank
        self._queue: queue.SimpleQueue[_Difference | None] = queue.SimpleQueue()
        self._places = threading.BoundedSemaphore(_UNWRITTEN_MAX)
        self._thread = threading.Thread(target=self._run, name="kv-kept-bytes", daemon=True)
        self._pace = Pace()
        #: Until when none is tried, by the monotonic clock.
        self._rests_until_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def claim(self, room: int) -> bool:
        """Whether bytes of this room can be kept; the log says why not. They are read behind this,
        and `keep` follows."""
        if time.monotonic() < self._rests_until_s:
            self._not_kept(room, "the last file could not be written")
            return False
        if not self._places.acquire(blocking=False):
            self._not_kept(room, f"those of {_UNWRITTEN_MAX} others are not written yet")
            return False
        return True

    def keep(self, room: int, reason: str, cells: Cells | None) -> None:
        """Has them written; the log says where, or why not. None: there are none after all. Never
        waits."""
        if cells is None:
            self._places.release()
        else:
            self._queue.put(_Difference(room, reason, cells))

    def _not_kept(self, room: int, why: str) -> None:
        more = self._pace.more()
        if more is not None:
            logger.warning("the bytes of room %d that differ are not kept: %s%s", room, why, more)

    def close(self) -> None:
        """Once those are written that were kept, unless a disk is too slow for that. Idempotent."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            try:
                path = self._write(one)
            except Exception as error:
                self._rests_until_s = time.monotonic() + _REST_S
                logger.warning(
                    "the bytes of room %d that differ are not kept: %s",
                    one.room,
                    error,
                    exc_info=not isinstance(error, OSError),
                )
            else:
                logger.warning(
                    "%d bytes of room %d that differ, in %d cells, are kept in %s",
                    sum(cell.nbytes for cell in one.cells.values()),
                    one.room,
                    len(one.cells),
                    path,
                )
            finally:
                del one  # its bytes, before others take the place
                self._places.release()

    def _write(self, one: _Difference) -> Path:
        path, descriptor = self._new_file()
        about = {"rank": self._rank, "room": one.room, "reason": one.reason}
        arrays: dict[str, Any] = {**about, **one.cells}
        try:
            with os.fdopen(descriptor, "wb") as file:
                np.savez(file, **arrays)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _new_file(self) -> tuple[Path, int]:
        """The first that is not there. The file system gives each name to one rank alone."""
        for number in range(FILES_MAX):
            path = self._directory / f"difference-{number:02d}.npz"
            with contextlib.suppress(FileExistsError):
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        raise OSError(f"{self._directory} has {FILES_MAX} files of bytes already: remove some")
