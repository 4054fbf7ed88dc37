# SPDX-License-Identifier: Apache-2.0
"""How often strangers get a line in the log. Pure: time is passed in."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["Throttle"]

BURST: Final = 3
PAUSE_S: Final = 5.0
PAUSE_MAX_S: Final = 300.0
SILENCE_S: Final = 60.0


class Throttle:
    """Lets the first ``BURST`` lines through, and then one after a pause that doubles from
    ``PAUSE_S`` to ``PAUSE_MAX_S``. Begins anew when there was nothing to say for ``SILENCE_S``. So
    somebody who attacks a port for five minutes gets eight lines."""

    def __init__(self) -> None:
        self._left, self._pause_s = BURST, PAUSE_S
        self._next_s = self._asked_s = -math.inf
        self._dropped = 0

    def admits(self, now_s: float) -> bool:
        """Whether a line may be written now; counts it if not."""
        if now_s - self._asked_s >= SILENCE_S:
            self._left, self._pause_s = BURST, PAUSE_S
        self._asked_s = now_s
        if self._left:
            self._left -= 1
            self._next_s = now_s + self._pause_s
            return True
        if now_s < self._next_s:
            self._dropped += 1
            return False
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        self._next_s = now_s + self._pause_s
        return True

    def more(self) -> str:
        """The end of a line: how many were not written before it; empty if none."""
        dropped, self._dropped = self._dropped, 0
        return f" ({dropped} more were not logged)" if dropped else ""
