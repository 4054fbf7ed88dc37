# SPDX-License-Identifier: Apache-2.0
"""At which rate bytes land, from transfers as they end. Pure: time is passed in."""

from __future__ import annotations

__all__ = ["Pace"]

#: A transfer of less tells of latency, not of a rate.
SAMPLE_BYTES_MIN = 1 << 20
#: What one more sample counts beside the former mean.
_WEIGHT = 0.3


class Pace:
    """Counts only the time in which something is under way."""

    def __init__(self) -> None:
        #: 0.0 before anything was measured.
        self.bytes_per_s = 0.0
        self._under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._nbytes = 0

    def began(self, now_s: float) -> None:
        if not self._under_way:
            self._since_s = now_s
        self._under_way += 1

    def ended(self, nbytes: int, now_s: float) -> None:
        """`nbytes`: that have landed; 0 for a transfer that failed."""
        self._busy_s += now_s - self._since_s
        self._since_s = now_s
        self._under_way -= 1
        self._nbytes += nbytes
        if self._nbytes >= SAMPLE_BYTES_MIN and self._busy_s > 0:
            rate = self._nbytes / self._busy_s
            former = self.bytes_per_s or rate
            self.bytes_per_s = former + _WEIGHT * (rate - former)
            self._nbytes, self._busy_s = 0, 0.0
