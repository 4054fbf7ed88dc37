# SPDX-License-Identifier: Apache-2.0
"""Which DP rank serves a room. Pure: the caller passes the time in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["RoomTable"]


class RoomTable:
    """Which DP rank serves a room, for rooms whose DP rank the router chose freely.

    An entry lives `expiry_s` after its last registration. At most `capacity` rooms are kept;
    the oldest is dropped for a new one, so a flood costs lookups but never memory.
    """

    def __init__(self, capacity: int, expiry_s: float) -> None:
        if capacity < 1 or expiry_s <= 0:
            raise ValueError(f"capacity {capacity} and expiry_s {expiry_s} must be positive")
        self._capacity = capacity
        self._expiry_s = expiry_s
        #: room → (dp rank, time of registration), oldest registration first.
        self._entries: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, room: int, dp_rank: int, now_s: float) -> None:
        """Remember that `dp_rank` serves `room`; a later call for the room replaces it."""
        self._expire(now_s)
        self._entries[room] = (dp_rank, now_s)
        self._entries.move_to_end(room)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def query(self, rooms: Iterable[int], now_s: float) -> dict[int, int]:
        """DP rank per room, for those of `rooms` that are known."""
        self._expire(now_s)
        return {room: self._entries[room][0] for room in rooms if room in self._entries}

    def _expire(self, now_s: float) -> None:
        while self._entries:
            room, (_, registered_s) = next(iter(self._entries.items()))
            if now_s - registered_s < self._expiry_s:
                return
            del self._entries[room]
