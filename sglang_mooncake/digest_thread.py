# SPDX-License-Identifier: Apache-2.0
"""The thread that makes digests: jobs take turns in it, so that a request of gigabytes keeps none
of a few pages waiting."""

from __future__ import annotations

import enum
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["JOBS_MAX", "DigestThread", "Job", "Looks", "Pause"]

logger = logging.getLogger(__name__)

#: Between two looks whether something has landed; it grows from the first to the second.
_PAUSE_MIN_S, _PAUSE_MAX_S = 1e-4, 1e-3
#: A look takes some microseconds for each job that waits, of the interpreter that the scheduler
#: shares: so many times as long nobody looks, up to what a request may wait for that.
_PAUSE_OF_LOOKS, _PAUSE_OF_LOOKS_MAX_S = 9, 0.02
_CLOSE_TIMEOUT_S = 5.0
#: As many as a decode rank has open rooms × sources: beyond that, some are of rooms that are over,
#: and the thread hangs or is far behind.
JOBS_MAX = 16_384


class Pause(enum.Enum):
    """Why a job stops."""

    #: What it is about is not here yet.
    NOT_YET = enum.auto()
    #: It has done its piece, and has more.
    OTHERS_TURN = enum.auto()


#: It does a piece of bounded time, and pauses.
Job = Iterator[Pause]


@dataclass(slots=True)
class Looks:
    """When to look again at the jobs that wait. Pure.

    due_s: on the caller's clock.
    """

    due_s: float = math.inf
    _pause_s: float = _PAUSE_MIN_S
    _owed_s: float = -math.inf

    def came(self, now_s: float) -> None:
        """One more has to wait, which most do for a moment."""
        self._pause_s = _PAUSE_MIN_S
        self.due_s = max(min(self.due_s, now_s + _PAUSE_MIN_S), self._owed_s)

    def looked(self, now_s: float, spent_s: float) -> None:
        """spent_s: processor time for those that have to wait still."""
        self._pause_s = min(self._pause_s * 1.1, _PAUSE_MAX_S)
        self._owed_s = now_s + min(_PAUSE_OF_LOOKS * spent_s, _PAUSE_OF_LOOKS_MAX_S)
        self.due_s = max(now_s + self._pause_s, self._owed_s)


class DigestThread:
    """A piece of each job in turn, in the order in which they came; those for which something is
    not here yet are looked at beside it. A room has one for each of its peers, and one more where a
    decode rank has answered that what it has differs."""

    def __init__(self, name: str) -> None:
        # No SimpleQueue: it may wait for ever with a short time-out (see `gpu_events.py`).
        self._new: queue.Queue[Job | None] = queue.Queue()
        self._at_work: deque[Job] = deque()
        self._waiting: list[Job] = []
        self._places = threading.BoundedSemaphore(JOBS_MAX)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, job: Job) -> str | None:
        """Has the job go on until it is over; or says why it cannot, as there are too many."""
        if not self._places.acquire(blocking=False):
            return f"{JOBS_MAX} digests wait already: the thread that makes them hangs or is behind"
        self._new.put(job)
        return None

    def close(self) -> None:
        """Ends the thread, behind the piece that goes on. Idempotent."""
        self._new.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        looks = Looks()
        while self._take(looks.due_s):
            now_s = time.monotonic()
            if self._waiting and now_s >= looks.due_s:
                spent_s = self._look()
                looks.looked(time.monotonic(), spent_s)
            elif self._at_work:
                job = self._at_work.popleft()
                pause = self._go_on(job)
                if pause is Pause.OTHERS_TURN:
                    self._at_work.append(job)
                elif pause is Pause.NOT_YET:
                    self._waiting.append(job)
                    looks.came(time.monotonic())

    def _take(self, due_s: float) -> bool:
        """Waits until there is something to do. False: the thread is to end."""
        timeout_s = max(due_s - time.monotonic(), 0.0) if self._waiting else None
        try:
            while True:
                job = self._new.get_nowait() if self._at_work else self._new.get(timeout=timeout_s)
                if job is None:
                    return False
                self._at_work.append(job)
        except queue.Empty:
            return True

    def _look(self) -> float:
        """At those that wait. Returns the processor time for those that have to wait still."""
        jobs, self._waiting, spent_s = self._waiting, [], 0.0
        for job in jobs:
            began_s = time.thread_time()
            pause = self._go_on(job)
            if pause is Pause.NOT_YET:
                self._waiting.append(job)
                spent_s += time.thread_time() - began_s
            elif pause is Pause.OTHERS_TURN:
                self._at_work.append(job)
        return spent_s

    def _go_on(self, job: Job) -> Pause | None:
        """None: it is over."""
        pause = None
        try:
            pause = next(job, None)
        except Exception:  # its room ends by a deadline, on either side
            logger.exception("internal error: a digest could not be made")
        if pause is None:
            self._places.release()
        return pause
