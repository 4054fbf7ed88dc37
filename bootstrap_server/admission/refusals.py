# SPDX-License-Identifier: Apache-2.0
"""Strangers in the log, at a bounded rate: a log that they can fill is an attack of its own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

from bootstrap_server.decoding import excerpt

__all__ = ["Pace", "Refusals", "http_logger"]

logger = logging.getLogger(__name__)

#: Strangers get no more of the log than a line in this time, after the first; while they go on it
#: doubles, up to the second one.
LOG_EVERY_S: Final = 5.0
LOG_EVERY_MAX_S: Final = 300.0
#: After which they are others, maybe.
SILENCE_S: Final = 60.0


class Pace:
    """When there may be a line about strangers: `burst` at once, then one after each pause, which
    doubles. It begins anew when there was nothing to say for `SILENCE_S`. Pure but for `clock`."""

    def __init__(self, burst: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = self._left = burst
        self._clock = clock
        self._pause_s = LOG_EVERY_S
        self._next_s = self._asked_s = -math.inf
        self._left_out = 0

    def left_out(self) -> int | None:
        """There is something to say. How many lines were left out since the last one; None if this
        one is, too."""
        now_s = self._clock()
        if now_s - self._asked_s >= SILENCE_S:
            self._left, self._pause_s = self._burst, LOG_EVERY_S
        self._asked_s = now_s
        if self._left:
            self._left -= 1
        elif now_s < self._next_s:
            self._left_out += 1
            return None
        else:
            self._pause_s = min(2 * self._pause_s, LOG_EVERY_MAX_S)
        self._next_s = now_s + self._pause_s
        left_out, self._left_out = self._left_out, 0
        return left_out

    def more(self) -> str | None:
        """There is something to say: how a line about it ends, which says how many were left out;
        None if this one is, too."""
        left_out = self.left_out()
        if left_out is None:
            return None
        return f" ({left_out} more such lines were left out)" if left_out else ""


class Refusals:
    """Writes who was refused into the log, at a bounded rate."""

    def __init__(self, what: str = "request", clock: Callable[[], float] = time.monotonic) -> None:
        """`what` each of them asked for."""
        self._what = what
        self._pace = Pace(clock=clock)

    def note(self, address: str, why: str) -> None:
        """One from `address` was refused."""
        left_out = self._pace.left_out()
        if left_out is None:
            return
        more = f" ({left_out} earlier refusals were not logged)" if left_out else ""
        logger.warning("refused a %s from %s: %s%s", self._what, address, excerpt(why), more)


def http_logger(name: str) -> logging.Logger:
    """A logger for aiohttp, which logs a traceback for each client that speaks no HTTP, and for
    each request that we cannot answer: of the former none, of the latter few (`Pace`)."""
    found = logging.getLogger(name)
    found.filters = [_Tracebacks().may_be_logged]
    return found


class _Tracebacks:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = Pace(clock=clock)

    def may_be_logged(self, record: logging.LogRecord) -> bool:
        # Here, as aiohttp is there when it logs: who needs a `Pace` alone shall not import it.
        from aiohttp.http_exceptions import HttpProcessingError

        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError) and self._pace.left_out() is not None
