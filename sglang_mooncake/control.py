# SPDX-License-Identifier: Apache-2.0
"""The one thread of a manager that decides: it takes stimuli from the scheduler, from peers, from
the engine and from the clock, one at a time, and is the only one that changes rooms and uses zmq
sockets. What may block (HTTP, connecting) runs in threads of others (`workers.py`), which post what
comes of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

__all__ = ["ControlLoop", "Handler"]

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_CLOSE_TIMEOUT_S = 5.0
#: A link takes three sockets, of which zmq allows 1,023 unless told otherwise: a decode rank could
#: not reach its 342nd prefill rank. This is the most that zmq has (ZMQ_SOCKET_LIMIT).
_ZMQ_SOCKETS_MAX = 65_535

# Calls on a non-blocking eventfd cannot block, so they keep the interpreter lock (PyDLL): those of
# os would release it, and beside a busy thread wait up to 5 ms to get it back, in the middle of the
# scheduler's send(); in the loop that was 0.15 ms of the 1.2 from a request to a ready peer.
_eventfd_write = ctypes.PyDLL(None, use_errno=True).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_eventfd_write.restype = ctypes.c_int
_eventfd_read = ctypes.PyDLL(None, use_errno=True).eventfd_read
_eventfd_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_eventfd_read.restype = ctypes.c_int


class Handler(Protocol):
    """The side (prefill or decode) that the loop works for. Every call is made on the loop thread
    (`started` first, `stopped` last), none may block."""

    def started(self, loop: ControlLoop) -> None: ...
    def on_stimulus(self, stimulus: Any, now_s: float) -> None: ...
    def on_tick(self, now_s: float) -> None: ...
    def stopped(self) -> None: ...


class ControlLoop:
    """Runs a `Handler`. `post` may be called from any thread, costs about a microsecond and never
    waits."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.zmq_context = zmq.Context(io_threads=1)
        self.zmq_context.set(zmq.MAX_SOCKETS, _ZMQ_SOCKETS_MAX)
        self._handler = handler
        self._inbox: deque[Any] = deque()
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Once nobody has the loop any more: who wakes it up late must not write to a number that is
        # somebody else's by then.
        weakref.finalize(self, os.close, self._eventfd).atexit = False
        self._signalled = False
        self._stopping = threading.Event()
        self._poller = zmq.Poller()
        self._poller.register(self._eventfd, zmq.POLLIN)
        self._readers: dict[Any, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, stimulus: Any) -> None:
        """Hands a stimulus to the handler, in the order of the calls."""
        self._inbox.append(stimulus)
        self.wake()

    def leave(self, stimulus: Any) -> None:
        """The same without a system call: the caller promises a `wake()` soon. Without one the loop
        finds the stimulus at its next tick."""
        self._inbox.append(stimulus)

    def wake(self) -> None:
        """Has the loop take in what it was left. Costs nothing when there is nothing new."""
        if self._inbox and not self._signalled:
            self._signalled = True
            _eventfd_write(self._eventfd, 1)

    def add_reader(self, socket: zmq.Socket[bytes], readable: Callable[[], None]) -> None:
        self._readers[socket] = readable
        self._poller.register(socket, zmq.POLLIN)

    def remove_reader(self, socket: zmq.Socket[bytes]) -> None:
        del self._readers[socket]
        self._poller.unregister(socket)

    def close(self) -> None:
        """Ends the thread and its sockets. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        _eventfd_write(self._eventfd, 1)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        elif self._thread.ident is None:
            self.zmq_context.destroy(linger=0)  # never started: nobody else will

    def _run(self) -> None:
        try:
            self._handler.started(self)
            next_tick_s, counter = time.monotonic(), ctypes.c_uint64()
            while not self._stopping.is_set():
                wait_ms = max(0, int((next_tick_s - time.monotonic()) * 1000) + 1)
                ready = dict(self._poller.poll(wait_ms))
                if self._eventfd in ready:
                    _eventfd_read(self._eventfd, ctypes.byref(counter))
                self._signalled = False  # before the inbox is emptied: a later post signals again
                for socket in ready:
                    if socket in self._readers:  # a former reader may have removed this one
                        self._guard(self._readers[socket])
                self._empty_inbox()
                if time.monotonic() >= next_tick_s:
                    self._guard(lambda: self._handler.on_tick(time.monotonic()))
                    next_tick_s = time.monotonic() + _TICK_S
        finally:
            self._handler.stopped()
            self.zmq_context.destroy(linger=0)

    def _empty_inbox(self) -> None:
        while self._inbox:
            stimulus = self._inbox.popleft()
            self._guard(lambda: self._handler.on_stimulus(stimulus, time.monotonic()))  # noqa: B023

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # The loop serves every room of this rank: it must outlive a bug in one of them. Nothing
            # is hidden: the traceback is logged, and the rooms concerned run into their deadlines.
            logger.exception("unexpected error in the control loop of the KV-cache hand-over")
