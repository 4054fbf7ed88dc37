# SPDX-License-Identifier: Apache-2.0
"""Tasks of LMCache's controllers: done in a thread, told by an event file descriptor."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

__all__ = ["Lane", "Results"]

logger = logging.getLogger(__name__)

TASKS_MAX: Final = 1024
"""Tasks that wait; each holds objects of LMCache's. More fail at once."""
RESULTS_MAX: Final = 65_536
"""Results that nobody has asked for. With more, the oldest is forgotten."""

Work = TypeVar("Work")
Result = TypeVar("Result")


class Results(Generic[Result]):
    """Results of tasks by number, each of which can be taken once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, Result] = {}
        self._notifier = create_event_notifier()
        self._closed = False

    @property
    def event_fd(self) -> int:
        """Readable when there are results."""
        return int(self._notifier.fileno())

    def put(self, task: int, result: Result) -> None:
        """Has no effect after ``close``."""
        with self._lock:
            if self._closed:
                return
            self._found[task] = result
            if len(self._found) > RESULTS_MAX:
                del self._found[next(iter(self._found))]
            self._notifier.notify()

    def take(self, task: int) -> Result | None:
        """None while the task is not done, and after it was taken."""
        with self._lock:
            return self._found.pop(task, None)

    def take_all(self) -> dict[int, Result]:
        """All that there are, by task."""
        with self._lock:
            found, self._found = self._found, {}
        return found

    def close(self) -> None:
        """Closes the event file descriptor. Idempotent."""
        with self._lock:
            self._closed = True
            self._notifier.close()


class Lane(Generic[Work, Result]):
    """Tasks of one kind, done one after the other in a thread of their own."""

    def __init__(
        self,
        name: str,
        do: Callable[[Work], Result | None],
        failed: Callable[[Work], Result | None],
    ) -> None:
        """``do`` has the result of a task, ``failed`` that of one that was not done, or that
        raised; None is never told."""
        self.results: Results[Result] = Results()
        self._do, self._failed = do, failed
        self._waiting: queue.Queue[tuple[int, Work] | None] = queue.Queue(TASKS_MAX)
        self._gate = threading.Lock()
        self._closed = False
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"store-{name}", daemon=True)
        self._thread.start()

    def submit(self, task: int, work: Work) -> None:
        """Queues it; never blocks."""
        with self._gate:
            is_taken = not self._closed and not self._waiting.full()
            if is_taken:
                self._waiting.put_nowait((task, work))
        if not is_taken:
            logger.warning("a %s is refused: %d wait already", self._name, self._waiting.qsize())
            self._tell(task, self._failed(work))

    def close(self, timeout_s: float) -> None:
        """Waits for the task under way; those that wait fail. Idempotent. ``TimeoutError`` if it
        takes longer."""
        with self._gate:
            self._closed = True
            left = self._drop()
            self._waiting.put_nowait(None)
        for task, work in left:
            self._tell(task, self._failed(work))
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"a {self._name} has not ended for {timeout_s:g} s")
        self.results.close()

    def _drop(self) -> list[tuple[int, Work]]:
        """Empties the queue."""
        left = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (one := self._waiting.get_nowait()) is not None:
                    left.append(one)
        return left

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            task, work = one
            try:
                result = self._do(work)
            except Exception:
                logger.exception("a %s failed", self._name)
                result = self._failed(work)
            self._tell(task, result)

    def _tell(self, task: int, result: Result | None) -> None:
        if result is not None:
            self.results.put(task, result)
