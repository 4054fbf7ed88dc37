# SPDX-License-Identifier: Apache-2.0
"""Which request is served next where only so many may be under way: the one with the highest
priority, and of these the one whose tenant has had the least. Pure.

What a tenant has had is a time of its own, which goes on with what each of its requests costs as
that is let in (start-time fair queueing). One that comes back after a while has no claim to what it
left to the others: its time is at least that of the request that was let in last. What a tenant
gets while nobody waits costs it nothing later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["TENANTS_MAX", "Entry", "Shares"]

#: Tenants whose times are remembered; of all others each counts as new.
TENANTS_MAX: Final = 10_000

_T = TypeVar("_T")


class Entry(NamedTuple, Generic[_T]):
    """What becomes of a request that comes: it is let in at once, or waits. Where too many wait one
    is turned away, which may be itself."""

    is_in: bool
    turned_away: _T | None = None


class _Waiting(NamedTuple, Generic[_T]):
    who: _T
    tenant: str
    priority: int
    cost: float


class Shares(Generic[_T]):
    """Up to ``most`` requests are under way, and up to ``waiting_max`` wait. Each that was let in
    ``leaves`` once."""

    def __init__(self, most: int, waiting_max: int) -> None:
        self._most, self._waiting_max = most, waiting_max
        self._in = 0
        #: In the order in which they came.
        self._queue: list[_Waiting[_T]] = []
        #: What each tenant has had, what the one had that was let in last, and the most of all.
        self._had: dict[str, float] = {}
        self._least = 0.0
        self._largest = 0.0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def enter(self, who: _T, tenant: str, priority: int, cost: float) -> Entry[_T]:
        """A request comes. The higher the ``priority`` the earlier; ``cost``: what it takes of its
        tenant's share."""
        one = _Waiting(who, tenant, priority, cost)
        self._had[tenant] = max(self._had.pop(tenant, 0.0), self._least)
        while len(self._had) > TENANTS_MAX:
            del self._had[next(iter(self._had))]
        if self._in < self._most:
            self._in += 1
            self._let_in(one)
            self._least = self._largest  # Nobody waits.
            return Entry(True)
        self._queue.append(one)
        return Entry(False, self._too_many() if len(self._queue) > self._waiting_max else None)

    def leave(self, is_there: Callable[[_T], bool] = lambda _: True) -> _T | None:
        """One that was let in has ended; the one that is let in for it. ``is_there``: whether one
        that waits still does."""
        self._queue = [one for one in self._queue if is_there(one.who)]
        if not self._queue:
            self._in -= 1
            return None
        one = min(self._queue, key=lambda one: (-one.priority, self._had_by(one.tenant)))
        self._queue.remove(one)
        self._let_in(one)
        return one.who

    def give_up(self, who: _T) -> None:
        """One that may wait does so no more."""
        self._queue = [one for one in self._queue if one.who is not who]

    def _let_in(self, one: _Waiting[_T]) -> None:
        begin = self._had_by(one.tenant)
        self._least = max(self._least, begin)
        self._had[one.tenant] = begin + one.cost
        self._largest = max(self._largest, begin + one.cost)

    def _had_by(self, tenant: str) -> float:
        return self._had.get(tenant, self._least)

    def _too_many(self) -> _T:
        """Of those with the lowest priority the one that came last, of the tenant that has the
        most of them."""
        lowest = min(one.priority for one in self._queue)
        counts = Counter(one.tenant for one in self._queue if one.priority == lowest)
        most = max(counts.values())
        one = next(
            one
            for one in reversed(self._queue)
            if one.priority == lowest and counts[one.tenant] == most
        )
        self.give_up(one.who)
        return one.who
