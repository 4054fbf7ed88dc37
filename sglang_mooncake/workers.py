# SPDX-License-Identifier: Apache-2.0
"""A few threads for calls that may block, and a bound on the calls that wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sglang_mooncake.fair_queue import FairQueue, Work

__all__ = ["Workers"]

Call = Callable[[float], None]


class Workers:
    """Any thread may call; `submit` never waits.

    Args:
        name: of the threads, as tools show them.
        threads: how many calls run at a time.
        calls_max: how many may wait, with those that run.
        of_one_owner: how many run at a time for one owner (default: no limit).
    """

    def __init__(
        self,
        name: str,
        threads: int,
        calls_max: int,
        of_one_owner: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls_max, self._clock = calls_max, clock
        self._lock = threading.Lock()
        self._queue: FairQueue[Call] = FairQueue(threads, of_one_owner or threads, calls_max)
        self._calls = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def __len__(self) -> int:
        """How many calls wait or run."""
        return self._calls

    def submit(self, call: Call, owner: str = "") -> bool:
        """Has `call(waited_s)` made in a thread, where `waited_s` is how long it waited for one:
        its budget begins now. False, and nothing is kept, when too many wait. `call` must raise
        nothing.
        """
        with self._lock:
            if self._calls >= self._calls_max:
                return False
            self._calls += 1
            self._queue.add(owner, call, self._clock())
            self._begin_what_may()
        return True

    def close(self) -> None:
        """Begins no further call. Idempotent."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin_what_may(self) -> None:
        while not self._closed and (work := self._queue.take()) is not None:
            self._threads.submit(self._run, work)

    def _run(self, work: Work[Call]) -> None:
        try:
            work.item(self._clock() - work.queued_s)
        finally:
            with self._lock:
                self._calls -= 1
                self._queue.done(work)
                self._begin_what_may()
