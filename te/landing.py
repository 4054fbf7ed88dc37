# SPDX-License-Identifier: Apache-2.0
"""The gate between the thread that writes into registered memory and those that revoke it."""

from __future__ import annotations

import threading
from types import TracebackType

from te.errors import FenceTimeout

__all__ = ["LandingGate"]


class LandingGate:
    """Makes "mark as revoked, then be sure" possible without stopping the data.

    One thread lands: it enters the gate, looks at the marks, makes one non-blocking call that
    writes memory, and leaves. Others mark first and then call ``quiesce``: a landing that had
    entered before is waited for, and any later one sees the mark. A plain lock would do the same
    but is unfair: a busy lander could keep a waiter out for as long as data flows.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = False
        self._entered = 0

    def __enter__(self) -> None:
        with self._changed:
            self._inside = True
            self._entered += 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._inside = False
            self._changed.notify_all()

    def quiesce(self, timeout_s: float) -> None:
        """Returns once a landing under way at this moment has ended; ``FenceTimeout`` if late."""
        with self._changed:
            entered = self._entered
            if not self._changed.wait_for(
                lambda: not self._inside or self._entered != entered, timeout_s
            ):
                raise FenceTimeout(
                    f"a landing did not end within {timeout_s} s; the memory must not be reused"
                )
