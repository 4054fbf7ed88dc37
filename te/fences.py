# SPDX-License-Identifier: Apache-2.0
"""Closing a tag, in two steps: it is revoked at once, and closed when nothing of it can land."""

from __future__ import annotations

import threading
import time
from typing import Final

from te.core.engine import Revocation
from te.errors import FenceTimeout
from te.stats import FenceStats

__all__ = ["QUIESCE_TIMEOUT_S", "Fence", "FenceCounter"]

# A landing is one call of at most a few MiB: milliseconds, even on a busy machine, unless it waits
# for pages of another process that the kernel has to fetch.
QUIESCE_TIMEOUT_S: Final = 0.9


class FenceCounter:
    """Counts an engine's fences. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._confirmed = 0
        self._confirmed_s = 0.0
        self._timed_out = 0

    def confirmed(self, after_s: float) -> None:
        """A fence was confirmed, so long after it was begun."""
        with self._lock:
            self._confirmed += 1
            self._confirmed_s += after_s

    def timed_out(self) -> None:
        """Somebody waited for a fence in vain."""
        with self._lock:
            self._timed_out += 1

    def stats(self) -> FenceStats:
        """The figures up to now."""
        with self._lock:
            return FenceStats(self._confirmed, self._confirmed_s, self._timed_out)


class Fence:
    """A tag that is being closed, as ``Engine.revoke`` returns it. All methods are thread-safe, and
    several fences of one tag are independent of each other."""

    def __init__(
        self,
        tag: int,
        revocation: Revocation,
        counter: FenceCounter,
    ) -> None:
        self._tag = tag
        self._revocation = revocation
        self._lock = threading.Lock()
        self._counter = counter
        self._begun_s = time.monotonic()
        self._count: int | None = None

    def __repr__(self) -> str:
        return f"Fence(tag {self._tag:#x}, {'revoked' if self._count is None else 'closed'})"

    def poll(self) -> bool:
        """Whether the tag is closed now, without waiting. Until then the memory must not be
        reused."""
        return self._step(0.0)

    def wait(self, timeout_s: float = QUIESCE_TIMEOUT_S) -> int:
        """Waits until it is closed; the last ``Engine.arrived`` of the tag.

        Raises ``te.FenceTimeout`` if it is not in time: then the memory must not be reused, and
        ``wait`` is to be called again.
        """
        if not self._step(timeout_s):
            self._counter.timed_out()
            raise FenceTimeout(
                f"tag {self._tag:#x}: a landing did not end within {timeout_s} s; the memory must"
                " not be reused; call fence again"
            )
        assert self._count is not None
        return self._count

    def _step(self, timeout_s: float) -> bool:
        if self._count is not None:
            return True
        if not self._revocation.wait(timeout_s):
            return False
        count = self._revocation.forget()
        with self._lock:
            is_first, self._count = self._count is None, count
        if is_first:
            self._counter.confirmed(time.monotonic() - self._begun_s)
        return True
