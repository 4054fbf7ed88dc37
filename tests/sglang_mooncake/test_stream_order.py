# SPDX-License-Identifier: Apache-2.0
"""What waits for the GPU: in the order of its room, with a deadline, and at nobody else's cost."""

from __future__ import annotations

import queue
import re
import threading

import pytest
from handover import WAIT_S, until

from sglang_mooncake import stream_order
from sglang_mooncake.rooms.room import Room, RoomView
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.stream_order import StreamOrder


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


class Loop:
    """The test's own thread in the place of the loop's."""

    def __init__(self, timeout_s):
        self.delivered, self.failed = [], []
        self.inbox = queue.SimpleQueue()
        self.order = StreamOrder(
            self.delivered.append,
            lambda use, reason: self.failed.append((use, reason)),
            self.inbox.put,
            timeout_s,
            "GPU_TIMEOUT",
        )
        self.order.start()

    def turn(self, rooms=1):
        """Until the waits of so many submissions are over."""
        while rooms:
            waited = self.inbox.get(timeout=WAIT_S)
            rooms -= len(waited.rooms)
            self.order.waited(waited)


@pytest.fixture(params=[WAIT_S])
def loop(request):
    made = Loop(request.param)
    yield made
    made.order.close()
    assert not made.order._thread.is_alive()


def use(room=1):
    return Room(room, 0.0)


def test_what_waits_for_nothing_goes_at_once(loop):
    loop.order.submit(use(), "a")
    loop.order.submit(use(), "b")
    assert loop.delivered == ["a", "b"]


def test_nothing_overtakes_what_waits_in_its_room(loop):
    first, second = Event(), Event(happened=True)
    room = use()
    loop.order.submit(room, "cached prefix", (first,))
    loop.order.submit(room, "middle")
    loop.order.submit(room, "a chunk with an event", (second,))
    loop.order.submit(room, "last chunk")
    until(lambda: first.asked > 3, "the thread waits")
    assert loop.delivered == []
    assert loop.inbox.empty()
    assert second.asked == 0
    first.happened.set()
    loop.turn(2)
    assert loop.delivered == ["cached prefix", "middle", "a chunk with an event", "last chunk"]
    loop.order.submit(room, "later")
    assert loop.delivered[-1] == "later"


def test_rooms_do_not_wait_for_each_other(loop):
    """The layers of the next forward are announced before the last chunk of this one is sent."""
    next_forward = Event()
    loop.order.submit(use(2), "layers of the next forward", (next_forward,))
    loop.order.submit(use(1), "last chunk")
    assert loop.delivered == ["last chunk"]
    until(lambda: next_forward.asked > 3, "the thread waits")
    loop.order.submit(use(3), "another last chunk", (Event(happened=True),))
    loop.turn()
    assert loop.delivered == ["last chunk", "another last chunk"]
    next_forward.happened.set()
    loop.turn()
    assert loop.delivered[-1] == "layers of the next forward"


def test_one_look_asks_once_for_an_event_of_many_rooms(loop):
    event, rooms = Event(), 8
    for room in range(rooms):
        loop.order.submit(use(room), room, (event,))
    until(loop.order._to_wait_for.empty, "the thread has taken all of them")
    asked = event.asked
    until(lambda: event.asked > asked + 1, "and has looked at all of them")
    event.happened.set()
    waited = loop.inbox.get(timeout=WAIT_S)
    assert len(waited.rooms) == rooms
    loop.order.waited(waited)
    assert loop.delivered == list(range(rooms))


def test_all_events_of_one_submission_must_happen(loop):
    first, second = Event(happened=True), Event()
    loop.order.submit(use(), "a", (first, second))
    until(lambda: second.asked, "the thread waits for the second one")
    assert loop.inbox.empty()
    second.happened.set()
    loop.turn()
    assert loop.delivered == ["a"]


def test_an_event_that_raises_fails_its_room_and_the_next_goes_on(loop):
    failing = use(1)
    loop.order.submit(failing, "a", (BrokenEvent(),))
    loop.order.submit(use(2), "b", (Event(happened=True),))
    loop.turn(2)
    ((room, reason),) = loop.failed
    assert room is failing
    assert "the event before the pages of room 1 failed on the GPU" in reason
    assert "illegal memory access" in reason
    assert loop.delivered == ["b"]


@pytest.mark.parametrize("loop", [0.05], indirect=True)
def test_an_event_that_never_happens_fails_its_room_and_the_next_goes_on(loop):
    stuck = use(1)
    loop.order.submit(stuck, "a", (Event(),))
    loop.order.submit(stuck, "its last chunk")
    loop.order.submit(use(2), "b", (Event(happened=True),))
    loop.order.submit(use(3), "c")
    loop.turn(2)
    ((room, reason),) = loop.failed
    assert room is stuck
    late = r"did not fill the pages that were sent for room 1 within \d+ s \(GPU_TIMEOUT\)"
    assert re.search(late, reason)
    assert loop.delivered[0] == "c"
    assert set(loop.delivered[1:]) == {"b", "its last chunk"}, "the rules drop the last one"
    assert len(loop.delivered) == 3
    assert loop.order._count == 0
    assert not loop.order._waiting


@pytest.mark.parametrize("state", [RoomState.ENDING, RoomState.ABORTED])
def test_a_room_that_ends_is_waited_for_no_more(loop, state):
    stuck, event = use(1), Event()
    loop.order.submit(stuck, "a", (event,))
    loop.order.submit(stuck, "b")
    until(lambda: event.asked, "the thread waits")
    stuck.view = RoomView(state)
    loop.turn()
    assert loop.delivered == ["a", "b"], "the rules drop the first"


def test_what_waits_is_bounded(loop, monkeypatch):
    monkeypatch.setattr(stream_order, "WAITING_MAX", 2)
    first, event = use(1), Event()
    for _ in range(2):
        loop.order.submit(first, "a", (event,))
    crowd = use(2)
    loop.order.submit(crowd, "b", (event,))
    ((room, reason),) = loop.failed
    assert room is crowd
    assert "2 chunks are waiting for GPU events" in reason


def test_closing_waits_for_no_event(loop):
    event = Event()
    loop.order.submit(use(), "a", (event,))
    until(lambda: event.asked, "the thread waits")
    loop.order.close()
    assert not loop.order._thread.is_alive()
