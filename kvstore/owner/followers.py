# SPDX-License-Identifier: Apache-2.0
"""Who waits for news of an owner, and when he gets them. Pure: time is passed in.

A few followers are told at once. News to each of many would take all of the owner's time: with
1,000 followers and 50 changes a second that is 50,000 messages a second. So after it has told many,
the owner pauses, and tells them all that has happened meanwhile in one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ANSWER_S", "FOLLOWERS_MAX", "Follower", "Followers"]

ANSWER_S: Final = 1.0
"""A follower is answered after this time at the latest, and so knows that the owner lives."""
FOLLOWERS_MAX: Final = 4096
NEWS_S: Final = 1e-3
"""Pause after news to one follower. A message takes 50 µs of the owner, so that they all together
take a twentieth of a core at most."""
UNNOTICED_S: Final = 0.02
"""A shorter pause is none."""


@dataclass(frozen=True, slots=True)
class Follower:
    """One who waits for an answer."""

    client: bytes
    request_id: bytes
    #: Of the first change that he does not know.
    number: int
    until_s: float


class Followers:
    """All who wait. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Follower] = {}
        self._pause_until_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: bytes, request_id: bytes, number: int, now_s: float) -> bool:
        """He waits from now on, instead of whatever he asked before. False if there are
        ``FOLLOWERS_MAX`` already."""
        if len(self._waiting) >= FOLLOWERS_MAX and client not in self._waiting:
            return False
        self._waiting[client] = Follower(client, request_id, number, now_s + ANSWER_S)
        return True

    def due(self, count: int, now_s: float, client: bytes | None = None) -> list[Follower]:
        """Who is to be answered now, and does not wait any more.

        Args:
            count: the number of the next change.
            client: look at this one alone.
        """
        if now_s < self._pause_until_s:
            return []
        asked = self._waiting.values() if client is None else (self._waiting[client],)
        found = [one for one in asked if one.number != count or now_s >= one.until_s]
        for one in found:
            del self._waiting[one.client]
        pause_s = NEWS_S * sum(one.number != count for one in found)
        if pause_s > UNNOTICED_S:
            self._pause_until_s = now_s + min(pause_s, ANSWER_S)
        return found
