# SPDX-License-Identifier: Apache-2.0
"""The last failures of a rank's rooms, by reason."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from bootstrap_server import FailureStatus
from bootstrap_server.ranks.rank_status import FAILURES_MAX, reason_text

__all__ = ["Failures"]


class Failures:
    """Keeps the `FAILURES_MAX` reasons that occurred last, each with the last time (by `clock`,
    seconds since 1970) and how often. Any thread may call anything."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        #: The one that occurred last stands last.
        self._by_reason: OrderedDict[str, FailureStatus] = OrderedDict()

    def note(self, reason: str | None) -> None:
        """A room has failed."""
        text = reason_text(reason or "no reason was given")
        with self._lock:
            former = self._by_reason.pop(text, None)
            count = 1 if former is None else former.count + 1
            self._by_reason[text] = FailureStatus(self._clock(), text, count)
            if len(self._by_reason) > FAILURES_MAX:
                self._by_reason.popitem(last=False)

    def last(self) -> tuple[FailureStatus, ...]:
        """The newest first."""
        with self._lock:
            return tuple(reversed(self._by_reason.values()))
