# SPDX-License-Identifier: Apache-2.0
"""A submitted set of blocks with one outcome."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Generator

from te.errors import TransferFailed, WaitTimeout

__all__ = ["Status", "Transfer"]

logger = logging.getLogger(__name__)


class Status(enum.Enum):
    """Where a transfer stands; every state but ``PENDING`` is final."""

    PENDING = "pending"
    #: Every byte is visible in the destination's memory.
    DONE = "done"
    #: ``Transfer.reason`` says why. Blocks may have landed, and unless the destination itself
    #: refused the transfer, some may still: only its fence can rule that out.
    FAILED = "failed"
    #: The destination has confirmed that nothing of it will land any more.
    CANCELLED = "cancelled"


class Transfer:
    """What ``Peer.write`` returns. Any thread may call anything."""

    def __init__(
        self,
        nbytes: int,
        *,
        on_cancel: Callable[[], None],
        on_settle: Callable[[Status], None],
    ) -> None:
        """``on_cancel`` asks the rail; ``on_settle`` runs just before an outcome is visible."""
        self._nbytes = nbytes
        self._on_cancel = on_cancel
        self._on_settle = on_settle
        self._lock = threading.Lock()
        self._status = Status.PENDING
        self._reason: str | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._cancel_requested = False
        self._submitted_s = time.monotonic()
        self._settled_s: float | None = None

    def __repr__(self) -> str:
        return f"Transfer({self._nbytes} bytes, {self._status.value})"

    @property
    def nbytes(self) -> int:
        """Payload of all blocks in bytes."""
        return self._nbytes

    @property
    def reason(self) -> str | None:
        """Why it failed; None in every other state."""
        return self._reason

    @property
    def duration_s(self) -> float:
        """Seconds from submission to the outcome, or until now while there is none."""
        end_s = self._settled_s
        return (time.monotonic() if end_s is None else end_s) - self._submitted_s

    @property
    def cancel_requested(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancel_requested

    def poll(self) -> Status:
        """The state now. Reads one attribute; waits for nothing."""
        return self._status

    def wait(self, timeout_s: float) -> Status:
        """Blocks until there is an outcome and returns ``DONE`` or ``CANCELLED``.

        Raises ``te.TransferFailed`` with the reason, and ``te.WaitTimeout`` when the time is over
        (the transfer goes on).
        """
        settled = threading.Event()

        def wake(_: Transfer) -> None:
            settled.set()

        self.add_done_callback(wake)
        if not settled.wait(timeout_s):
            with self._lock:
                # Still listed unless the outcome came just now; polling waits must not pile up.
                self._callbacks = [other for other in self._callbacks if other is not wake]
            raise WaitTimeout(f"{self!r} has no outcome after {timeout_s} s")
        return self._outcome()

    def __await__(self) -> Generator[object, None, Status]:
        """Like ``wait`` without a deadline of its own (a transfer always ends: it moves on or
        stalls). Cancelling the awaiting task does not cancel the transfer."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not settled.done():
                settled.set_result(None)

        def on_done(_: Transfer) -> None:
            loop.call_soon_threadsafe(wake)

        self.add_done_callback(on_done)
        yield from settled
        return self._outcome()

    def cancel(self) -> None:
        """Asks that the transfer stop; returns at once.

        The outcome is ``CANCELLED`` once the destination has confirmed that nothing of it can
        land any more, ``DONE`` when it was too late, ``FAILED`` when no confirmation came.
        """
        with self._lock:
            if self._status is not Status.PENDING or self._cancel_requested:
                return
            self._cancel_requested = True
        self._on_cancel()

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls ``callback(self)`` once there is an outcome: now, if there is one already.

        It runs on the engine's thread, so it should be quick; what it raises is logged.
        """
        with self._lock:
            if self._status is Status.PENDING:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def settle(self, status: Status, reason: str | None = None) -> None:
        """For the transport that carries it: the outcome, exactly once."""
        self._on_settle(status)
        with self._lock:
            assert self._status is Status.PENDING, f"{self!r} already has an outcome"
            self._reason = reason
            self._settled_s = time.monotonic()
            self._status = status
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except Exception:
            # The engine's thread serves every transfer; a user's mistake must not end it.
            logger.exception("done callback %r of %r raised", callback, self)

    def _outcome(self) -> Status:
        if self._status is Status.FAILED:
            raise TransferFailed(self._reason)
        return self._status
