# SPDX-License-Identifier: Apache-2.0
"""Rooms that a decode server has given up without having reached their prefill rank. Pure: the
caller passes the time in.

A decode server that this registry refuses (another secret) knows no prefill rank to which it could
say that it will never ask for a room. The prefill rank would wait for it until its deadline, and
with it the client of a router that waits for both servers. So the decode server leaves a notice
here, and prefill ranks ask for notices.

A notice needs no proof, since the one who leaves it has none. Its room number is what entitles to
it: 63 random bits that router, prefill and decode server alone know.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from bootstrap_server.decoding import excerpt

__all__ = [
    "GIVEN_UP_PATH",
    "NOTICE_BYTES_MAX",
    "ROOMS_PER_NOTICE_MAX",
    "GivenUp",
    "GivenUpRoom",
    "GivenUpRooms",
    "Notice",
]

GIVEN_UP_PATH: Final = "/v1/given-up-rooms"

#: Of a body that somebody without a proof may send.
NOTICE_BYTES_MAX: Final = 4_096
ROOMS_PER_NOTICE_MAX: Final = 64
REASON_CHARS_MAX: Final = 400


class Notice(msgspec.Struct, frozen=True):
    """What a decode server says: these rooms, and why. `refused`: it and the prefill server do not
    serve each other; else a later use of the number may fare better."""

    rooms: tuple[int, ...]
    reason: str
    refused: bool = False


class GivenUpRoom(msgspec.Struct, frozen=True):
    """What was said of one room; see `Notice`."""

    reason: str
    refused: bool = False


class GivenUp(msgspec.Struct, frozen=True):
    """What prefill ranks are told: what was said by room, all up to this revision."""

    revision: int
    rooms: dict[int, GivenUpRoom]


class GivenUpRooms:
    """At most `capacity` rooms, each for `expiry_s`; the oldest goes for a new one, so that a flood
    of notices costs those of others, never memory. Revisions count from `first_revision`, which
    should grow with every start of a registry: who follows those of a former life, and asks when
    this one has come as far, would miss what they say."""

    def __init__(
        self, capacity: int = 4_096, expiry_s: float = 60.0, first_revision: int = 0
    ) -> None:
        self._capacity, self._expiry_s = capacity, expiry_s
        self.first_revision = self.revision = first_revision
        #: room → (revision, what was said, time), the oldest notice first.
        self._rooms: OrderedDict[int, tuple[int, GivenUpRoom, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def note(self, notice: Notice, now_s: float) -> None:
        """Keep a notice; of a room that has one already, the first one counts.

        Raises:
            ValueError: it names more rooms than a notice may.
        """
        if len(notice.rooms) > ROOMS_PER_NOTICE_MAX:
            raise ValueError(f"a notice names at most {ROOMS_PER_NOTICE_MAX} rooms")
        self._expire(now_s)
        said = GivenUpRoom(excerpt(notice.reason[:REASON_CHARS_MAX]), notice.refused)
        for room in notice.rooms:
            if room in self._rooms:
                continue
            self.revision += 1
            self._rooms[room] = self.revision, said, now_s
            if len(self._rooms) > self._capacity:
                self._rooms.popitem(last=False)

    def after(self, revision: int, now_s: float) -> GivenUp:
        """What has come since that revision. One that is ahead of ours is another life's, of a
        registry that was restarted: everything is new then."""
        self._expire(now_s)
        after = revision if revision <= self.revision else 0
        rooms = {room: said for room, (at, said, _) in self._rooms.items() if at > after}
        return GivenUp(self.revision, rooms)

    def _expire(self, now_s: float) -> None:
        while self._rooms:
            room, (_, _, noted_s) = next(iter(self._rooms.items()))
            if now_s - noted_s < self._expiry_s:
                return
            del self._rooms[room]
