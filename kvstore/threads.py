# SPDX-License-Identifier: Apache-2.0
"""Threads that work until the interpreter ends, and waiting for what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from te.connect.pool import Pool

__all__ = ["Latch", "NoThread", "Threads"]

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Latch:
    """An event that comes once. Each put makes one, and ``threading.Event`` is of three objects
    that take five times as long (20 µs between other work)."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """It has come. ``RuntimeError`` if it had before."""
        self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has come within the time, which is not below 0."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        self._lock.release()
        return True


class NoThread(RuntimeError):
    """There is no thread, and none can be started: the system or a container has a limit."""


class Threads(Executor):
    """An executor that a store can use when `atexit` closes it: Python's own takes nothing any
    more by then. Its threads begin when they are needed. All methods are thread-safe."""

    def __init__(self, count: int, name: str) -> None:
        self._pool: Final = Pool(name, count)
        self._changed = threading.Condition()
        self._open: set[Future[Any]] = set()
        self._is_ended = False

    def submit(
        self, function: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Result]:
        """See ``Executor``. ``RuntimeError`` after ``shutdown``; ``NoThread``."""
        future: Future[Result] = Future()
        work = [partial(function, *args, **kwargs)]
        with self._changed:
            if self._is_ended:
                raise RuntimeError("these threads were ended")
            if not self._pool.run(lambda: self._run(future, work.pop())):
                raise NoThread("there is no thread, and none can be started")
            self._open.add(future)  # It leaves with the lock, so not before this.
        return future

    def begin(self) -> None:
        """Has a thread from now on, for who cannot do without one later. ``NoThread``."""
        self.submit(int)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See ``Executor``. Idempotent."""
        with self._changed:
            self._is_ended = True
            for one in self._open if cancel_futures else ():
                one.cancel()
            self._stop_if_done()
            if wait:
                self._changed.wait_for(lambda: not self._open)

    def _run(self, future: Future[Result], work: Callable[[], Result]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as exc:  # noqa: BLE001 - whoever waits for it gets it
                future.set_exception(exc)
            else:
                future.set_result(result)
        del work  # Nothing knows its memory any more once ``shutdown`` returns.
        with self._changed:
            self._open.remove(future)
            self._stop_if_done()
            self._changed.notify_all()

    def _stop_if_done(self) -> None:
        """With the lock."""
        if self._is_ended and not self._open:
            self._pool.stop()
