# SPDX-License-Identifier: Apache-2.0
"""The numbered changes of one owner, as far back as they are kept. Pure."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Final

import numpy as np

from kvstore.objects.changes import CHANGE, Records

__all__ = ["ChangeLog"]


class ChangeLog:
    """Changes in order; the number of a change is how many there were before it. Not thread-safe.

    Who knows the first n changes asks for those since n. If these are not kept any more, the
    answer is None: he has to take a snapshot instead.
    """

    def __init__(self, kept: int) -> None:
        """`kept`: changes that are kept at least."""
        self._kept: Final = kept
        self._batches: deque[tuple[int, Records]] = deque()
        self._count = 0
        self._held = 0

    def __len__(self) -> int:
        """How many changes there were."""
        return self._count

    def append(self, changes: Records) -> None:
        """Takes over changes, dtype ``CHANGE``."""
        self._batches.append((self._count, changes))
        self._count += len(changes)
        self._held += len(changes)
        while self._held - len(self._batches[0][1]) >= self._kept:
            self._held -= len(self._batches.popleft()[1])

    def since(self, number: int, limit: int) -> Records | None:
        """The changes from a number on, `limit` or a batch at most; None if they are not kept."""
        first = self._count - self._held
        if not first <= number <= self._count:
            return None
        later = list(takewhile(lambda one: one[0] + len(one[1]) > number, reversed(self._batches)))
        parts: list[Records] = []
        total = 0
        for start, batch in reversed(later):
            parts.append(batch[max(number - start, 0) :])
            total += len(parts[-1])
            if total >= limit:
                break
        return np.concatenate(parts) if parts else np.zeros(0, CHANGE)
