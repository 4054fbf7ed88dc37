# SPDX-License-Identifier: Apache-2.0
"""How much the servers of one host slow each other down: they share its processors, or its network
and what leads there. Learnt from what prompts took while others were computed. Pure: the time is
handed in.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["SHARE_MAX", "Host"]

#: With one more server at work a prompt takes at most twice as long: so it is where two of them
#: share what one of them could use alone.
SHARE_MAX: Final = 1.0
#: What came so many prompts ago counts for 1/e.
MEMORY_PROMPTS: Final = 64
_FADE: Final = 1 - 1 / MEMORY_PROMPTS
#: How many prompts with one server at work more, or less, than beside the others are too few: until
#: there are many more, that servers slow each other down counts for a part.
DOUBT: Final = 1.0
#: A prompt that took longer than so many times what was expected, or less than a part as small,
#: counts as one that did so: something else was the matter with it.
STRANGE: Final = 3.0


class Host:
    """The servers of one host: how many are at work, and what that does to each of them."""

    def __init__(self) -> None:
        self._busy = 0
        self._now_s = -math.inf
        #: Servers at work, summed up over time.
        self._sum_s = 0.0
        #: Of (other servers at work, time in parts of what was expected), which fade.
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    # --- who is at work ---

    @property
    def busy(self) -> int:
        """How many servers are at work."""
        return self._busy

    def begins(self, now_s: float) -> None:
        """A server was idle, and is not any more."""
        self.work_s(now_s)
        self._busy += 1

    def ends(self, now_s: float) -> None:
        """A server has nothing more to do. Called once for each ``begins``."""
        self.work_s(now_s)
        self._busy -= 1

    def work_s(self, now_s: float) -> float:
        """For how long servers have been at work, in sum. Two of these tell how many were at work
        between them."""
        if now_s > self._now_s:
            if self._busy:
                self._sum_s += self._busy * (now_s - self._now_s)
            self._now_s = now_s
        return self._sum_s

    # --- what that does ---

    @property
    def share(self) -> float:
        """By what part a prompt takes longer for each other server that is at work; up to
        ``SHARE_MAX``."""
        if not self._count:
            return 0.0
        spread = self._xx - self._x * self._x / self._count
        slope = (self._xy - self._x * self._y / self._count) / (max(0.0, spread) + DOUBT)
        alone = (self._y - slope * self._x) / self._count
        return min(SHARE_MAX, max(0.0, slope) / max(alone, 1 / STRANGE))

    def slowdown(self, others: float) -> float:
        """How many times as long everything takes while so many other servers are at work."""
        return 1.0 + self.share * others

    def learn(self, others: float, took_s: float, work_s: float) -> None:
        """Work that takes ``work_s`` alone has taken so long while so many others were at work."""
        times = min(STRANGE, max(1 / STRANGE, took_s / work_s if work_s > 0.0 else STRANGE))
        self._count = self._count * _FADE + 1
        self._x = self._x * _FADE + others
        self._y = self._y * _FADE + times
        self._xx = self._xx * _FADE + others * others
        self._xy = self._xy * _FADE + others * times
