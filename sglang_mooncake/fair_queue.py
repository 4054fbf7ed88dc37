# SPDX-License-Identifier: Apache-2.0
"""An order of work in which nobody takes all workers: at most so many of one owner at a time. Pure:
no threads, no clock."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["FairQueue", "Work"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Work(Generic[Item]):
    owner: str
    item: Item
    queued_s: float


class FairQueue(Generic[Item]):
    """First in, first out, but whoever has `of_one_owner` at work lets the others go first.

    Args:
        at_work: how much work is done at a time.
        of_one_owner: how much of it for one owner.
        waiting: how much may wait.
    """

    def __init__(self, at_work: int, of_one_owner: int, waiting: int) -> None:
        self._at_work_max, self._of_one_owner_max = at_work, of_one_owner
        self._waiting_max = waiting
        #: By owner, as some may have thousands that cannot begin; with the place of each in all.
        self._waiting: dict[str, deque[tuple[int, Work[Item]]]] = {}
        self._count, self._places = 0, itertools.count()
        self._at_work: Counter[str] = Counter()

    def __len__(self) -> int:
        """How much waits."""
        return self._count

    @property
    def at_work(self) -> int:
        """How much was taken and is not done."""
        return self._at_work.total()

    def add(self, owner: str, item: Item, now_s: float) -> bool:
        """False, and nothing is kept, when too much waits already."""
        if self._count >= self._waiting_max:
            return False
        work = Work(owner, item, now_s)
        self._waiting.setdefault(owner, deque()).append((next(self._places), work))
        self._count += 1
        return True

    def take(self) -> Work[Item] | None:
        """The next that may begin now; None when there is none. `done` follows each."""
        if self.at_work >= self._at_work_max:
            return None
        may = (one for one in self._waiting if self._at_work[one] < self._of_one_owner_max)
        owner = min(may, key=lambda one: self._waiting[one][0][0], default=None)
        if owner is None:
            return None
        _, work = self._waiting[owner].popleft()
        if not self._waiting[owner]:
            del self._waiting[owner]
        self._count -= 1
        self._at_work[owner] += 1
        return work

    def done(self, work: Work[Item]) -> None:
        self._at_work[work.owner] -= 1
        if not self._at_work[work.owner]:
            del self._at_work[work.owner]
