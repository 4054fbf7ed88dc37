# SPDX-License-Identifier: Apache-2.0
"""How a prefill rank's loop starts; when `send()` may leave its chunk for the wake-up of a later
`poll()`, and when it must not."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from handover import HOST, Pool, make_context

import te
from sglang_mooncake import prefill_side
from sglang_mooncake.context import Deadlines
from sglang_mooncake.layout import Buffers
from sglang_mooncake.links.prefill import PrefillLinks
from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.room import RoomView
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.stats import Recorder


class LoopLog:
    """Stands where the loop stands, and counts what would be system calls."""

    def __init__(self):
        self.left, self.wakes = [], 0

    def post(self, stimulus):
        self.leave(stimulus)
        self.wake()

    def leave(self, stimulus):
        self.left.append(stimulus)

    def wake(self):
        if self.left:
            self.left.clear()
            self.wakes += 1


@pytest.fixture
def side():
    context, memory = make_context("prefill", f"{HOST}:1", Deadlines()), Pool(seed=1)
    with te.Engine(te.Config(host=HOST)) as engine:
        layout = memory.layout(Buffers((), (), ()))
        recorder = Recorder(context, {}, engine.stats, None)
        made = PrefillSide(context, engine, layout, recorder)
        made._loop.close()
        made._loop = LoopLog()
        yield made


def ready_room(side, room):
    use = side.open_room(room, register_dp_rank=False)
    use.view = RoomView(RoomState.READY)
    side.polled(use, sent=False)
    assert side._loop.left == []
    return use


def chunk(last):
    return Chunk(np.arange(3), 0, 0 if last else None, 0.0)


def test_the_last_chunks_of_a_batch_cost_one_wake_up_in_the_first_poll(side):
    uses = [ready_room(side, room) for room in range(4)]
    before = side._loop.wakes
    for use in uses:
        side.send_chunk(use, chunk(last=True))
    assert (len(side._loop.left), side._loop.wakes) == (4, before)
    for use in uses:
        side.polled(use, sent=True)
    assert (len(side._loop.left), side._loop.wakes) == (0, before + 1)


def test_a_lone_request_in_the_middle_of_its_prompt_wakes_the_loop_itself(side):
    room = ready_room(side, 1)
    before = side._loop.wakes
    side.send_chunk(room, chunk(last=False))
    assert (side._loop.left, side._loop.wakes) == ([], before + 1)


@pytest.mark.parametrize("other", ["waits for its decode rank", "is sent"])
def test_a_chunk_waits_for_the_poll_of_another_room(side, other):
    room = ready_room(side, 1)
    if other == "is sent":
        side.send_chunk(ready_room(side, 2), chunk(last=True))
    else:
        side.open_room(2, register_dp_rank=False)
    side._loop.wake()
    before = side._loop.wakes
    side.send_chunk(room, chunk(last=False))
    assert (len(side._loop.left), side._loop.wakes) == (1, before)


@pytest.mark.parametrize("end", ["over", "closed", "aborted"])
def test_rooms_that_are_over_are_not_waited_for(side, end):
    room, other = ready_room(side, 1), side.open_room(2, register_dp_rank=False)
    match end:
        case "over":
            other.view = RoomView(RoomState.FAILED)
            side.polled(other, sent=False)
        case "closed":
            side.close_room(other)
        case "aborted":
            side.abort(other, "a test")
    before = side._loop.wakes
    side.send_chunk(room, chunk(last=False))
    assert (side._loop.left, side._loop.wakes) == ([], before + 1)


def test_a_loop_that_does_not_open_its_port_is_named(monkeypatch):
    free, context = threading.Event(), make_context("prefill", f"{HOST}:1", Deadlines())
    monkeypatch.setattr(prefill_side, "_START_TIMEOUT_S", 0.01)
    monkeypatch.setattr(PrefillLinks, "listen", lambda *_: free.wait(60))
    with te.Engine(te.Config(host=HOST)) as engine:
        recorder = Recorder(context, {}, engine.stats, None)
        made = PrefillSide(context, engine, Pool(seed=1).layout(Buffers((), (), ())), recorder)
        try:
            with pytest.raises(TimeoutError, match=r"has not opened its port after 0\.01 s"):
                made.start()
        finally:
            free.set()
            made.close()
