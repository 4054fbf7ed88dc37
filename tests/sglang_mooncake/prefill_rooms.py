# SPDX-License-Identifier: Apache-2.0
"""Rooms, requests and chunks for tests of the prefill side."""

from __future__ import annotations

import numpy as np

from bootstrap_server.ranks.matching import ALL_PAGES, PageShare
from sglang_mooncake.messages import RoomRequest, Target
from sglang_mooncake.rooms.prefill import (
    Chunk,
    Event,
    Instruction,
    Opened,
    PrefillRooms,
    Requested,
    WriteEnded,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

TIMEOUT_S, CHUNK_TIMEOUT_S = 10.0, 40.0


class Rooms(PrefillRooms):
    """Applies an event whole, for tests that look at the rules alone."""

    def handle(self, event: Event, now_s: float) -> list[Instruction]:  # type: ignore[override]
        return list(super().handle(event, now_s))


def target(tag: int = 1, pages: int = 2, share: PageShare = ALL_PAGES) -> Target:
    indices = np.arange(pages, dtype="<i4").tobytes()
    return Target(tag, pages, indices, share, states=(), aux_slot=0, completion_slot=0)


def request(
    room: int,
    generation: int = 1,
    pages: int = 2,
    destinations: int = 1,
    share: PageShare = ALL_PAGES,
    prefix: int = 3,
) -> RoomRequest:
    wanted = target(generation, pages, share)
    return RoomRequest(room, generation, prefix, destinations, wanted)


def nothing_wanted(room: int, generation: int = 1, destinations: int = 1) -> RoomRequest:
    return RoomRequest(room, generation, 3, destinations, target=None)


def chunk(pages: int, first: int = 0, last: bool = True) -> Chunk:
    return Chunk(np.arange(pages), first, 0 if last else None, 0.0)


def opened(rooms: Rooms, room: int = 1, now_s: float = 0.0) -> Room:
    use = Room(room, now_s)
    rooms.handle(Opened(use), now_s)
    return use


def ready(rooms: Rooms, room: int = 1) -> Room:
    use = opened(rooms, room)
    rooms.handle(Requested("a", request(room)), 0)
    assert use.view.state is RoomState.READY
    return use


def ended(rooms: Rooms, room: Room, failure: str | None = None) -> WriteEnded:
    """What is said of the oldest write that is under way for a room."""
    peer, nth = next(iter(rooms._table.get(room).writes))
    return WriteEnded(room, peer, nth, failure)
