# SPDX-License-Identifier: Apache-2.0
"""One transfer, as a handle of NIXL's stands for it: posted, asked after, posted again and
released."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import te
from sglang_mooncake.faces.nixl.life import Event, Life, after, check_asked
from sglang_mooncake.faces.nixl.links import Job
from sglang_mooncake.faces.nixl.names import (
    Backend,
    NotFound,
    RemoteDisconnect,
    RepostActive,
    Status,
)
from sglang_mooncake.faces.nixl.remotes import Remote
from sglang_mooncake.workers import Workers

__all__ = ["Request", "Telemetry"]

logger = logging.getLogger(__name__)

CONFIRM_TIMEOUT_S: Final = 1.0
"""How long a worker waits at once for the end of a write that nobody wants any more."""
AGAIN_S: Final = 50e-6
"""Who asks again that soon does nothing else: te's threads may need the processor, and others the
interpreter. It waits for the end instead, for `LOOK_S` at most. Of several transfers that are asked
after in turn, one is waited for."""
LOOK_S: Final = 200e-6

Announce = Callable[[bytes, Callable[[], None]], Job]
"""Makes what sends a notification, from its bytes and from what is called once it was sent, or
cannot be."""


@dataclass(frozen=True)
class Telemetry:
    """``nixlXferTelemetry``. Times are in microseconds."""

    startTime: int  # noqa: N815 - NIXL's names
    postDuration: int  # noqa: N815
    xferDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815
    backendName: str  # noqa: N815


class Request:
    """Any thread may call anything. te's thread tells it of the end, so a notification goes out
    whether or not somebody asks after the transfer."""

    def __init__(
        self,
        remote: Remote,
        workers: Workers,
        announce: Announce,
        is_read: bool,
        blocks: te.Blocks,
        count: int,
        message: bytes,
    ) -> None:
        self._remote, self._link = remote, remote.link
        self._workers, self._announce = workers, announce
        self._is_read, self._blocks = is_read, blocks
        self._count, self._message = count, message
        self._lock = threading.Lock()
        self._life: Life = Life.IDLE
        self._transfer: te.Transfer | None = None
        #: Whose end somebody deals with already.
        self._ending: te.Transfer | None = None
        self._problem = ""
        self._posted_s = self._post_s = self._took_s = 0.0
        self._asked_s = -math.inf
        self._started_us = 0

    def post(self, message: bytes) -> Status:
        """Begins it; ``message``, unless empty, is what is announced from now on.

        Raises:
            nixlRepostActiveError, nixlNotFoundError: see `life.after`; or the agent was removed.
            nixlRemoteDisconnectError: as `status`.
            nixlBackendError: see `links.Link.send`.
        """
        began_s = time.monotonic()
        if self._remote.is_removed:  # Who is told so takes it that nothing moves.
            raise self._removed()
        with self._lock:
            self._life = after(self._life, Event.POST)
            self._transfer, self._problem = None, ""
            self._message = message or self._message
            self._posted_s, self._started_us = began_s, time.time_ns() // 1000
            self._asked_s = -math.inf
        try:
            self._link.send(self)
        except Backend as exc:
            self.fail(exc)  # It can be posted again.
            raise
        self._post_s = time.monotonic() - began_s
        return self._status()

    def status(self) -> Status:
        """Where it stands; see `AGAIN_S`. A failure of which nothing moves any more is a status;
        its reason is in the log.

        Raises:
            nixlNotPostedError, nixlNotFoundError: see `life.check_asked`; or it goes on, and the
                agent was removed.
            nixlRemoteDisconnectError: it failed, and pieces of it may still land at the peer.
        """
        found, transfer = self._status(), self._transfer
        if found is Status.NIXL_IN_PROG and transfer is not None:
            if time.monotonic() < self._asked_s + AGAIN_S:
                with contextlib.suppress(te.TransferFailed, te.WaitTimeout):
                    transfer.wait(LOOK_S)
                found = self._status()
            self._asked_s = time.monotonic()
        return found

    def _status(self) -> Status:
        transfer = self._transfer
        if transfer is not None:
            self._ended(transfer)
        with self._lock:
            life, problem = self._life, self._problem
        check_asked(life)
        if life is Life.LOST:
            raise RemoteDisconnect(problem)
        if life is Life.FAILED:
            return Status.NIXL_ERR_REMOTE_DISCONNECT
        if life is Life.DONE:
            return Status.NIXL_SUCCESS
        if self._remote.is_removed:
            raise self._removed()
        return Status.NIXL_IN_PROG

    def release(self) -> None:
        """Ends it, under way or not. After it returns nothing of a read lands any more, and te
        reads the source of a write no more. Twice is harmless.

        Raises:
            nixlRepostActiveError: it has not ended yet; to be called again.
        """
        with self._lock:
            is_under_way = self._life in (Life.MOVING, Life.STOPPING)
            self._life = after(self._life, Event.STOP if is_under_way else Event.RELEASE)
            transfer = self._transfer
        if not is_under_way or transfer is None:
            return
        try:
            transfer.cancel()
        except te.FenceTimeout as exc:
            raise RepostActive(str(exc)) from exc
        if not self._is_read and transfer.poll() is te.Status.PENDING:
            raise RepostActive("the peer has not confirmed yet that the transfer was cancelled")
        with self._lock:
            self._life = Life.RELEASED

    def abandon(self) -> None:
        """Has it released, now or as soon as that can be, when nobody will ask any more."""
        if not self._later(self._release_later):
            logger.warning("nixl over te: a transfer that nobody wants any more goes on")

    def telemetry(self) -> Telemetry:
        """Of the last post."""
        post_us = max(int(self._post_s * 1e6), 1)
        took_us = max(int(self._took_s * 1e6), post_us)
        nbytes = self._blocks.total_nbytes
        return Telemetry(self._started_us, post_us, took_us, nbytes, self._count, "UCX")

    # -- a job of the link

    def begin(self, peer: te.Peer) -> None:
        """See `links.Job`."""
        with self._lock:
            if self._life is not Life.QUEUED:
                return  # Released meanwhile.
            transfer = peer.read(self._blocks) if self._is_read else peer.write(self._blocks)
            self._life = after(self._life, Event.BEGUN)
            self._transfer = transfer
        transfer.add_done_callback(self._told)

    def fail(self, problem: Exception) -> None:
        """See `links.Job`."""
        with self._lock:
            if self._life is Life.QUEUED:
                self._end(Event.FAILED, str(problem))

    # -- its end

    def _removed(self) -> NotFound:
        return NotFound(f"the agent {self._remote.name!r} was removed")

    def _told(self, transfer: te.Transfer) -> None:
        self._ended(transfer)
        if transfer.poll() is te.Status.FAILED:
            # If that was the connection: the next post finds another one, or that there is none.
            self._link.connect()
        self._link.drain()  # te has room for another one.

    def _ended(self, transfer: te.Transfer) -> None:
        """Deals with the end of this transfer, if it has ended, and once."""
        status = transfer.poll()
        with self._lock:
            if status is te.Status.PENDING or transfer in (self._ending, None):
                return
            if transfer is not self._transfer or self._life not in (Life.MOVING, Life.STOPPING):
                return
            self._took_s = time.monotonic() - self._posted_s
            self._ending = transfer
            is_wanted = self._life is Life.MOVING
            if status is te.Status.DONE and not (self._message and is_wanted):
                self._end(Event.LANDED)
                return
            if status is not te.Status.DONE and not self._is_read:
                is_lost = transfer.may_still_land
                self._end(Event.LOST if is_lost else Event.FAILED, transfer.reason or "cancelled")
                return
        if status is te.Status.DONE:
            self._tell(self._message)
        elif not self._later(self._quiet):
            self._quiet(0.0)

    def _later(self, call: Callable[[float], None]) -> bool:
        """By a worker; False if none takes it."""
        try:
            return self._workers.submit(call, self._remote.identity[0])
        except RuntimeError as exc:  # No thread can be started just now.
            logger.warning("nixl over te: %s", exc)
            return False

    def _tell(self, message: bytes) -> None:
        """The data is there; the peer hears of it, and then the caller does."""

        def told() -> None:
            with self._lock:
                self._end(Event.LANDED)

        try:
            self._link.send(self._announce(message, told))
        except Backend as exc:
            logger.warning("nixl over te: a notification was not sent: %s", exc)
            told()

    def _quiet(self, waited_s: float) -> None:  # noqa: ARG002 - the worker's
        """A read has failed: pieces may still be landing, until te has cancelled it."""
        transfer = self._ending
        if transfer is None:
            return
        reason = transfer.reason or "cancelled"
        try:
            transfer.cancel()
        except te.FenceTimeout as exc:
            logger.warning("nixl over te: %s", exc)
            if not self._later(self._quiet):
                with self._lock:
                    self._ending = None  # Who asks after it tries again.
            return
        with self._lock:
            if self._transfer is transfer:
                self._end(Event.FAILED, reason)

    def _end(self, event: Event, problem: str = "") -> None:
        """With the lock held."""
        if self._life not in (Life.QUEUED, Life.MOVING, Life.STOPPING):
            return
        is_wanted = self._life is not Life.STOPPING
        self._life = after(self._life, event)
        self._problem = problem
        if problem and is_wanted:
            what = "read" if self._is_read else "write"
            nbytes = self._blocks.total_nbytes
            logger.warning("nixl over te: a %s of %d bytes failed: %s", what, nbytes, problem)

    def _release_later(self, waited_s: float) -> None:  # noqa: ARG002 - the worker's
        try:
            self.release()
        except RepostActive:
            with self._lock:
                transfer = self._transfer
            if transfer is not None:
                with contextlib.suppress(te.TransferFailed, te.WaitTimeout):
                    transfer.wait(CONFIRM_TIMEOUT_S)
            self.abandon()
