# SPDX-License-Identifier: Apache-2.0
"""How long the owner of a host lives, whose memory it takes over, and when a process that cannot
reach one tries again. Pure: time is passed in."""

from __future__ import annotations

import math
from typing import Final

__all__ = [
    "ADOPTION_S",
    "ENDED_S",
    "ENDING_S",
    "FIRST_USE_S",
    "GIVEN_WAY_S",
    "PAUSE_S",
    "UNTAKEN_S",
    "Adoption",
    "Attempts",
    "HoldOff",
    "Presence",
]

ADOPTION_S: Final = 2.0
"""So long a new owner waits for somebody who holds the memory of the last one. Those who do notice
its end at once, and come within milliseconds of the new one's start; longer is waited only for
those who have ended, too."""

FIRST_USE_S: Final = 60.0
"""So long an owner waits at least for the one that has started it."""

ENDING_S: Final = 50.0
"""So long an owner takes to end at most: it ends its lines, writes what lies in memory alone to a
disk, and ends its engine, which may take 35 s. A process that has not ended by then ends itself,
whatever keeps it."""
GIVEN_WAY_S: Final = ENDING_S + 10.0
"""So long an owner that gives way to another is waited for, and so long at most others start none
behind one that has given way: the next one waits for the lock."""
ENDED_S: Final = 10.0
"""So long processes start no owner behind an operator's that has ended: most are started again."""

RUSH_S: Final = 2.0
"""So long after an owner's end it is looked for all the time."""
RUSH_PAUSE_S: Final = 0.02
PAUSE_S: Final = 1.0
PAUSE_S_MAX: Final = 10.0
AWAITED_PAUSE_S: Final = ADOPTION_S / 4
"""So long at most pauses one that a new owner waits for, that has started one, or that an owner has
given way to."""
UNTAKEN_S: Final = 4 * AWAITED_PAUSE_S
"""So long nobody may have had the host's lock until others start an owner, too: the one that the
last owner has given way to could start none."""


class Presence:
    """Who uses an owner, and when it ends."""

    def __init__(self, linger_s: float, now_s: float) -> None:
        """``linger_s``: so long it stays when nobody uses it; ``math.inf``: for ever."""
        self._linger_s = linger_s
        self._users: set[int] = set()
        self._is_used = False
        self._alone_since_s = now_s

    def __len__(self) -> int:
        return len(self._users)

    def came(self, user: int) -> None:
        """Somebody uses it."""
        self._users.add(user)
        self._is_used = True

    def went(self, user: int, now_s: float) -> None:
        """Somebody does not use it any more; nothing if he never did."""
        if user in self._users:
            self._users.remove(user)
            if not self._users:
                self._alone_since_s = now_s

    def left_s(self, now_s: float) -> float:
        """Seconds until it ends if nobody comes; 0.0: it ends now."""
        if self._users:
            return math.inf
        linger_s = self._linger_s if self._is_used else max(self._linger_s, FIRST_USE_S)
        return max(self._alone_since_s + linger_s - now_s, 0.0)


class Adoption:
    """Which memory a new owner takes: that of the last one, if somebody brings it in time."""

    def __init__(self, last: str, now_s: float) -> None:
        """``last``: the name of the memory that was there; empty if there was none, or the last
        owner has ended by itself."""
        self._last = last
        self._until_s = now_s + ADOPTION_S if last else now_s

    def wants(self, memory: str) -> bool:
        """Whether somebody brings what is waited for, by its name."""
        return bool(memory) and memory == self._last

    def took(self) -> None:
        """It is there."""
        self._last, self._until_s = "", -math.inf

    def left_s(self, now_s: float) -> float:
        """Seconds to wait; 0.0: no longer."""
        return max(self._until_s - now_s, 0.0)


class HoldOff:
    """Whether a process may start an owner behind one that has ended on purpose: its operator does,
    or the process that it has given way to."""

    def __init__(self) -> None:
        self._until_s = -math.inf
        #: Since when the lock has been free, as far as is known; None behind an operator's owner.
        self._free_s: float | None = None

    def end(self) -> None:
        """This process is the one that is to start it."""
        self._until_s = -math.inf

    def ended(self, now_s: float) -> None:
        """An operator's owner has."""
        self._until_s, self._free_s = now_s + ENDED_S, None

    def gave_way(self, now_s: float) -> None:
        """An owner has, to another process."""
        self._until_s, self._free_s = now_s + GIVEN_WAY_S, math.inf

    def is_over(self, now_s: float, *, is_free: bool) -> bool:
        """``is_free``: whether nobody has the host's lock now; to be told with each look."""
        if self._free_s is not None:
            self._free_s = min(self._free_s, now_s) if is_free else math.inf
            if now_s - self._free_s >= UNTAKEN_S:
                return True
        return now_s >= self._until_s


class Attempts:
    """When a process that lost the owner, or never reached it, tries again: all the time at first,
    then each second, then less and less often, unless a new owner would wait for it."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._pause_s = PAUSE_S

    def refused(self) -> None:
        """An owner is there, and wants nothing of this process: that does not change soon."""
        self._since_s = -math.inf

    def pause_s(self, now_s: float, *, is_awaited: bool = False) -> float:
        """To wait before the next attempt; this one has failed. ``is_awaited``: this process has
        the memory of the last owner, or has started the next one."""
        if now_s - self._since_s < RUSH_S:
            return RUSH_PAUSE_S
        if is_awaited:
            return AWAITED_PAUSE_S
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, PAUSE_S_MAX)
        return pause_s
