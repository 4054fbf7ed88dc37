# SPDX-License-Identifier: Apache-2.0
"""Tells the lower tier of an owner what was removed, so that no restart finds it there."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from kvstore.owner.tiering import Tiering
from kvstore.threads import NoThread, Threads
from kvstore.tiers.object_tombstones import ObjectTombstones
from kvstore.tiers.tombstones import Tombstones

__all__ = ["Removed"]

logger = logging.getLogger(__name__)

Told = TypeVar("Told")

TOMBSTONES_MAX: Final = 4
"""Requests at once that tell object storage what was removed."""


class Removed:
    """Of one owner."""

    def __init__(self, lock: threading.Lock, where: str) -> None:
        """``lock``: of the owner's table. ``where``: what the tier is, for the log."""
        #: Where it is told at once; None without a tier.
        self.stones: Tombstones | ObjectTombstones | None = None
        self._lock = lock
        self._where = where
        #: How often it is to be told still, and who tells it to object storage.
        self._count = 0
        self._telling = Threads(TOMBSTONES_MAX, "kvstore-tombstones")

    def close(self) -> None:
        """Waits until all is told. Idempotent."""
        self._telling.shutdown()
        stones, self.stones = self.stones, None
        if stones is not None:
            stones.close()

    def begin(self) -> None:
        """With the lock: something is removed from the table, and ``tell`` follows."""
        self._count += 1

    def tell(
        self, write: Callable[[Tombstones | ObjectTombstones], None], result: Told, *, waits: bool
    ) -> Future[Told]:
        """Has the result, once it is told. ``waits``: if it is told to object storage, that takes
        its time."""
        if waits and isinstance(self.stones, ObjectTombstones):
            with contextlib.suppress(NoThread):  # It is told in this one.
                return self._telling.submit(self._tell, write, result)
        future: Future[Told] = Future()
        future.set_result(self._tell(write, result))
        return future

    def _tell(self, write: Callable[[Tombstones | ObjectTombstones], None], result: Told) -> Told:
        """Ends what ``begin`` has begun. A tier that takes no more writes may keep what is
        removed."""
        stones = self.stones  # Once: ``close`` may take it away.
        try:
            if stones is not None:
                write(stones)
        except OSError as exc:
            logger.warning(
                "what is removed from %s may be found again if this process is killed now: %s",
                self._where,
                exc,
            )
        finally:
            with self._lock:
                self._count -= 1
        return result

    def forget(self, tiering: Tiering) -> None:
        """Forgets what is wiped from the tier, once all is."""
        stones = self.stones
        if stones is None or stones.is_empty:
            return
        with self._lock:
            if tiering.is_idle and not self._count:
                stones.reset()
