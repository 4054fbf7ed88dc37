# SPDX-License-Identifier: Apache-2.0
"""A submitted set of blocks with one outcome."""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from te.core import plane
from te.core.engine import Engine as Plane
from te.core.handles import TransferHandle
from te.errors import FenceTimeout, TransferFailed, WaitTimeout
from te.reasons import Reason

__all__ = ["Notifier", "Status", "Transfer"]

logger = logging.getLogger(__name__)


class Status(enum.Enum):
    """Where a transfer stands; every state but ``PENDING`` is final."""

    PENDING = "pending"
    #: Every byte is visible in the destination's memory.
    DONE = "done"
    #: ``Transfer.reason`` says why. Blocks may have landed, and unless the destination itself
    #: refused the transfer, some may still: only its fence can rule that out.
    FAILED = "failed"
    #: Nothing of it will land any more: the destination has confirmed it.
    CANCELLED = "cancelled"


_STATUSES: Final = tuple(Status[one.name] for one in plane.Status)
"""The states by the plane's numbers."""


class Notifier:
    """Runs done callbacks, in a thread that begins with the first one that has to wait."""

    def __init__(self, name: str, plane: Plane) -> None:
        self._plane = plane
        self._name = name
        self._lock = threading.Lock()
        self._waiting: dict[int, Transfer] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self) -> None:
        """Starts the thread, unless it runs. RuntimeError when there can be no more threads; the
        next call tries again."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def watch(self, transfer: Transfer, handle: TransferHandle) -> bool:
        """True if there is an outcome; False if ``transfer.notify`` will be called, once there is a
        thread."""
        with self._lock:
            # Before it subscribes, so that a notice finds it. It also keeps the transfer alive.
            self._waiting[handle.name] = transfer
            settled = handle.subscribe()
            if settled:
                del self._waiting[handle.name]
        return settled

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after what has an outcome was told; a callback may call this."""
        self._stopping = True
        thread = self._thread
        if thread is not None:
            self._plane.wake_notices()
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping or self._waiting:
            for name in self._plane.wait_notices():
                with self._lock:
                    transfer = self._waiting.pop(name, None)
                if transfer is not None:
                    transfer.notify()


class Transfer:
    """A write or read under way, or its outcome. All methods are thread-safe."""

    def __init__(
        self,
        handle: TransferHandle,
        nbytes: int,
        notifier: Notifier,
        describe: Callable[[int, int, str], str],
    ) -> None:
        """Peers make transfers; ``describe`` makes a sentence of a failure."""
        self._handle = handle
        self._nbytes = nbytes
        self._notifier = notifier
        self._describe = describe
        self._callbacks: deque[Callable[[Transfer], None]] = deque()

    def __repr__(self) -> str:
        return f"Transfer({self._nbytes} bytes, {self.poll().value})"

    @property
    def nbytes(self) -> int:
        """Payload of all blocks in bytes."""
        return self._nbytes

    @property
    def reason(self) -> str | None:
        """Why it failed; None in every other state."""
        if self.poll() is not Status.FAILED:
            return None
        code, errnum, text = self._handle.failure()
        sentence = self._describe(code, errnum, text)
        if self._handle.cancel_requested() and code not in (
            Reason.WAS_REFUSED,
            Reason.SOURCE_FAULT,
        ):
            return f"cancelling could not be confirmed: {sentence}"
        return sentence

    @property
    def may_still_land(self) -> bool:
        """Whether pieces of a failed write may yet land at the destination. So it is unless the
        destination itself refused it, its process is gone, or the source could not be read. (Of a
        read nothing lands once ``cancel`` has returned.)"""
        if self.poll() is not Status.FAILED:
            return False
        code = self._handle.failure()[0]
        return code not in (Reason.WAS_REFUSED, Reason.PROCESS_GONE, Reason.SOURCE_FAULT)

    @property
    def duration_s(self) -> float:
        """Seconds from submission to the outcome, or until now while there is none."""
        return self._handle.duration_s()

    def poll(self) -> Status:
        """The state now, without waiting."""
        return _STATUSES[self._handle.status()]

    def wait(self, timeout_s: float) -> Status:
        """Blocks until there is an outcome and returns ``DONE`` or ``CANCELLED``.

        Raises:
            te.TransferFailed: the transfer failed; the message is the reason.
            te.WaitTimeout: there was no outcome within ``timeout_s`` seconds; the transfer goes on.
        """
        if not self._handle.wait(timeout_s):
            raise WaitTimeout(f"{self!r} has no outcome after {timeout_s} s")
        return self._outcome()

    def cancel(self) -> None:
        """Cancels the transfer.

        For a write the call returns at once. The write becomes ``CANCELLED`` once the destination
        has confirmed that nothing of it can land any more, ``DONE`` if the cancellation came too
        late, ``FAILED`` if no confirmation came.

        For a read, no confirmation of the peer is needed: when the call returns, nothing of the
        read can land any more, even if the read had failed before.

        Raises:
            te.FenceTimeout: a piece of the read did not stop landing in time. The memory must not
                be reused, and the read is not ``CANCELLED`` yet; call ``cancel`` again.
        """
        if not self._handle.cancel():
            raise FenceTimeout(
                f"{self!r}: a landing of the read did not end in time; the memory must not be"
                " reused; call cancel again"
            )

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls ``callback(self)`` once there is an outcome: now, if there is one already.

        The engine's callback thread calls it, so it should return quickly; exceptions that it
        raises are logged. Raises RuntimeError if that thread cannot be started; the callback is
        then not kept.
        """
        if self.poll() is Status.PENDING:
            self._notifier.start()
        self._callbacks.append(callback)
        if self._notifier.watch(self, self._handle):
            self.notify()

    def notify(self) -> None:
        """Called by the notifier once there is an outcome."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # Another thread took the last one.
            try:
                callback(self)
            except Exception:
                # The thread serves every transfer; a user's mistake must not end it.
                logger.exception("done callback %r of %r raised", callback, self)

    def _outcome(self) -> Status:
        status = self.poll()
        if status is Status.FAILED:
            raise TransferFailed(self.reason)
        return status
