# SPDX-License-Identifier: Apache-2.0
"""An order of work in which nobody takes all workers: at most so many of one owner at a time. Pure:
no threads, no clock."""

from __future__ import annotations

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
        self._waiting: deque[Work[Item]] = deque()
        self._at_work: Counter[str] = Counter()

    def __len__(self) -> int:
        """How much waits."""
        return len(self._waiting)

    @property
    def at_work(self) -> int:
        """How much was taken and is not done."""
        return self._at_work.total()

    def add(self, owner: str, item: Item, now_s: float) -> bool:
        """False, and nothing is kept, when too much waits already."""
        if len(self._waiting) >= self._waiting_max:
            return False
        self._waiting.append(Work(owner, item, now_s))
        return True

    def take(self) -> Work[Item] | None:
        """The next that may begin now; None when there is none. `done` follows each."""
        if self.at_work >= self._at_work_max:
            return None
        for place, work in enumerate(self._waiting):
            if self._at_work[work.owner] < self._of_one_owner_max:
                del self._waiting[place]
                self._at_work[work.owner] += 1
                return work
        return None

    def done(self, work: Work[Item]) -> None:
        self._at_work[work.owner] -= 1
        if not self._at_work[work.owner]:
            del self._at_work[work.owner]
