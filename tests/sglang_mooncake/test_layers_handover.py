# SPDX-License-Identifier: Apache-2.0
"""Layers that go while the forward goes on, between real engines: what arrives is what the pages
hold once the events have happened, and nothing is taken before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from handover import CANARY, LAYERS, Handover, Pool, handover, until
from te_transports import TRANSPORTS

from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

SOURCES, TARGETS = [3, 9, 4, 20], [11, 12, 2, 30]

over_each = pytest.mark.parametrize("pair", TRANSPORTS, indirect=True)


class Event:
    """Of a stream that gets there when it is told to."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def query(self) -> bool:
        return self._happened.is_set()

    def happen(self) -> None:
        self._happened.set()


class Forward:
    """Fills the pages of a room layer by layer. What is not filled yet is poison."""

    def __init__(self, pair: Handover, pages: list[int]) -> None:
        assert isinstance(pair.source, Pool)
        self.pool, self.pages = pair.source.kv, pages
        self.content = self.pool[:, pages].copy()
        self.pool[:, pages] = 0xBD

    def fill(self, below: int) -> None:
        self.pool[:below, self.pages] = self.content[:below]


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Handover]:
    """Over the transport that the test asks for, or over the best one."""
    transport = getattr(request, "param", None)
    with handover(Config(transports=(transport,) if transport else ())) as ranks:
        ranks.decode.know(ranks.address)
        yield ranks
        used = ranks.prefill.side._recorder.snapshot()["transport"]
        assert transport in (None, used)


def begun(pair: Handover, room: int = 7) -> tuple[Room, Room]:
    source, target = pair.open_both(room)
    pair.name_pages(target, TARGETS, aux=5)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    return source, target


def check(pair: Handover, forward: Forward) -> None:
    assert isinstance(pair.target, Pool)
    assert np.array_equal(pair.target.kv[:, TARGETS], forward.content)
    others = np.delete(pair.target.kv, TARGETS, axis=1)
    assert (others == CANARY).all()


def early_nbytes(pair: Handover) -> int:
    return int(pair.prefill.side._recorder.snapshot()["bytes_early"])


@over_each
@pytest.mark.parametrize("late", [False, True], ids=["filled when told", "events happen later"])
def test_a_forward_hands_over_layer_by_layer(pair, late):
    source, target = begun(pair)
    forward, side = Forward(pair, SOURCES), pair.prefill.side
    events = [Event() for _ in range(LAYERS)]
    pages = np.array(SOURCES)
    for below in range(1, LAYERS):
        if not late:
            forward.fill(below)
            events[below].happen()
        side.send_layers(source, pages, 0, below, [events[below]])
    if late:
        pair.prefill.send(source, SOURCES, 0, 2, [events[0]])
        for below in range(1, LAYERS):
            forward.fill(below)
            events[below].happen()
            until(lambda below=below: early_nbytes(pair) == below * 4 * 512, "they have landed")
            assert not pair.decode.side.has_arrived(target)
        forward.fill(LAYERS)
        events[0].happen()
    else:
        forward.fill(LAYERS)
        pair.prefill.send(source, SOURCES, 0, 2)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    check(pair, forward)
    until(lambda: source.view.state is RoomState.DONE, "the prefill room is done")
    assert early_nbytes(pair) == (LAYERS - 1) * len(SOURCES) * 512
    assert side.by_layers


@over_each
def test_two_chunks_of_a_prompt_each_go_by_layers(pair):
    source, target = begun(pair)
    forward, side = Forward(pair, SOURCES), pair.prefill.side
    forward.fill(LAYERS)
    for first in (0, 2):
        part = SOURCES[first : first + 2]
        side.send_layers(source, np.array(part), first, 1)
        side.send_layers(source, np.array(part), first, 2)
        pair.prefill.send(source, part, first, 2 if first else None)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    check(pair, forward)


@over_each
def test_a_room_does_not_wait_for_the_layers_of_another(pair):
    """With overlap scheduling the next forward is launched, and its layers are announced, before
    the last chunk of this one is sent."""
    source, target = begun(pair)
    others, theirs = pair.open_both(8)
    pair.name_pages(theirs, [1, 3, 5, 6], aux=6)
    until(lambda: others.view.state is RoomState.READY, "the other prefill room is ready")
    next_forward = Event()
    pair.prefill.side.send_layers(others, np.array([1, 2, 5, 6]), 0, 2, [next_forward])
    filled = Event()
    filled.happen()
    pair.prefill.send(source, SOURCES, 0, 2, [filled])
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    until(lambda: source.view.state is RoomState.DONE, "the prefill room is done")
    assert early_nbytes(pair) == 0, "the other one's layers are not filled yet"
    next_forward.happen()
    until(lambda: early_nbytes(pair) == 2 * 4 * 512, "then they go")


def test_pages_that_differ_from_those_announced_arrive_whole(pair):
    source, target = begun(pair)
    forward, side = Forward(pair, SOURCES), pair.prefill.side
    side.send_layers(source, np.array([1, 2, 3, 4]), 0, 2)
    forward.fill(LAYERS)
    pair.prefill.send(source, SOURCES, 0, 2)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    check(pair, forward)
    until(lambda: side._recorder.snapshot()["fallbacks"], "it is counted, after the write began")
    stats = side._recorder.snapshot()
    assert stats["fallbacks"] == {"a chunk was sent with other pages than were announced": 1}


def test_a_layer_that_was_counted_and_not_sent_fails_the_room(pair, monkeypatch):
    """The negative control of completeness."""
    from sglang_mooncake.rooms.layers import EarlyLayers

    announce = EarlyLayers.announce

    def skip(early, filled, next_page):
        announce(early, filled, next_page)
        return range(1, 2)  # layer 0 is believed to be written

    monkeypatch.setattr(EarlyLayers, "announce", skip)
    source, target = begun(pair)
    pair.prefill.side.send_layers(source, np.array(SOURCES), 0, 2)
    pair.prefill.send(source, SOURCES, 0, 2)
    until(lambda: pair.decode.side.has_arrived(target) or target.view.over, "the room ends")
    assert target.view.state is RoomState.FAILED
    assert "layers of pages: 12 asked for, 8 sent" in (target.view.reason or "")


@over_each
def test_a_room_that_is_aborted_in_the_middle_of_a_forward_ends(pair):
    source, target = begun(pair)
    side, never = pair.prefill.side, Event()
    side.send_layers(source, np.array(SOURCES), 0, 1)
    side.send_layers(source, np.array(SOURCES), 0, 2, [never])
    pair.decode.side.abort(target, "the client has gone")
    until(lambda: source.view.over and target.view.over, "both sides let go of the room")
    assert target.view.safe
    never.happen()
    forward = Forward(pair, SOURCES)
    forward.fill(LAYERS)
    other, taken = begun(pair, room=8)
    pair.prefill.send(other, SOURCES, 0, 2)
    until(lambda: pair.decode.side.has_arrived(taken), "the next room has arrived")
    check(pair, forward)


def test_the_rate_at_which_bytes_land_is_measured(pair):
    side = pair.prefill.side
    assert side.bytes_per_s == 0.0
    began_s = time.monotonic()
    for _ in range(2):
        side._recorder.transfer_began(began_s)
        side._recorder.transfer_ended(4 << 20, began_s + 0.5)
        began_s += 1.0
    assert side.bytes_per_s == pytest.approx((4 << 20) / 0.5)
