# SPDX-License-Identifier: Apache-2.0
"""Threads for what blocks, while two engines find together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

__all__ = ["THREADS_MAX", "Pool"]

THREADS_MAX: Final = 48
"""An engine's threads for making rails, and for answering those who make them. They begin when
they are needed."""


class Pool:
    """Runs functions on a few threads. Any thread may call anything."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, function: Callable[[], None]) -> bool:
        """Has ``function``, which may block, run soon; False once this was stopped."""
        with self._lock:
            if self._is_stopped:
                return False
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS_MAX, self._name)
            self._threads.submit(function)
        return True

    def stop(self) -> None:
        """What has not begun never does; does not wait for what has."""
        with self._lock:
            self._is_stopped = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
