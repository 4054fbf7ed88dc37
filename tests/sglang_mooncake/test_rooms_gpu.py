# SPDX-License-Identifier: Apache-2.0
"""Prefill rooms whose pages the GPU has yet to fill: nothing of a room overtakes what waits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from plain_plan import plan_of
from prefill_rooms import CHUNK_TIMEOUT_S, TIMEOUT_S, Rooms, chunk, ended, ready

from sglang_mooncake.layout import layers_from
from sglang_mooncake.rooms import prefill
from sglang_mooncake.rooms.prefill import (
    Aborted,
    AwaitEvents,
    Chunk,
    ChunkSent,
    EventsHappened,
    LayersFilled,
    Over,
    Tell,
    Tick,
    Write,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

GPU_TIMEOUT_S = CHUNK_TIMEOUT_S / 2


class Event:
    def query(self) -> bool:
        raise AssertionError("the rules ask no device")


EVENTS = (Event(),)


@pytest.fixture
def rooms() -> Rooms:
    return Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)


def later(sent: ChunkSent | LayersFilled) -> ChunkSent | LayersFilled:
    return dataclasses.replace(sent, events=EVENTS)


def spans(instructions) -> list[tuple[int, ...]]:
    return [tuple(one.span) for one in instructions if isinstance(one, Write)]


def test_a_chunk_waits_for_its_events_and_nothing_of_its_room_overtakes_it(rooms):
    room = ready(rooms)
    (wait,) = rooms.handle(later(ChunkSent(room, chunk(1, last=False))), 0)
    assert isinstance(wait, AwaitEvents)
    assert (wait.room, wait.events) == (room, EVENTS)
    assert rooms.handle(ChunkSent(room, chunk(1, first=1)), 0) == []
    assert not room.view.exposed
    said = rooms.handle(EventsHappened(room), 0)
    assert spans(said) == [(0,), (1,)]
    assert room.view.state is RoomState.ALL_SENT


def test_what_follows_waits_for_its_own_events(rooms):
    room = ready(rooms)
    rooms.handle(later(ChunkSent(room, chunk(1, last=False))), 0)
    rooms.handle(later(ChunkSent(room, chunk(1, first=1))), 0)
    assert spans(rooms.handle(EventsHappened(room), 0)) == [(0,)]
    assert spans(rooms.handle(EventsHappened(room), 0)) == [(1,)]


def test_another_room_does_not_wait(rooms):
    waiting, other = ready(rooms, 1), ready(rooms, 2)
    rooms.handle(later(LayersFilled(waiting, np.arange(2), 0, 2, 0.0)), 0)
    assert spans(rooms.handle(ChunkSent(other, chunk(2)), 0)) == [(0, 1)]


def test_page_numbers_are_read_only_once_the_events_have_happened(rooms):
    """They come from the device, too."""
    room, pages = ready(rooms), np.array([-9, -9])
    rooms.handle(later(LayersFilled(room, pages, 0, 2, 0.0)), 0)
    rooms.handle(later(ChunkSent(room, Chunk(pages, 0, 0, 0.0))), 0)
    pages[:] = 0, 1
    assert spans(rooms.handle(EventsHappened(room), 0)) == [(0, 1)]
    (last,) = rooms.handle(EventsHappened(room), 0)
    assert isinstance(last, Write)
    assert last.layers == layers_from(2)


def test_a_chunk_that_waits_for_early_writes_keeps_its_place_before_the_gpu(rooms):
    room = ready(rooms)
    rooms.handle(LayersFilled(room, np.arange(1) + 7, 0, 2, 0.0), 0)
    rooms.handle(later(ChunkSent(room, chunk(1, last=False))), 0)
    rooms.handle(later(ChunkSent(room, chunk(1, first=1))), 0)
    assert rooms.handle(EventsHappened(room), 0) == [], "an early write is under way"
    assert rooms.handle(EventsHappened(room), 0) == [], "the first one waits"
    assert spans(rooms.handle(ended(rooms, room), 0)) == [(0,), (1,)]


def test_a_gpu_that_hangs_fails_its_room(rooms):
    room = ready(rooms)
    rooms.handle(later(ChunkSent(room, chunk(1, last=False))), 1.0)
    rooms.handle(ChunkSent(room, chunk(1, first=1)), 2.0)
    assert rooms.handle(Tick(), GPU_TIMEOUT_S) == []
    tell, over = rooms.handle(Tick(), GPU_TIMEOUT_S + 1.0)
    assert isinstance(tell, Tell)
    assert over == Over(room)
    assert room.view.state is RoomState.FAILED
    late = "the GPU did not fill the pages that were sent for room 1 within 20 s"
    assert late in (room.view.reason or "")
    assert rooms.handle(EventsHappened(room), GPU_TIMEOUT_S + 2.0) == []
    assert rooms._table.waiting == 0


def test_an_event_that_failed_fails_its_room(rooms):
    room = ready(rooms)
    rooms.handle(later(ChunkSent(room, chunk(2))), 0)
    rooms.handle(EventsHappened(room, "an illegal memory access"), 0)
    assert room.view.state is RoomState.FAILED
    assert room.view.reason == "an illegal memory access"
    assert rooms._table.waiting == 0


def test_what_waits_for_a_room_that_ends_is_dropped(rooms):
    room = ready(rooms)
    rooms.handle(ChunkSent(room, chunk(1, last=False)), 0)
    rooms.handle(later(ChunkSent(room, chunk(1, first=1))), 0)
    rooms.handle(Aborted(room, "the client has gone"), 0)
    assert room.view.state is RoomState.ENDING
    assert rooms.handle(EventsHappened(room), 0) == []
    assert rooms.handle(ended(rooms, room, "cancelled"), 0) == [Over(room)]
    assert rooms._table.waiting == 0


def test_what_waits_is_bounded(rooms, monkeypatch):
    monkeypatch.setattr(prefill, "WAITING_MAX", 2)
    first, crowd, free = (ready(rooms, number) for number in (1, 2, 3))
    for at in range(2):
        rooms.handle(later(ChunkSent(first, chunk(1, first=at, last=at == 1))), 0)
    rooms.handle(later(ChunkSent(crowd, chunk(2))), 0)
    assert crowd.view.state is RoomState.FAILED
    assert "2 chunks are waiting for GPU events" in (crowd.view.reason or "")
    assert spans(rooms.handle(ChunkSent(free, chunk(2)), 0)) == [(0, 1)], "it waits for nothing"


def test_a_room_whose_scheduler_says_more_after_the_last_chunk_is_done_all_the_same(rooms):
    room: Room = ready(rooms)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    rooms.handle(later(LayersFilled(room, np.arange(2), 0, 2, 0.0)), 0)
    assert rooms.handle(ended(rooms, room), 0) == [Over(room)]
    assert rooms._table.waiting == 0
