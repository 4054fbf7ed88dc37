# SPDX-License-Identifier: Apache-2.0
"""Time by which somebody judges the silence of others. Pure: a clock is passed in."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RunningClock"]


class RunningClock:
    """Time in which the loop that asks it has run: no step is longer than `step_max_s`.

    When the process itself was held (a busy interpreter, a stopped process, a suspended machine),
    it has not listened to others either: what they said waits in its sockets. That time must not
    count as their silence, so only the first `step_max_s` of it do. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float], step_max_s: float) -> None:
        self._clock = clock
        self._step_max_s = step_max_s
        self._seen_s = clock()
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds since the start, less what was skipped. Must be asked more often than steps."""
        seen_s = self._clock()
        self._now_s += min(seen_s - self._seen_s, self._step_max_s)
        self._seen_s = seen_s
        return self._now_s
