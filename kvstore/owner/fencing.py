# SPDX-License-Identifier: Apache-2.0
"""Waits for the fences of many claims at once: a write that does not end keeps nobody waiting but
the client that said it had ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["Fencing", "pause_s"]

logger = logging.getLogger(__name__)

FENCES_MAX: Final = 4096
"""Fences that are waited for; of more, nobody waits."""
PAUSE_S: Final = 0.0002
"""As often as te looks itself, where it waits for one fence."""
PAUSE_S_MAX: Final = 0.02
PAUSE_PART: Final = 1 / 8
CLOSE_TIMEOUT_S: Final = 10.0


def pause_s(waited_s: float) -> float:
    """How long to wait before the next look at a fence that was waited for so long. Most end within
    a millisecond; those that do not are looked at ever less often."""
    return min(max(waited_s * PAUSE_PART, PAUSE_S), PAUSE_S_MAX)


@dataclass(eq=False)
class _Waiting:
    """One fence that has not ended."""

    is_closed: Callable[[], bool]
    then: Callable[[], object]
    begun_s: float
    until_s: float
    look_s: float


class Fencing:
    """One thread looks at all fences; it sleeps while there are none. All methods are
    thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-fences", daemon=True)
        self._thread.start()

    def wait(
        self, is_closed: Callable[[], bool], timeout_s: float, then: Callable[[], object]
    ) -> bool:
        """Has ``then`` called once ``is_closed`` is true, or the time is over. Both are called in
        the thread for all fences, and may not wait. False if too many are waited for, or after
        ``close``: then nothing is called."""
        now_s = self._clock()
        one = _Waiting(is_closed, then, now_s, now_s + timeout_s, now_s + PAUSE_S)
        with self._changed:
            if self._is_closing or len(self._waiting) >= FENCES_MAX:
                return False
            self._waiting.append(one)
            self._changed.notify()
        return True

    def close(self) -> None:
        """Waits for no fence any more: what was to be called behind them is called now."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} does not end")

    def _run(self) -> None:
        while True:
            with self._changed:
                next_s = min((one.look_s for one in self._waiting), default=None)
                if not self._is_closing:
                    left_s = None if next_s is None else next_s - self._clock()
                    if left_s is None or left_s > 0:
                        self._changed.wait(left_s)
                is_last, waiting = self._is_closing, list(self._waiting)
            ended = [one for one in waiting if is_last or self._has_ended(one)]
            gone = set(ended)
            with self._changed:
                self._waiting = [one for one in self._waiting if one not in gone]
            for one in ended:
                _guarded(one.then)
            if is_last:
                return

    def _has_ended(self, one: _Waiting) -> bool:
        """Whether nobody waits for it any more; looks at it, if it is time for that."""
        now_s = self._clock()
        if now_s < one.look_s:
            return False
        one.look_s = now_s + pause_s(now_s - one.begun_s)
        return now_s >= one.until_s or _guarded(one.is_closed)


def _guarded(function: Callable[[], object]) -> bool:
    """What it returns. A bug in one callback keeps no other fence waiting; a fence that cannot be
    asked has ended: whoever waits for it asks again, and is told."""
    try:
        return bool(function())
    except Exception:
        logger.exception("a bug in the store: %r raised", function)
        return True
