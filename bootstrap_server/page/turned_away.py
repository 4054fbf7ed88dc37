# SPDX-License-Identifier: Apache-2.0
"""Servers that got no service lately, for the status page: who, why, how often. Pure: the caller
passes the time in.

Whoever asks a registry may come to stand here, so what is kept of each is bounded, and so is how
many there are.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bootstrap_server.decoding import excerpt
from bootstrap_server.page.heard import Heard

__all__ = ["TURNED_AWAY_MAX", "TurnedAway", "TurnedAwayLately"]

TURNED_AWAY_MAX: Final = 32
WHY_CHARS_MAX: Final = 400


class TurnedAway(NamedTuple):
    """From which address, why, how often, and when last."""

    address: str
    why: str
    times: int
    last_s: float


class TurnedAwayLately:
    """Who was turned away lately; of more than `TURNED_AWAY_MAX` the latest."""

    def __init__(self) -> None:
        self._found: Heard[tuple[str, str], TurnedAway] = Heard(TURNED_AWAY_MAX)

    def note(self, address: str, why: str, now_s: float, count: int = 1) -> None:
        """So many requests from `address` were not served."""
        key = address, excerpt(why[:WHY_CHARS_MAX])
        former = self._found.get(key)
        times = count if former is None else former.times + count
        self._found.put(key, TurnedAway(*key, times, now_s))

    def lately(self, now_s: float) -> tuple[TurnedAway, ...]:
        """The latest first."""
        return tuple(one for _, one in reversed(self._found.lately(now_s)))
