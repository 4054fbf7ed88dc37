# SPDX-License-Identifier: Apache-2.0
"""Strangers in the log, at a bounded rate: a log that they can fill is an attack of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from bootstrap_server.decoding import excerpt

__all__ = ["Refusals"]

logger = logging.getLogger(__name__)

#: Strangers get no more of the log than a line in this time.
LOG_EVERY_S: Final = 5.0


class Refusals:
    """Writes who was refused into the log, at a bounded rate."""

    def __init__(self, what: str = "request", clock: Callable[[], float] = time.monotonic) -> None:
        """`what` each of them asked for."""
        self._what = what
        self._clock = clock
        self._next_s = clock()
        self._left_out = 0

    def note(self, address: str, why: str) -> None:
        """One from `address` was refused."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} earlier refusals were not logged)" if self._left_out else ""
        logger.warning("refused a %s from %s: %s%s", self._what, address, excerpt(why), more)
        self._next_s, self._left_out = now_s + LOG_EVERY_S, 0
