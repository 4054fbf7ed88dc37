# SPDX-License-Identifier: Apache-2.0
"""A thread that waits for sockets, for calls of other threads and for the time."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

__all__ = ["Loop"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 10.0


class Loop:
    """Runs callbacks one after another in a thread of its own. None of them may wait."""

    def __init__(self, name: str, period_s: float, on_time: Callable[[], None]) -> None:
        """``on_time`` is called about every ``period_s`` seconds."""
        self._poller = zmq.Poller()
        self._readers: dict[object, Callable[[], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._period_s = period_s
        self._on_time = on_time
        self._stopping = False
        self._at_end = _nothing
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __del__(self) -> None:
        """Not before: a late ``call`` must not write to what has got the number since."""
        os.close(self._wake_fd)

    def start(self, at_end: Callable[[], None]) -> None:
        """``at_end`` is the last callback."""
        self._at_end = at_end
        self._thread.start()

    def add(self, socket: zmq.Socket[bytes], on_readable: Callable[[], None]) -> None:
        """From now on ``on_readable`` is called when there is something to read. In the loop's
        thread, or before it starts."""
        self._readers[socket] = on_readable
        self._poller.register(socket, zmq.POLLIN)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Undoes ``add``. In the loop's thread."""
        self._readers.pop(socket, None)
        self._poller.unregister(socket)

    def call(self, function: Callable[[], None]) -> None:
        """Has the loop call the function soon. From any thread. After ``stop`` nothing is called
        any more."""
        self._calls.append(function)
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Ends the thread; waits for it. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} does not end")

    def _run(self) -> None:
        next_s = time.monotonic() + self._period_s
        while not self._stopping:
            wait_s = max(next_s - time.monotonic(), 0.0)
            ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
            if ready.pop(self._wake_fd, None):
                os.eventfd_read(self._wake_fd)
            while self._calls:
                self._guarded(self._calls.popleft())
            for one in ready:
                reader = self._readers.get(one)  # An earlier one may have removed it.
                if reader is not None:
                    self._guarded(reader)
            if time.monotonic() >= next_s:
                self._guarded(self._on_time)
                next_s = time.monotonic() + self._period_s
        self._guarded(self._at_end)
        # Whoever made this loop keeps it: both are freed at once, without a garbage collection.
        self._readers.clear()
        self._on_time = self._at_end = _nothing

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        """A bug in one callback ends no other."""
        try:
            function()
        except Exception:
            logger.exception("a bug in the store: %r raised", function)


def _nothing() -> None:
    """The callback of a loop that has none."""
