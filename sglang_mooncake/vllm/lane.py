# SPDX-License-Identifier: Apache-2.0
"""Work on the pages of requests: done in a thread, one piece after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

__all__ = ["Lane"]

logger = logging.getLogger(__name__)

Work = TypeVar("Work")


class Lane(Generic[Work]):
    """Pieces of work of one kind. All methods are thread-safe."""

    def __init__(self, name: str, do: Callable[[Work], None], most: int) -> None:
        """``do`` may raise; that is logged. ``most``: pieces that may wait."""
        self._name, self._do, self._most = name, do, most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Work]] = deque()
        #: The request of which a piece is being done.
        self._under_way: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"store-{name}", daemon=True)
        self._thread.start()

    def submit(self, request_id: str, work: Work) -> bool:
        """Queues it, and never waits; False if too much waits already, or after ``close``."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._most:
                return False
            self._waiting.append((request_id, work))
            self._changed.notify_all()
            return True

    def left(self, request_id: str) -> bool:
        """Whether work of the request waits or is under way."""
        with self._changed:
            return self._has({request_id})

    def drop(self, request_ids: Collection[str], timeout_s: float) -> bool:
        """Forgets what waits of some requests, and waits for what is under way of them. False if
        that goes on."""
        with self._changed:
            kept = [one for one in self._waiting if one[0] not in request_ids]
            self._waiting = deque(kept)
            return self._changed.wait_for(lambda: not self._has(request_ids), timeout_s)

    def close(self, timeout_s: float) -> None:
        """Forgets what waits, and ends the thread. Idempotent. ``TimeoutError`` if it does not end:
        the memory of the pages must not be freed."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"a {self._name} of pages has not ended for {timeout_s:g} s")

    def _has(self, request_ids: Collection[str]) -> bool:
        return self._under_way in request_ids or any(
            request_id in request_ids for request_id, _ in self._waiting
        )

    def _run(self) -> None:
        while (found := self._next()) is not None:
            request_id, work = found
            try:
                self._do(work)
            except Exception:
                logger.exception("a %s of request %s failed", self._name, request_id)
            finally:
                with self._changed:
                    self._under_way = None
                    self._changed.notify_all()

    def _next(self) -> tuple[str, Work] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
            if not self._waiting:
                return None
            found = self._waiting.popleft()
            self._under_way = found[0]
            return found
