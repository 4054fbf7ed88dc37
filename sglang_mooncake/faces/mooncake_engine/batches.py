# SPDX-License-Identifier: Apache-2.0
"""Transfers that callers submit and ask after later, by number."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import te

__all__ = ["BATCHES_MAX", "Batch", "Batches", "settle"]

logger = logging.getLogger(__name__)

BATCHES_MAX: Final = 4096
"""Submitted and not yet told of. Callers that ask after none of theirs get no more of them."""
CANCEL_TIMEOUT_S: Final = 5.0
WARN_EVERY_S: Final = 10.0


@dataclass(frozen=True)
class Batch:
    """What was submitted at once."""

    #: None if there was nothing to copy.
    transfer: te.Transfer | None
    is_read: bool
    #: From its submission on; one that takes longer is cancelled by who asks after it.
    limit_s: float
    #: Whom it is copied to or from; it knows no other process that gets the same address.
    peer: te.Peer


class Batches:
    """Any thread may call anything."""

    def __init__(self, most: int = BATCHES_MAX) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        #: None while one is being submitted.
        self._known: Final[dict[int, Batch | None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def submit(self, start: Callable[[], Batch]) -> int:
        """The number, at least 1, of what ``start`` submits. ``RuntimeError`` if there are too many
        that nobody has asked after; otherwise raises what ``start`` raises."""
        with self._lock:
            if len(self._known) >= self._most:
                raise RuntimeError(
                    f"{self._most} transfers were submitted and not asked after until they ended"
                )
            number = next(self._numbers)
            self._known[number] = None
        try:
            batch = start()
        except BaseException:
            self._take(number)
            raise
        with self._lock:
            self._known[number] = batch
        return number

    def check(self, number: int) -> te.Status:
        """Where it stands, without waiting. What was told to have ended is forgotten, and te has
        done with the caller's memory. ``CANCELLED``: it took too long.

        Raises:
            ValueError: it is not known, or was told to have ended before.
            te.TransferFailed: why it failed.
        """
        with self._lock:
            batch = self._known.get(number)
        if batch is None:
            raise _unknown(number)
        status = te.Status.DONE
        reason = None
        if batch.transfer is not None:
            status, reason = _stand(batch.transfer, batch)
        if status is not te.Status.PENDING:
            self._take(number)
        if status is te.Status.FAILED:
            raise te.TransferFailed(reason)
        return status

    def wait(self, numbers: Sequence[int]) -> None:
        """Returns when all have ended well, and forgets them all in any case; see `settle`.

        Raises:
            ValueError: one of them is not known, or was told to have ended before.
            te.TransferFailed, te.WaitTimeout: of the first that failed or took too long.
        """
        known = {number: self._take(number) for number in dict.fromkeys(numbers)}
        settle([one for one in known.values() if one is not None])
        for number, one in known.items():
            if one is None:
                raise _unknown(number)

    def _take(self, number: int) -> Batch | None:
        with self._lock:
            return self._known.pop(number, None)


def _unknown(number: int) -> ValueError:
    return ValueError(f"no transfer {number} is under way; one is told of once when it has ended")


def _stand(transfer: te.Transfer, batch: Batch) -> tuple[te.Status, str | None]:
    """``PENDING`` as long as te may still use the caller's memory, and why it failed. Cancels what
    takes too long."""
    status, reason = transfer.poll(), transfer.reason
    is_late = status is te.Status.PENDING and transfer.duration_s > batch.limit_s
    if is_late or (status is te.Status.FAILED and batch.is_read):
        try:
            transfer.cancel()  # Of a failed read pieces may still have been landing.
        except te.FenceTimeout as exc:
            logger.warning("mooncake.engine over te: %s", exc)
            return te.Status.PENDING, None
        status = transfer.poll()
        reason = reason or transfer.reason
    return status, reason


def settle(batches: Sequence[Batch], clock: Callable[[], float] = time.monotonic) -> None:
    """Returns when the bytes of all are there. It returns or raises once te has done with the
    caller's memory of each, however long that takes: who is told of a failure uses it again.

    Raises:
        te.TransferFailed, te.WaitTimeout: of the first that failed or took too long.
    """
    failed = [one for batch in batches if (one := _failure(batch)) is not None]
    _let_go(failed, clock)
    for one in failed:
        if one.transfer.poll() is not te.Status.DONE:
            raise one.problem


@dataclass(frozen=True)
class _Failure:
    batch: Batch
    transfer: te.Transfer
    problem: te.Error


def _failure(batch: Batch) -> _Failure | None:
    """Waits for its end."""
    transfer = batch.transfer
    if transfer is None:
        return None
    try:
        transfer.wait(max(batch.limit_s - transfer.duration_s, 0.0))
    except (te.TransferFailed, te.WaitTimeout) as exc:
        return _Failure(batch, transfer, exc)
    return None


def _let_go(failed: list[_Failure], clock: Callable[[], float]) -> None:
    """Returns once te has done with the caller's memory of each. Closes the connections of those
    that it has not done with in time, which ends what goes on there; the next call connects
    anew."""
    next_s = clock()
    while failed := _in_use(failed, clock):
        for one in failed:
            one.batch.peer.close()
        if clock() < next_s:
            continue
        next_s = clock() + WARN_EVERY_S
        logger.warning(
            "mooncake.engine over te: waiting until te has done with %d bytes of memory of %d"
            " transfers that were cancelled; of the first: %s",
            sum(one.transfer.nbytes for one in failed),
            len(failed),
            str(failed[0].problem),  # A log that keeps exceptions would keep the engine.
        )


def _in_use(failed: Sequence[_Failure], clock: Callable[[], float]) -> list[_Failure]:
    """Cancels all of them, then waits; those whose memory te may still use."""
    cancelled = [(one, _cancels(one.transfer)) for one in failed]
    until_s = clock() + CANCEL_TIMEOUT_S
    return [
        one
        for one, has_stopped in cancelled
        if not has_stopped or not (one.batch.is_read or _ends(one.transfer, until_s - clock()))
    ]


def _cancels(transfer: te.Transfer) -> bool:
    """Whether nothing of it lands any more, if it is a read."""
    try:
        transfer.cancel()
    except te.FenceTimeout:
        return False
    return True


def _ends(transfer: te.Transfer, timeout_s: float) -> bool:
    """Whether it has an outcome in time."""
    try:
        transfer.wait(max(timeout_s, 0.0))
    except te.WaitTimeout:
        return False
    except te.TransferFailed:
        return True
    return True
