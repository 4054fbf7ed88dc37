# SPDX-License-Identifier: Apache-2.0
"""Clients that ask a server again and again, beside what happens to it meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

import aiohttp
from cpu_serving.traffic import Request, run, send

from soak_run.results import Asked

__all__ = ["Clients"]

PAUSE_S: Final = 0.2
"""After a failure, as a client would."""
GRACE_S: Final = 30.0


class Clients:
    """In a thread of their own; a context manager, in which they ask. What they have asked by its
    end still ends, or hangs."""

    def __init__(
        self, url: str, requests: Sequence[Request], clients: int, deadline_s: float, seed: int
    ) -> None:
        self._url, self._requests = url, requests
        self._clients, self._deadline_s, self._seed = clients, deadline_s, seed
        self._stopping = threading.Event()
        self._asked: list[Asked] = []
        self._thread = ThreadPoolExecutor(1, "soak-clients")

    def __enter__(self) -> Self:
        # Each request has a time limit of its own.
        self._ended = self._thread.submit(run, self._ask_all, 2 * self._deadline_s)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._ended.result(self._deadline_s + GRACE_S)
        self._thread.shutdown()

    @property
    def asked(self) -> list[Asked]:
        """What has ended until now."""
        return list(self._asked)

    async def _ask_all(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(self._clients):
                group.create_task(self._ask(session, random.Random(self._seed * 1000 + n)))

    async def _ask(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        """All prompts come before any comes again."""
        deck: list[int] = []
        while not self._stopping.is_set():
            deck = deck or rng.sample(range(len(self._requests)), len(self._requests))
            number, began_s, answer = deck.pop(), time.monotonic(), None
            try:
                answer = await asyncio.wait_for(
                    send(session, self._url, self._requests[number]), self._deadline_s
                )
            except TimeoutError:
                answer = None
            self._asked.append(Asked(number, began_s, time.monotonic(), answer))
            if answer is None or answer.error is not None:
                await asyncio.sleep(PAUSE_S)
