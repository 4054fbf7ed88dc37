# SPDX-License-Identifier: Apache-2.0
"""The prompts that a prefill server was sent and has not ended, what is left of them, and what
those took that have ended. Pure: the time is handed in."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple, Protocol

from sglang_mooncake.router.fit import Work
from sglang_mooncake.router.sharing import Host

__all__ = ["Batch", "Batches", "Queue", "Queued", "Spent", "left_s"]

#: For what part of the time by which a server is late it is expected to be late still.
LATE_AGAIN: Final = 0.5
#: Prompts that end no later after the first of them than this, or than such a part of what it took,
#: were computed together: their answers are written one after another.
TOGETHER_S: Final = 0.002
TOGETHER_PART: Final = 0.1


class Queued(Protocol):
    """A prompt in a queue: when it was sent, what it takes where nothing slows its server down, and
    what of that any prompt takes."""

    sent_s: float
    alone_s: float
    fixed_s: float
    #: What ``Host.work_s`` was as it was sent.
    host_s: float


class Spent(NamedTuple):
    """What a prompt took from the end of the one before it, if it was sent earlier, and for how
    long other servers of the host were at work meanwhile, in sum."""

    own_s: float
    others_s: float

    @property
    def others(self) -> float:
        """How many other servers were at work, on average."""
        return self.others_s / self.own_s if self.own_s > 0.0 else 0.0


def left_s(expected_s: float, passed_s: float) -> float:
    """What is left of work that was expected to take so long, and has not ended after the time that
    has passed. What is late stays late for half as long again: a server that is stuck is not taken
    for one that is free."""
    late_s = passed_s - expected_s
    return LATE_AGAIN * late_s if late_s > 0.0 else -late_s


class Queue:
    """A server computes the prompts together that were there when it began, and then the others."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting: deque[Queued] = deque()
        #: When the server has ended the one before the first of the queue.
        self._ended_s = -math.inf
        self._ended_host_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def others(self) -> int:
        """How many other servers of the host are at work."""
        return self._host.busy - bool(self._waiting)

    def left_s(self, now_s: float, slowdown: float) -> float:
        """Until a prompt would begin that is sent now. What is computed together has the time that
        any prompt takes once, so that the prompts which it would be computed with have none."""
        if not self._waiting:
            return 0.0
        begun_s = max(self._waiting[0].sent_s, self._ended_s)
        first_s = rest_s = fixed_s = 0.0
        for one in self._waiting:
            if one.sent_s <= begun_s:
                first_s += one.alone_s - one.fixed_s
                fixed_s = max(fixed_s, one.fixed_s)
            else:
                rest_s += one.alone_s - one.fixed_s
        return rest_s * slowdown + left_s((first_s + fixed_s) * slowdown, now_s - begun_s)

    def send(self, one: Queued, now_s: float) -> None:
        """A prompt is sent."""
        if not self._waiting:
            self._host.begins(now_s)
        one.host_s = self._host.work_s(now_s)
        self._waiting.append(one)

    def end(self, one: Queued, now_s: float) -> Spent:
        """A prompt has ended. Called once for each ``send``."""
        host_s = self._host.work_s(now_s)
        own_s = max(0.0, now_s - max(one.sent_s, self._ended_s))
        others_s = max(0.0, host_s - max(one.host_s, self._ended_host_s) - own_s)
        self._waiting.remove(one)
        if not self._waiting:
            self._host.ends(now_s)
        self._ended_s, self._ended_host_s = now_s, host_s
        return Spent(own_s, others_s)


class Batch(NamedTuple):
    """Prompts that were computed together: the work of them all, and what they took."""

    work: Work
    spent: Spent
    #: A prompt that ends later was not computed with them.
    ends_by_s: float


class Batches:
    """Which prompts were computed together: the first that ends is seen to take the time of all,
    and the others none, which says nothing of what a prompt takes."""

    def __init__(self) -> None:
        self._last: Batch | None = None

    def add(self, work: Work, spent: Spent, now_s: float) -> Batch | None:
        """A prompt has ended. The batch before its own, if it was not taken yet."""
        last = self.take(now_s)
        if self._last is None:
            by_s = now_s + max(TOGETHER_S, TOGETHER_PART * spent.own_s)
            self._last = Batch(work, spent, by_s)
            return last
        own_s, others_s = self._last.spent
        both = Spent(own_s + spent.own_s, others_s + spent.others_s)
        self._last = Batch(self._last.work.and_also(work), both, self._last.ends_by_s)
        return None

    def take(self, now_s: float) -> Batch | None:
        """The last batch, once no prompt can belong to it any more."""
        last = self._last
        if last is None or now_s <= last.ends_by_s:
            return None
        self._last = None
        return last
