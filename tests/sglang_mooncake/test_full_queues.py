# SPDX-License-Identifier: Apache-2.0
"""Queues between ranks that are full: whoever waits at the other end hears of it, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from handover import WAIT_S, DecodeRank, Handover, handover, until

from sglang_mooncake.context import Deadlines
from sglang_mooncake.messages import RoomFailed
from sglang_mooncake.rooms.states import RoomState

#: More than both sockets' queues and the kernel's buffers between them hold of these.
FLOOD = 60_000
#: With the default ones a rank that takes nothing in for 2 s is lost by them: zmq reads no more of
#: its connection then. This is about one that is slow for less, or must never be taken for dead.
NO_HEARTBEATS = Deadlines(heartbeat_failures_max=10_000_000)
OF_NO_ROOM = RoomFailed(999, 1, "x" * 1_000)


@contextmanager
def held(decode: DecodeRank) -> Iterator[Callable[[], None]]:
    """The decode rank's loop stands still, until what is given is called: it reads no socket, and
    zmq's own thread goes on to answer heartbeats."""
    stands, free, tick = threading.Event(), threading.Event(), decode.side.on_tick

    def stand(now_s: float) -> None:
        stands.set()
        assert free.wait(2 * WAIT_S)
        tick(now_s)

    decode.side.on_tick = stand  # type: ignore[method-assign]
    try:
        assert stands.wait(WAIT_S)
        yield free.set
    finally:
        free.set()


def flood(pair: Handover) -> None:
    """Fills the queue to the decode rank, on the thread that may."""
    side, done = pair.prefill.side, threading.Event()
    (destination,) = side._links._destinations
    tick = side.on_tick

    def send(now_s: float) -> None:
        side.on_tick = tick  # type: ignore[method-assign]
        for _ in range(FLOOD):
            side._links.send(destination.key, OF_NO_ROOM)
        done.set()

    side.on_tick = send  # type: ignore[method-assign]
    assert done.wait(2 * WAIT_S)


@pytest.mark.slow
def test_a_decode_rank_that_takes_no_messages_in_hears_so_as_soon_as_it_does(caplog):
    """What it was to be told is lost: its rooms must not wait for their own deadlines."""
    with handover(deadlines=NO_HEARTBEATS) as pair:
        pair.decode.know(pair.address)
        source, target = pair.open_both(1)
        pair.name_pages(target, [3], 1)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        with held(pair.decode) as go_on:
            flood(pair)
            assert caplog.text.count("does not read its messages") == 1, "a line for all of them"
            until(lambda: source.view.over, "the prefill room ends")
            assert source.view.state is RoomState.FAILED
            assert "does not read its messages: 10000 are queued" in str(source.view.reason)
            assert target.view.state is RoomState.REQUESTED
            go_on()
            until(lambda: target.view.over, "the decode room ends")
        assert target.view.state is RoomState.FAILED
        assert "does not read its messages: 10000 are queued" in str(target.view.reason)
        until(lambda: not pair.prefill.side._links._unsaid, "nothing is left to say")
        pair.complete(2, [5], [6], 2)
