# SPDX-License-Identifier: Apache-2.0
"""Lines of the log that may come often, at a bounded rate. Others can cause some of
them: a log that they can fill is an attack of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["RateLimitedLog"]

LOG_EVERY_S: Final = 5.0


class RateLimitedLog:
    """Logs one line in ``every_s``, and with it how many were left out. Thread-safe."""

    def __init__(
        self,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = LOG_EVERY_S,
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s = clock()
        self._left_out = 0

    def warn(self, text: str, *values: object) -> None:
        """As ``Logger.warning``, unless another line was logged just now."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
            self._next_s = now_s + self._every_s
        more = f" ({left_out} more such lines were left out)" if left_out else ""
        self._logger.warning("%s%s", text % values, more)
