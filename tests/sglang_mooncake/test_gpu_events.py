# SPDX-License-Identifier: Apache-2.0
"""The thread that waits for GPUs: in the order of each room, and at nobody else's cost."""

from __future__ import annotations

import queue
import threading

import pytest
from handover import WAIT_S, until

from sglang_mooncake.gpu_events import EventWaiter
from sglang_mooncake.rooms.prefill_events import AwaitEvents, EventsHappened
from sglang_mooncake.rooms.room import Room, RoomView
from sglang_mooncake.rooms.states import RoomState


class Event:
    """Happens when the test says so; counts how often it was asked."""

    def __init__(self, happened=False):
        self.happened, self.asked = threading.Event(), 0
        if happened:
            self.happened.set()

    def query(self):
        self.asked += 1
        return self.happened.is_set()


class BrokenEvent:
    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Waiter:
    """A waiter, and what it says."""

    def __init__(self):
        self.said = queue.SimpleQueue()
        self.waiter = EventWaiter(self.said.put)
        self.waiter.start()

    def wait_for(self, room, *events):
        self.waiter.wait_for(AwaitEvents(room, events))

    def hear(self, count=1):
        """So many events, however many looks found them."""
        heard = []
        while len(heard) < count:
            heard += self.said.get(timeout=WAIT_S)
        return heard


@pytest.fixture
def waiter():
    made = Waiter()
    yield made
    made.waiter.close()
    assert not made.waiter._thread.is_alive()


def new_room(number=1):
    return Room(number, 0.0)


def test_events_of_one_room_are_waited_for_in_order(waiter):
    first, second, room = Event(), Event(happened=True), new_room()
    waiter.wait_for(room, first)
    waiter.wait_for(room, second)
    until(lambda: first.asked > 3, "the thread waits")
    assert waiter.said.empty()
    assert second.asked == 0
    first.happened.set()
    assert waiter.hear(2) == [EventsHappened(room)] * 2


def test_rooms_do_not_wait_for_each_other(waiter):
    """The layers of the next forward are announced before the last chunk of this one is sent."""
    next_forward, waiting, other = Event(), new_room(2), new_room(1)
    waiter.wait_for(waiting, next_forward)
    until(lambda: next_forward.asked > 3, "the thread waits")
    waiter.wait_for(other, Event(happened=True))
    assert waiter.hear() == [EventsHappened(other)]
    next_forward.happened.set()
    assert waiter.hear() == [EventsHappened(waiting)]


def test_one_look_asks_once_for_an_event_of_many_rooms(waiter):
    event, rooms = Event(), [new_room(number) for number in range(8)]
    for room in rooms:
        waiter.wait_for(room, event)
    until(waiter.waiter._asked.empty, "the thread has taken all of them")
    asked = event.asked
    until(lambda: event.asked > asked + 1, "and has looked at all of them")
    event.happened.set()
    assert waiter.said.get(timeout=WAIT_S) == [EventsHappened(room) for room in rooms]


def test_all_of_several_events_must_happen(waiter):
    first, second, room = Event(happened=True), Event(), new_room()
    waiter.wait_for(room, first, second)
    until(lambda: second.asked, "the thread waits for the second one")
    assert waiter.said.empty()
    second.happened.set()
    assert waiter.hear() == [EventsHappened(room)]


def test_an_event_that_raises_is_told_and_the_next_goes_on(waiter):
    failing, other = new_room(1), new_room(2)
    waiter.wait_for(failing, BrokenEvent())
    waiter.wait_for(other, Event(happened=True))
    heard = {one.room.serial: one.failure for one in waiter.hear(2)}
    assert heard[other.serial] is None
    assert "the GPU failed before the pages of room 1 were filled" in heard[failing.serial]
    assert "illegal memory access" in heard[failing.serial]


@pytest.mark.parametrize("state", [RoomState.ENDING, RoomState.ABORTED])
def test_a_room_that_ends_is_waited_for_no_more(waiter, state):
    stuck, event, other = new_room(1), Event(), new_room(2)
    waiter.wait_for(stuck, event)
    until(lambda: event.asked, "the thread waits")
    stuck.view = RoomView(state)
    waiter.wait_for(other, Event(happened=True))
    assert waiter.hear() == [EventsHappened(other)]
    asked = event.asked
    waiter.wait_for(other, Event(happened=True))
    assert waiter.hear() == [EventsHappened(other)]
    assert event.asked == asked


def test_closing_waits_for_no_event(waiter):
    event = Event()
    waiter.wait_for(new_room(), event)
    until(lambda: event.asked, "the thread waits")
    waiter.waiter.close()
    assert not waiter.waiter._thread.is_alive()
