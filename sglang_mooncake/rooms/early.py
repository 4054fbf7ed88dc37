# SPDX-License-Identifier: Apache-2.0
"""What decode ranks say of a room before the prefill scheduler opens it: the last word of each.

Pure, like the rest of this package. Bounded: peers that name rooms which no request ever uses must
not fill our memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_mooncake.messages import RoomAbort, RoomRequest

__all__ = ["EARLY_ROOMS_MAX", "EarlyRoom", "EarlyRooms"]

EARLY_ROOMS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class EarlyRoom:
    """One room number. A peer is in at most one of the two."""

    since_s: float
    requests: dict[str, RoomRequest] = field(default_factory=dict)
    aborts: dict[str, RoomAbort] = field(default_factory=dict)


class EarlyRooms:
    """Rooms that are not open yet, by number, the one that waits longest first."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rooms: dict[int, EarlyRoom] = {}

    def request(self, peer: str, request: RoomRequest, now_s: float) -> None:
        """Keeps a request, unless its own abort has overtaken it."""
        room = self._room(request.room, now_s)
        abort = room.aborts.get(peer)
        if abort is None or abort.generation < request.generation:
            room.aborts.pop(peer, None)
            room.requests[peer] = request

    def abort(self, peer: str, abort: RoomAbort, now_s: float) -> None:
        """Keeps an abort, unless the peer has asked again since: that is another use."""
        room = self._room(abort.room, now_s)
        request = room.requests.get(peer)
        if request is None or request.generation <= abort.generation:
            room.requests.pop(peer, None)
            room.aborts[peer] = abort

    def take(self, number: int) -> EarlyRoom | None:
        """What is known of a room that opens now; it is early no more."""
        return self._rooms.pop(number, None)

    def lose(self, peer: str) -> None:
        """Forgets the requests of a peer that cannot be written to any more."""
        for number, room in list(self._rooms.items()):
            room.requests.pop(peer, None)
            if not room.requests and not room.aborts:
                del self._rooms[number]

    def overdue(self, now_s: float) -> list[tuple[int, EarlyRoom, str]]:
        """Takes out what waited too long or is too much: number, room, why."""
        late = (
            f"no request with this room reached the prefill server within {self._timeout_s:.0f} s "
            "(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)"
        )
        crowd = f"{EARLY_ROOMS_MAX} rooms are waiting for a request of the prefill server"
        found: list[tuple[int, EarlyRoom, str]] = []
        while self._rooms:
            number, room = next(iter(self._rooms.items()))
            is_late = now_s - room.since_s >= self._timeout_s
            if not is_late and len(self._rooms) <= EARLY_ROOMS_MAX:
                break
            del self._rooms[number]
            found.append((number, room, late if is_late else crowd))
        return found

    def _room(self, number: int, now_s: float) -> EarlyRoom:
        return self._rooms.setdefault(number, EarlyRoom(now_s))
