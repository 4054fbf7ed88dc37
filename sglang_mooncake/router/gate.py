# SPDX-License-Identifier: Apache-2.0
"""Lets so many requests in at once, and has others wait for their turn (``shares.py``)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Final

from sglang_mooncake.router.shares import Shares

__all__ = ["READING_MAX", "Gate", "TurnedAway"]

#: Requests that are still being read, or about to be turned away, beside those that wait.
READING_MAX: Final = 64
#: The last waits that say how long the next one takes.
WAITS_KEPT: Final = 32


class TurnedAway(Exception):
    """The request is not served; the sentence says why. It may come again after
    ``retry_after_s``."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        super().__init__(why)
        self.retry_after_s: Final = retry_after_s


class Gate:
    """Each request that has ``entered`` ``leaves`` once."""

    def __init__(
        self,
        most: int,
        waiting_max: int,
        waiting_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``most`` may be in, ``waiting_max`` wait, each for ``waiting_s`` at most."""
        self._shares: Shares[asyncio.Future[None]] = Shares(most, waiting_max)
        self._waiting_s, self._clock = waiting_s, clock
        self._full = f"{most} requests are under way already (--max-concurrent-requests)"
        if waiting_max:
            self._full += f", and {waiting_max} before it wait for them (--queue-size)"
        #: Requests that may be there in any state.
        self.all_max: Final = most + (waiting_max + READING_MAX if waiting_max else 0)
        #: What one is told that comes when they are there.
        self.no_room = self._full
        if waiting_max:
            self.no_room = (
                f"{self.all_max} requests are under way, wait, or are still being sent"
                " (--max-concurrent-requests, --queue-size)"
            )
        #: Those that had to wait and were let in, and how long they waited in all.
        self.waited = 0
        self.waited_s = 0.0
        #: How long the last ones waited, also those who gave up then.
        self._waits_s: deque[float] = deque(maxlen=WAITS_KEPT)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._shares)

    @property
    def retry_after_s(self) -> int:
        """What one shall wait for that is not served: as long as others waited lately, who had a
        place to wait."""
        return max(1, math.ceil(fmean(self._waits_s))) if self._waits_s else 1

    async def enter(self, tenant: str, priority: int, cost: float) -> None:
        """Returns when the request is let in. ``TurnedAway`` if it is not; cancelled it is out."""
        turn = asyncio.get_running_loop().create_future()
        entry = self._shares.enter(turn, tenant, priority, cost)
        if entry.is_in:
            return
        if entry.turned_away is not None and not entry.turned_away.done():
            entry.turned_away.set_exception(TurnedAway(self._full, self.retry_after_s))
        since_s = self._clock()
        try:
            async with asyncio.timeout(self._waiting_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave()  # It was let in, and is not there any more.
            self._shares.give_up(turn)
            if isinstance(error, TimeoutError):
                self._waits_s.append(self._clock() - since_s)
                waited = f"it has waited {self._waiting_s:g} s for its turn (--queue-timeout-secs)"
                raise TurnedAway(waited, self.retry_after_s) from error
            raise
        self._waits_s.append(self._clock() - since_s)
        self.waited += 1
        self.waited_s += self._waits_s[-1]

    def leave(self) -> None:
        """One that was in has ended."""
        turn = self._shares.leave(lambda turn: not turn.done())
        if turn is not None:
            turn.set_result(None)
