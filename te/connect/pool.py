# SPDX-License-Identifier: Apache-2.0
"""Threads for what blocks, while two engines find together."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["THREADS_MAX", "Pool"]

logger = logging.getLogger(__name__)

THREADS_MAX: Final = 48
"""An engine's threads for making rails, and for answering those who make them. They begin when
they are needed."""


class Pool:
    """Runs functions on a few threads. Any thread may call anything.

    Python's own executor takes nothing any more once the interpreter has begun to end, before it
    calls what `atexit` knows. An engine that is closed there must still answer, also itself.
    """

    def __init__(self, name: str, threads_max: int = THREADS_MAX) -> None:
        self._name = name
        self._threads_max = threads_max
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._threads = 0
        self._idle = 0
        self._is_stopped = False

    def run(self, function: Callable[[], object]) -> bool:
        """Has ``function``, which may block, run soon; False once this was stopped, and where it
        has no thread and none can be started."""
        with self._changed:
            if self._is_stopped:
                return False
            wants_more = self._idle <= len(self._waiting) and self._threads < self._threads_max
            if wants_more and not self._start() and not self._threads:
                return False
            self._waiting.append(function)
            self._changed.notify()
        return True

    def stop(self) -> None:
        """What has not begun never does; does not wait for what has."""
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def _start(self) -> bool:
        """One more thread, with the lock. There may be a limit of threads, and Python 3.12.0 and
        3.12.1 start none once the interpreter has begun to end."""
        name = f"{self._name}_{self._threads}"
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError as exc:
            if not self._threads:
                logger.warning("%s cannot start a thread, and has none: %s", self._name, exc)
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        while (function := self._next()) is not None:
            try:
                function()
            except Exception:
                logger.exception("a bug in %s", self._name)
            del function  # Else it would keep what it knows until the next one.

    def _next(self) -> Callable[[], object] | None:
        """None once this was stopped."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None
