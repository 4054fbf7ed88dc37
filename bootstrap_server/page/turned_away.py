# SPDX-License-Identifier: Apache-2.0
"""Servers that got no service lately, for the status page: who, why, how often. Pure: the caller
passes the time in.

Whoever asks a registry may come to stand here, so what is kept of each is bounded, and so is how
many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from bootstrap_server.decoding import excerpt

__all__ = ["KEPT_S", "TURNED_AWAY_MAX", "TurnedAway", "TurnedAwayLately"]

TURNED_AWAY_MAX: Final = 32
WHY_CHARS_MAX: Final = 400
KEPT_S: Final = 600.0


class TurnedAway(NamedTuple):
    """From which address, why, how often, and when last."""

    address: str
    why: str
    times: int
    last_s: float


class TurnedAwayLately:
    """Who was turned away in the last `KEPT_S`; of more than `TURNED_AWAY_MAX` the latest."""

    def __init__(self) -> None:
        #: The latest stands last.
        self._found: OrderedDict[tuple[str, str], TurnedAway] = OrderedDict()

    def note(self, address: str, why: str, now_s: float, count: int = 1) -> None:
        """So many requests from `address` were not served."""
        key = address, excerpt(why[:WHY_CHARS_MAX])
        former = self._found.pop(key, None)
        times = count if former is None else former.times + count
        self._found[key] = TurnedAway(*key, times, now_s)
        if len(self._found) > TURNED_AWAY_MAX:
            self._found.popitem(last=False)

    def lately(self, now_s: float) -> tuple[TurnedAway, ...]:
        """The latest first."""
        while self._found and now_s - next(iter(self._found.values())).last_s >= KEPT_S:
            self._found.popitem(last=False)
        return tuple(reversed(self._found.values()))
