# SPDX-License-Identifier: Apache-2.0
"""Transfers that callers submit and ask after later, by number."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import te
from sglang_mooncake.faces.in_use import MemoryInUse

__all__ = ["BATCHES_MAX", "Batch", "Batches", "settle"]

logger = logging.getLogger(__name__)

BATCHES_MAX: Final = 4096
"""Submitted and not yet told of. Callers that ask after none of theirs get no more of them."""
CANCEL_TIMEOUT_S: Final = 5.0


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
        """Returns when all have ended well. te has done with the memory of each, and they are
        forgotten, unless it raises `MemoryInUse`.

        Raises:
            MemoryInUse: of some te has not; these can be asked after again.
            ValueError: one of them is not known, or was told to have ended before.
            te.TransferFailed, te.WaitTimeout: of the first that failed or took too long.
        """
        problem: Exception | None = None
        in_use: MemoryInUse | None = None
        for number in dict.fromkeys(numbers):
            with self._lock:
                batch = self._known.get(number)
            try:
                if batch is None:
                    raise _unknown(number)
                settle(batch)
            except MemoryInUse as exc:
                in_use = in_use or exc
                continue
            except (te.Error, ValueError) as exc:
                problem = problem or exc
            if batch is not None:
                self._take(number)
        if in_use is not None:
            raise in_use
        if problem is not None:
            raise problem

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


def settle(batch: Batch) -> None:
    """Returns when the bytes are there.

    Raises:
        te.TransferFailed, te.WaitTimeout: it failed or took too long, and te has done with the
            caller's memory.
        MemoryInUse: te has not, though the connection to the peer was closed.
    """
    transfer = batch.transfer
    if transfer is None:
        return
    problem: te.Error
    try:
        transfer.wait(max(batch.limit_s - transfer.duration_s, 0.0))
        return
    except te.WaitTimeout as exc:
        problem = exc
    except te.TransferFailed as exc:
        if not batch.is_read:
            raise
        problem = exc  # Pieces may still be landing.
    if not _is_let_go(transfer):
        batch.peer.close()  # Which ends whatever goes on there; the next call connects anew.
        if not _is_let_go(transfer):
            what = "write into" if batch.is_read else "read"
            raise MemoryInUse(
                f"te may still {what} memory of {transfer.nbytes} bytes, which must not be used"
                f" again: {problem}"
            ) from problem
    if transfer.wait(0.0) is not te.Status.DONE:
        raise problem


def _is_let_go(transfer: te.Transfer) -> bool:
    """Cancels it; whether te has done with the caller's memory in time."""
    try:
        transfer.cancel()
        transfer.wait(CANCEL_TIMEOUT_S)
    except (te.FenceTimeout, te.WaitTimeout) as exc:
        logger.warning("mooncake.engine over te: %s", exc)
        return False
    except te.TransferFailed:
        return True
    return True
