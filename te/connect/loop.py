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
from typing import Any

from te.connect.throttle import Throttle

__all__ = ["READABLE", "IoLoop"]

logger = logging.getLogger(__name__)

READABLE = select.EPOLLIN

# A descriptor whose handler has failed, and a tick that has, are left alone for so long: most would
# fail again at once.
FAILED_PAUSE_S = 1.0


class IoLoop:
    """Runs handlers of sockets, calls from other threads and deadlines, all on its own thread.

    Handlers must not block, and must deal with the errors they expect. One that gets out is a bug,
    and is logged; whatever it was about, the others go on. ``on_end`` runs when the loop ends, so
    that nobody waits for it in vain; it gets the reason.
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
        #: The events that each descriptor is watched for; until when a descriptor is left alone.
        self._events: dict[int, int] = {}
        self._paused: dict[int, float] = {}
        self._throttle = Throttle()
        self._calls: deque[Callable[[], None]] = deque()
        # Guards the eventfd against use after close.
        self._lock = threading.Lock()
        self._stopping = False
        self._ended = False
        #: Why the loop ends or has ended.
        self.end_reason = "this engine was closed"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_wanted(self) -> bool:
        """Before ``start``: whether there is a call for its thread."""
        return bool(self._calls)

    @property
    def has_begun(self) -> bool:
        """Whether there is a thread, or was."""
        return self._thread.ident is not None

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
        self._events[fd] = events
        self._handlers[fd] = handler

    def rewatch(self, fd: int, events: int) -> None:
        """Changes what is waited for. Loop's thread only."""
        self._events[fd] = events
        if fd not in self._paused:
            self._epoll.modify(fd, events)

    def pause(self, fd: int, pause_s: float) -> None:
        """Does not look at it for a while. Loop's thread only."""
        if fd not in self._paused:
            self._epoll.unregister(fd)
        self._paused[fd] = time.monotonic() + pause_s

    def forget(self, fd: int) -> None:
        """Ends a watch; before the descriptor is closed. Loop's thread only."""
        del self._handlers[fd], self._events[fd]
        if self._paused.pop(fd, None) is None:
            self._epoll.unregister(fd)

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop and waits for its thread; False when it did not end in time."""

        def end() -> None:
            self._stopping = True

        if not self.has_begun:
            if not self._ended:
                self._stopping = True
                self._run()
            return True
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
            # Handlers may keep what they watch alive, and with it whoever made this loop.
            self._handlers.clear()
            del self._on_tick, self._on_end
            self._epoll.close()
            os.close(self._eventfd)

    def _turn(self) -> None:
        now_s = time.monotonic()
        times = [self._tick(now_s)]
        for fd, until_s in tuple(self._paused.items()):
            if now_s >= until_s:
                self._resume(fd)
        times += self._paused.values()
        next_s = min((one for one in times if one is not None), default=None)
        timeout_s = -1.0 if next_s is None else max(next_s - time.monotonic(), 0.0)
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._eventfd:
                os.eventfd_read(fd)
                continue
            # An earlier handler of this turn may have closed it.
            handler = self._handlers.get(fd)
            if handler is None or fd in self._paused:
                continue
            try:
                handler(events)
            except Exception as exc:  # noqa: BLE001 - reported; the others must go on
                self._report(f"the handler of descriptor {fd}", exc)
                if self._handlers.get(fd) is handler:
                    self.pause(fd, FAILED_PAUSE_S)
        for _ in range(len(self._calls)):
            self.guard("a call from another thread", self._calls.popleft())

    def _resume(self, fd: int) -> None:
        """Looks at it again; later if the kernel watches no more descriptors for this user."""
        del self._paused[fd]
        try:
            self._epoll.register(fd, self._events[fd])
        except OSError as exc:
            self._report(f"watching descriptor {fd} again", exc)
            self._paused[fd] = time.monotonic() + FAILED_PAUSE_S

    def guard(self, what: str, step: Callable[..., object], *arguments: Any) -> None:
        """Does one thing of several, which go on whatever becomes of it. Loop's thread only."""
        try:
            step(*arguments)
        except Exception as exc:  # noqa: BLE001 - reported; the others must go on
            self._report(what, exc)

    def _tick(self, now_s: float) -> float | None:
        try:
            return self._on_tick(now_s)
        except Exception as exc:  # noqa: BLE001 - reported; the others must go on
            self._report("a deadline", exc)
            return now_s + FAILED_PAUSE_S

    def _report(self, what: str, exc: Exception) -> None:
        if self._throttle.admits(time.monotonic()):
            text = "the thread %s goes on after a bug in %s%s"
            logger.error(text, self._thread.name, what, self._throttle.more(), exc_info=exc)
