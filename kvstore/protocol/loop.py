# SPDX-License-Identifier: Apache-2.0
"""A thread that waits for sockets, for calls of other threads and for the time."""

from __future__ import annotations

import logging
import os
import select
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
    """Runs callbacks one after another in a thread of its own. None of them may wait.

    A turn costs what there is to do, however many sockets there are: ``zmq_poll`` would look at
    each of them each time (2 ms for 2,000). What the kernel tells of a ZeroMQ socket is that
    something has happened since it was used last. So whoever sends by one has to say so
    (``has_sent``): what came before that is not told any more.
    """

    def __init__(self, name: str, period_s: float, on_time: Callable[[], None]) -> None:
        """``on_time`` is called about every ``period_s`` seconds."""
        self._epoll = select.epoll()
        self._readers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        #: Sockets that may have something to read, though nobody tells of it.
        self._unsure: set[zmq.Socket[bytes]] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
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
        """From now on ``on_readable`` is called when there may be something to read, and again
        while there is. In the loop's thread, or before it starts."""
        fd = _fd_of(socket)
        self._readers[socket], self._sockets[fd] = on_readable, socket
        self._epoll.register(fd, select.EPOLLIN)
        self._unsure.add(socket)

    def has_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Something was sent by a socket that was added. In the loop's thread."""
        self._unsure.add(socket)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Undoes ``add``, before the socket is closed. In the loop's thread."""
        fd = _fd_of(socket)
        del self._readers[socket], self._sockets[fd]
        self._epoll.unregister(fd)
        self._unsure.discard(socket)

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
            self._read(self._wait(next_s))
            if time.monotonic() >= next_s:
                self._guarded(self._on_time)
                next_s = time.monotonic() + self._period_s
        self._guarded(self._at_end)
        # Whoever made this loop keeps it: both are freed at once, without a garbage collection.
        self._readers.clear()
        self._sockets.clear()
        self._epoll.close()
        self._on_time = self._at_end = _nothing

    def _wait(self, until_s: float) -> list[zmq.Socket[bytes]]:
        """For something to do; makes the calls. Which sockets may be readable."""
        left_s = 0.0 if self._unsure else max(until_s - time.monotonic(), 0.0)
        found = [fd for fd, _ in self._epoll.poll(left_s)]
        if self._wake_fd in found:
            found.remove(self._wake_fd)
            os.eventfd_read(self._wake_fd)
        while self._calls:
            self._guarded(self._calls.popleft())
        unsure, self._unsure = self._unsure, set()
        told = [self._sockets[fd] for fd in found if fd in self._sockets]  # A call may remove one.
        return [*told, *unsure.difference(told)]

    def _read(self, sockets: list[zmq.Socket[bytes]]) -> None:
        for one in sockets:
            reader = self._readers.get(one)  # An earlier one may have removed it.
            if reader is None:
                continue
            if _is_readable(one):
                self._guarded(reader)
            if one in self._readers and _is_readable(one):
                self._unsure.add(one)
            else:
                self._unsure.discard(one)

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        """A bug in one callback ends no other."""
        try:
            function()
        except Exception:
            logger.exception("a bug in the store: %r raised", function)


def _fd_of(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _nothing() -> None:
    """The callback of a loop that has none."""
