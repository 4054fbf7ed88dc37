# SPDX-License-Identifier: Apache-2.0
"""Bytes that have landed and differ from what was sent, in files for who looks for the cause. A
thread writes them: a disk that is slow keeps no request waiting."""

from __future__ import annotations

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

#: In the directory, whoever wrote them; those that are there are of the first differences, which
#: mostly tell more than those behind them. Each rank counts by itself, so that those that write at
#: the same moment may leave one more each.
FILES_MAX = 64
#: Files that are yet to be written.
_QUEUED_MAX = 4
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
    """Files `room-NUMBER-TIME.npz` (`numpy.load`): each cell by its name, and `reason`. Only their
    owner may read them, since they are of somebody's prompt.

    Raises:
        OSError: there is no such directory, and it cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._queue: queue.Queue[_Difference | None] = queue.Queue(_QUEUED_MAX)
        self._thread = threading.Thread(target=self._run, name="kv-kept-bytes", daemon=True)
        self._pace = Pace()
        #: Until when none is tried, by the monotonic clock.
        self._rests_until_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def has_room(self, room: int) -> bool:
        """Whether bytes of this room would be kept, before they are read for it."""
        if time.monotonic() < self._rests_until_s:
            self._not_kept(room, "the last file could not be written")
            return False
        if self._queue.full():
            self._not_kept(room, f"{_QUEUED_MAX} files are yet to be written")
            return False
        return True

    def keep(self, room: int, reason: str, cells: Cells) -> None:
        """Has them written; the log says where, or why not. Never waits. One thread calls this,
        behind `has_room`."""
        self._queue.put_nowait(_Difference(room, reason, cells))

    def _not_kept(self, room: int, why: str) -> None:
        more = self._pace.more()
        if more is not None:
            logger.warning("the bytes of room %d that differ are not kept: %s%s", room, why, more)

    def close(self) -> None:
        """Once those are written that were kept, unless a disk is too slow for that. Idempotent."""
        if not self._thread.is_alive():
            return
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))

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

    def _write(self, one: _Difference) -> Path:
        files = sum(1 for _ in self._directory.glob("room-*"))  # Also of one that was killed.
        if files >= FILES_MAX:
            raise OSError(f"{self._directory} has {files} files of bytes already: remove some")
        path = self._directory / f"room-{one.room}-{time.time_ns()}.npz"
        part = path.with_suffix(".part")
        arrays: dict[str, Any] = {"reason": np.array(one.reason), **one.cells}
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
                np.savez(file, **arrays)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return path
