# SPDX-License-Identifier: Apache-2.0
"""How often strangers get a line in the log. Pure: time is passed in."""

from __future__ import annotations

from typing import Final

__all__ = ["Throttle"]

BURST: Final = 20
PER_S: Final = 1.0


class Throttle:
    """Lets the first ``BURST`` lines through, and after those ``PER_S`` a second."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._seen_s: float | None = None
        self._dropped = 0

    def admits(self, now_s: float) -> bool:
        """Whether a line may be written now; counts it if not."""
        if self._seen_s is not None:
            self._left = min(self._left + (now_s - self._seen_s) * PER_S, float(BURST))
        self._seen_s = now_s
        if self._left < 1.0:
            self._dropped += 1
            return False
        self._left -= 1.0
        return True

    def take_dropped(self) -> int:
        """How many lines were not written since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped
