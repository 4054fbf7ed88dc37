# SPDX-License-Identifier: Apache-2.0
"""At which rate bytes land, from transfers as they end. Pure: time is passed in."""

from __future__ import annotations

import math

__all__ = ["Pace"]

#: Before that many have landed, there is latency to be seen, and no rate.
SAMPLE_BYTES_MIN = 1 << 20
#: Of the time in which something was under way: what is older counts for less than 1/e.
MEMORY_S = 0.5


class Pace:
    """Counts only the time in which something is under way.

    Bytes and time fade alike, and their ratio is the rate. Transfers that end together are told one
    after the other within microseconds: a rate for each would be that of no network.
    """

    def __init__(self) -> None:
        #: 0.0 before anything was measured.
        self.bytes_per_s = 0.0
        self._under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._nbytes = 0.0
        self._landed_nbytes = 0

    def began(self, now_s: float) -> None:
        if not self._under_way:
            self._since_s = now_s
        self._under_way += 1

    def ended(self, nbytes: int, now_s: float) -> None:
        """`nbytes`: that have landed; 0 for a transfer that failed."""
        took_s = now_s - self._since_s
        left = math.exp(-took_s / MEMORY_S)
        self._busy_s = self._busy_s * left + took_s
        self._nbytes = self._nbytes * left + nbytes
        self._landed_nbytes += nbytes
        self._since_s = now_s
        self._under_way -= 1
        if self._landed_nbytes >= SAMPLE_BYTES_MIN and self._busy_s > 0:
            self.bytes_per_s = self._nbytes / self._busy_s
