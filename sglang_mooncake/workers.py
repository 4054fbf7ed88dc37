# SPDX-License-Identifier: Apache-2.0
"""A few threads for calls that may block, and a bound on the calls that wait for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sglang_mooncake.fair_queue import FairQueue, Work

__all__ = ["Workers"]

logger = logging.getLogger(__name__)

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
        self._name, self._calls_max, self._clock = name, calls_max, clock
        self._lock = threading.Lock()
        self._queue: FairQueue[Call] = FairQueue(threads, of_one_owner or threads, calls_max)
        self._closed = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def __len__(self) -> int:
        """How many calls wait or run."""
        return len(self._queue) + self._queue.at_work

    def submit(self, call: Call, owner: str = "") -> bool:
        """Has `call(waited_s)` made in a thread, where `waited_s` is how long it waited for one:
        its budget begins now. False, and nothing is kept, when too many wait. `call` must turn what
        can go wrong into a result; what it raises in spite of that is logged with its traceback.
        """
        with self._lock:
            if len(self) >= self._calls_max:
                return False
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
        except Exception:
            logger.exception("internal error: a call in the worker threads %s raised", self._name)
        finally:
            with self._lock:
                self._queue.done(work)
                self._begin_what_may()
