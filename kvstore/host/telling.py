# SPDX-License-Identifier: Apache-2.0
"""Which of the processes that use an owner tells a monitoring system how it is. Pure: time is
passed in."""

from __future__ import annotations

import math
import threading
from typing import Final

from kvstore.owner.card import OwnerStats

__all__ = ["TELLER_S", "Teller", "Told"]

TELLER_S: Final = 5.0
"""A process that tells an owner's figures asks for them once a second; one that has not asked for
so long does not tell them any more."""


class Teller:
    """Which process tells a monitoring system what an owner holds and has done: one, so that sums
    over processes count it once. Each begins where the one before it has stopped. Thread-safe."""

    def __init__(self, first_turn: int) -> None:
        """``first_turn``: the number of the first process's turn, such as no other owner has."""
        self._lock = threading.Lock()
        self._asker = b""
        self._until_s = -math.inf
        self._turn = first_turn - 1
        self._told = self._since = OwnerStats()

    def keep(self) -> None:
        """The owner's process tells it itself from now on."""
        with self._lock:
            self._asker, self._until_s = b"", math.inf

    def tell(self, asker: bytes, own: OwnerStats, now_s: float) -> tuple[int, OwnerStats] | None:
        """The number of this process's turn, and what the owner has done since it began; None if it
        is another's turn. The first that asks has it, for as long as it goes on asking."""
        with self._lock:
            if asker != self._asker:
                if now_s < self._until_s:
                    return None
                self._turn += 1
                self._since = self._told
            self._asker, self._until_s, self._told = asker, now_s + TELLER_S, own
            return self._turn, own.since(self._since)


class Told:
    """What a process has told of what owners have done, over all of its turns: it never falls. For
    one thread."""

    def __init__(self) -> None:
        self._turn = 0
        self._before = self._latest = OwnerStats()

    def add(self, turn: int, own: OwnerStats) -> OwnerStats:
        """What ``Teller.tell`` has said, with all turns before."""
        if turn != self._turn:
            self._turn, self._before = turn, self._latest
        self._latest = own.behind(self._before)
        return self._latest
