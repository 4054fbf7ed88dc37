# SPDX-License-Identifier: Apache-2.0
"""Which control connections bring nothing any more. Pure.

libzmq's threads say something over each connection in every `Deadlines.heartbeat_s`, whatever the
interpreter does, so a connection that has brought no byte for some of these is lost. libzmq could
judge that itself (ZMQ_HEARTBEAT_TIMEOUT), but by time in which its process may not have run, and
before it reads what has come meanwhile: when a whole machine stood still for 4 s, one link of sixty
was lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from bootstrap_server.running import RunningClock
from sglang_mooncake.context import Deadlines

__all__ = ["Silence"]

_K = TypeVar("_K", bound=Hashable)


class Silence(Generic[_K]):
    """Asked by a loop, and by the time in which that has run."""

    def __init__(self, deadlines: Deadlines) -> None:
        self.after_s = deadlines.heartbeat_s * deadlines.heartbeat_failures_max
        self._every_s = deadlines.heartbeat_s / 2
        self._looked_s = 0.0
        self._running = RunningClock(lambda: self._looked_s, deadlines.heartbeat_s)
        #: What each has brought, and since when no more.
        self._heard: dict[_K, tuple[int, float]] = {}

    def is_due(self, now_s: float) -> bool:
        """Whether to look again."""
        return now_s - self._looked_s >= self._every_s

    def look(self, counts: Mapping[_K, int], now_s: float) -> list[_K]:
        """Those that have brought nothing for `after_s`.

        Args:
            counts: how many bytes each connection has brought so far; all others are forgotten.
            now_s: by a clock that never steps back.
        """
        self._looked_s = now_s
        ran_s = self._running.now_s()
        heard = {}
        for one, count in counts.items():
            before = self._heard.get(one)
            heard[one] = before if before is not None and before[0] == count else (count, ran_s)
        self._heard = heard
        return [one for one, (_, since_s) in heard.items() if ran_s - since_s >= self.after_s]
