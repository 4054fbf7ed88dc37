# SPDX-License-Identifier: Apache-2.0
"""Requests that wait until an instance is ready, instead of asking again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bootstrap_server.ranks.errors import RegistryFull

__all__ = ["WAITERS_MAX", "WAIT_MAX_S", "Waiting"]

#: Longest wait of one request; a client that wants to wait longer asks again.
WAIT_MAX_S: Final = 60.0
#: A waiting request costs about 20 kB.
WAITERS_MAX: Final = 4096


@dataclass
class _Waiters:
    """Who waits for one instance."""

    number: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Waiting:
    """Lets coroutines of one event loop wait for news of instances, by name."""

    def __init__(self) -> None:
        self._waiters: dict[str, _Waiters] = {}
        self._closed = False

    def __len__(self) -> int:
        """How many wait."""
        return sum(waiters.number for waiters in self._waiters.values())

    def wake(self, name: str) -> None:
        """There is news of the instance."""
        waiters = self._waiters.get(name)
        if waiters is not None:
            waiters.news.set()
            waiters.news = asyncio.Event()

    def close(self) -> None:
        """Nobody waits any longer, now and later: the server shuts down."""
        self._closed = True
        for name in self._waiters:
            self.wake(name)

    async def until(self, name: str, is_there: Callable[[], bool], wait_s: float) -> None:
        """Return when `is_there()`, asked after each news, or after `wait_s` seconds.

        Raises `RegistryFull` when too many wait already.
        """
        if len(self) >= WAITERS_MAX:
            raise RegistryFull(
                f"{WAITERS_MAX} requests are waiting already, which is the limit: send this one "
                "without wait_s"
            )
        waiters = self._waiters.setdefault(name, _Waiters())
        waiters.number += 1
        try:
            async with asyncio.timeout(wait_s):
                while not (self._closed or is_there()):
                    await waiters.news.wait()
        except TimeoutError:
            return  # the caller says what is missing
        finally:
            waiters.number -= 1
            if waiters.number == 0:
                del self._waiters[name]
