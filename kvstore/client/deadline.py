# SPDX-License-Identifier: Apache-2.0
"""Until when something is waited for."""

from __future__ import annotations

import math
import time
from typing import Final

__all__ = ["Deadline"]


class Deadline:
    """Counts from when it is made. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        self._until_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds; 0.0 once it is over."""
        return max(self._until_s - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for any more."""
        return self.left_s == 0.0

    def end(self) -> None:
        """It is over now. Whoever waits already does so as long as it was said before."""
        self._until_s = _PAST_S


_PAST_S: Final = -math.inf
