# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernel may keep for minutes, ended for the caller at its deadline.

siw connects a TCP socket within rdma_connect(3): where packets are lost, the call returns after two
minutes. It cannot be interrupted from outside without a signal handler of the whole process.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

__all__ = ["CALLS_MAX", "within"]

CALLS_MAX: Final = 64
"""Calls under way in this process, those that were given up included: each is a thread."""

T = TypeVar("T")

_free = threading.BoundedSemaphore(CALLS_MAX)


def within(call: Callable[[float], T], what: str, timeout_s: float) -> T:
    """What ``call`` returns, or its exception.

    Args:
        call: gets the seconds that are left. What it returns too late is dropped.
        what: for the sentence.

    Raises:
        OSError: ``ETIMEDOUT`` at the deadline. The call goes on in a thread of its own.
    """
    until_s = time.monotonic() + timeout_s
    free = _free
    if not free.acquire(timeout=max(timeout_s, 0.0)):
        raise OSError(
            errno.ETIMEDOUT,
            f"{what}: {CALLS_MAX} connections of this process are being tried already",
        )
    done: Future[T] = Future()
    thread = threading.Thread(
        target=_run, args=(call, until_s, done, free), name="te-dial", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as exc:  # No more threads.
        free.release()
        raise OSError(errno.EAGAIN, f"{what}: {exc}") from exc
    try:
        return done.result(max(until_s - time.monotonic(), 0.0))
    except TimeoutError as exc:
        if done.done():  # The call itself timed out, or has just returned.
            return done.result()
        raise OSError(errno.ETIMEDOUT, f"{what}: no answer within {timeout_s:.1f} s") from exc


def _run(
    call: Callable[[float], T], until_s: float, done: Future[T], free: threading.BoundedSemaphore
) -> None:
    try:
        done.set_result(call(until_s - time.monotonic()))
    except BaseException as exc:  # noqa: BLE001 - the caller has it
        done.set_exception(exc)
    finally:
        free.release()
