# SPDX-License-Identifier: Apache-2.0
"""The way to one other agent's engine. Connecting may take seconds and happens in the background:
what is sent meanwhile waits here, in order, as does what te's queue for the peer has no room for.
A connection that was lost is made anew with the next thing that is sent, and nobody has to ask."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Final, Protocol

import te
from sglang_mooncake.faces.nixl.names import Backend
from sglang_mooncake.workers import Workers

__all__ = ["WAITING_MAX", "Job", "Link"]

logger = logging.getLogger(__name__)

WAITING_MAX: Final = 1 << 16
"""NIXL has no limit: this one is for callers who never look at what they post."""


class Job(Protocol):
    """What is sent over a link."""

    def begin(self, peer: te.Peer) -> None:
        """Gives it to te, unless nobody wants it any more. ``te.QueueFull``: it is to be tried
        again once another has ended; ``te.ConnectError``: with another peer, as this one has ended;
        any other exception is its end."""

    def fail(self, problem: Exception) -> None:
        """It was not given to te, and will not be."""


class Link:
    """Any thread may call anything, and no call waits."""

    def __init__(self, engine: te.Engine, card: bytes, workers: Workers) -> None:
        self._engine, self._workers = engine, workers
        #: The engine's, as it was told last.
        self.card = card
        self._lock = threading.Lock()
        self._peer: te.Peer | None = None
        self._problem: Exception | None = None
        self._is_connecting = False
        self._waiting: deque[Job] = deque()
        #: One thread at a time hands over what waits; whoever wants it done meanwhile says so.
        self._is_draining = self._is_wanted = False

    @property
    def problem(self) -> Exception | None:
        """Why the last attempt to connect failed; None if it did not, or none has ended."""
        return self._problem

    def send(self, job: Job) -> None:
        """``nixlBackendError`` if too much waits; else the job hears what becomes of it."""
        with self._lock:
            if len(self._waiting) >= WAITING_MAX:
                raise Backend(f"{WAITING_MAX} transfers wait for this peer already")
            self._waiting.append(job)
        self.drain()

    def connect(self) -> None:
        """Begins to, unless it is connected or being connected."""
        with self._lock:
            stands = self._peer is not None and self._peer.alive
            if stands or self._is_connecting:
                return
            self._is_connecting = True
        try:
            accepted = self._workers.submit(self._connect)
        except RuntimeError as exc:  # No thread can be started just now.
            self._connected(None, Backend(str(exc)))
            return
        if not accepted:
            self._connected(None, Backend("too many connections are being made at once"))

    def drain(self) -> None:
        """Something waits, or te has room again."""
        with self._lock:
            self._is_wanted = True
            if self._is_draining:
                return
            self._is_draining = True
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        """One look at what waits; False once nobody has asked for another one."""
        with self._lock:
            if not self._is_wanted:
                self._is_draining = False
                return False
            self._is_wanted = False
            peer, is_empty = self._peer, not self._waiting
        if is_empty:
            return True
        if peer is None or not peer.alive:
            self.connect()
            return True
        while (job := self._next(peer)) is not None:
            try:
                job.begin(peer)
            except te.QueueFull:
                with self._lock:
                    self._waiting.appendleft(job)
                return True
            except te.ConnectError as exc:
                if peer.alive:
                    job.fail(exc)
                    continue
                with self._lock:  # It ended just now and got nothing: for the next connection.
                    self._waiting.appendleft(job)
                    self._is_wanted = True
                return True
            except Exception as exc:  # noqa: BLE001 - the job's, and told to it
                job.fail(exc)
        return True

    def _next(self, peer: te.Peer) -> Job | None:
        """What waits, for a peer that stands. One that has gone meanwhile gets nothing more: this
        thread may have stood still since it last looked."""
        with self._lock:
            if not self._waiting:
                return None
            if not peer.alive:
                self._is_wanted = True
                return None
            return self._waiting.popleft()

    def _connect(self, waited_s: float) -> None:  # noqa: ARG002 - the worker's
        try:
            self._connected(self._engine.connect(self.card), None)
        except Exception as exc:  # noqa: BLE001 - told to all that wait
            self._connected(None, exc)

    def _connected(self, peer: te.Peer | None, problem: Exception | None) -> None:
        failed: list[Job] = []
        with self._lock:
            self._is_connecting = False
            self._peer, self._problem = peer, problem
            if problem is not None:
                failed = list(self._waiting)
                self._waiting.clear()
        if problem is not None:
            logger.warning("nixl over te: an agent cannot be connected to: %s", problem)
        for job in failed:
            if problem is not None:
                job.fail(problem)
        self.drain()
