# SPDX-License-Identifier: Apache-2.0
"""One thread that waits for many sockets."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["READABLE", "WRITABLE", "IoLoop"]

logger = logging.getLogger(__name__)

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT


class IoLoop:
    """Runs handlers of sockets, calls from other threads and deadlines, all on its own thread.

    Handlers must not block, and must deal with the errors they expect: one that gets out is a
    bug, is logged, and ends the loop (``on_end`` runs, so that nobody waits for it in vain; it
    gets the reason).
    """

    def __init__(
        self,
        name: str,
        on_tick: Callable[[float], float | None],
        on_end: Callable[[str], None],
    ) -> None:
        """``on_tick`` gets ``time.monotonic()`` and returns the next time it wants to be called,
        or None. ``on_end`` is the last thing the thread does."""
        self._on_tick = on_tick
        self._on_end = on_end
        self._epoll = select.epoll()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._eventfd, READABLE)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        # Guards the eventfd against use after close.
        self._lock = threading.Lock()
        self._stopping = False
        self._ended = False
        #: Why the loop ends or has ended.
        self.end_reason = "this engine was closed"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> bool:
        """Has ``function`` run on the loop's thread soon; False if the loop has ended. Any
        thread."""
        with self._lock:
            if self._ended:
                return False
            self._calls.append(function)
            os.eventfd_write(self._eventfd, 1)
            return True

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Calls ``handler(ready events)`` whenever ``fd`` is ready. Loop's thread only."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def rewatch(self, fd: int, events: int) -> None:
        """Changes what is waited for. Loop's thread only."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Ends a watch; before the descriptor is closed. Loop's thread only."""
        self._epoll.unregister(fd)
        del self._handlers[fd]

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop and waits for its thread; False when it did not end in time."""

        def end() -> None:
            self._stopping = True

        self.call(end)
        if threading.current_thread() is self._thread:
            return True  # A done callback closes the engine: the loop ends after it.
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as exc:
            self.end_reason = f"the thread {self._thread.name} ended by a bug: {exc!r}"
            logger.critical("%s", self.end_reason)
            raise
        finally:
            with self._lock:
                self._ended = True
            self._on_end(self.end_reason)
            self._epoll.close()
            os.close(self._eventfd)

    def _turn(self) -> None:
        next_s = self._on_tick(time.monotonic())
        timeout_s = -1.0 if next_s is None else max(next_s - time.monotonic(), 0.0)
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._eventfd:
                os.eventfd_read(fd)
                continue
            # An earlier handler of this turn may have closed it.
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)
        for _ in range(len(self._calls)):
            self._calls.popleft()()
