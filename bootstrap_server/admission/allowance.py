# SPDX-License-Identifier: Apache-2.0
"""How many requests a source may make that prove nothing. Pure: the caller passes the time in.

Only such requests are counted: of those who have the secret, thousands may ask at once from one
address, as behind a translation of addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["BURST", "PER_S", "SOURCES_MAX", "Allowance"]

#: A server with a wrong secret asks a few times in a second, an orchestrator for `/health` less.
BURST: Final = 100
PER_S: Final = 20.0
#: Sources that are known; of more, the one that has been silent for longest begins anew.
SOURCES_MAX: Final = 4096


class Allowance:
    """A token bucket for each source: `BURST` at once, and `PER_S` a second."""

    def __init__(self) -> None:
        #: What was left, and when; who has asked last stands last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many sources are known."""
        return len(self._left)

    def wait_s(self, source: str, now_s: float) -> float:
        """Takes one; or for how long the source has to wait, if it has none left."""
        left, since_s = self._left.pop(source, (float(BURST), now_s))
        left = min(left + (now_s - since_s) * PER_S, float(BURST))
        takes = left >= 1
        self._left[source] = (left - takes, now_s)
        if len(self._left) > SOURCES_MAX:
            self._left.popitem(last=False)
        return 0.0 if takes else (1 - left) / PER_S
