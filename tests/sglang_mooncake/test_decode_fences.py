# SPDX-License-Identifier: Apache-2.0
"""Fences of the decode side that are not confirmed at once: real engines, and a source whose page
the kernel holds back in the middle of a copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from handover import CANARY, NEVER_S, PAGE_BYTES, WAIT_S, Handover, handover, until
from te_frozen import FrozenMemory, frozen_memory

import te
from sglang_mooncake.fences import Fencer
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

#: Of the first eight pages.
NBYTES = 8 * PAGE_BYTES


@pytest.fixture
def pair() -> Iterator[Handover]:
    with handover() as ranks:
        ranks.decode.know(ranks.address)
        yield ranks


def requested(pair: Handover, room: int, pages: list[int]) -> Room:
    _, target = pair.open_both(room)
    pair.name_pages(target, pages, aux=room)
    until(lambda: target.view.state is RoomState.REQUESTED, "the pages are published")
    return target


@dataclass
class Frozen:
    """A write into a room's first page that waits for a page of its source."""

    memory: FrozenMemory
    transfer: te.Transfer

    def serve(self) -> None:
        self.memory.serve(np.zeros(NBYTES, np.uint8))


@contextmanager
def frozen_write(pair: Handover, room: Room) -> Iterator[Frozen]:
    config = te.Config(transports=("samehost",), stall_timeout_s=NEVER_S)
    with te.Engine(config) as source, frozen_memory(NBYTES) as memory:
        source.register(memory.address, memory.nbytes, remote="none")
        peer = source.connect(pair.decode.engine.card())
        (expected,) = room.view.expected
        # It is open for the engine of the prefill rank, which has written nothing yet.
        pair.decode.engine.fence(expected.tag)
        pair.decode.engine.expect(expected.tag, peer=source)
        # All pages of the room in the first layer: one block that no caller copies by itself.
        blocks = te.Blocks.of(memory.address, pair.target.kv.ctypes.data, NBYTES)
        transfer = peer.write(blocks, tag=expected.tag)
        memory.wait_until_touched()
        yield Frozen(memory, transfer)


def test_a_fence_that_times_out_is_tried_until_it_is_confirmed_and_holds_up_no_other(pair):
    stuck, other = requested(pair, 1, list(range(8))), requested(pair, 2, [9])
    side = pair.decode.side
    with frozen_write(pair, stuck) as frozen:
        side.abort(stuck, "client gone")
        until(lambda: stuck.view.state is RoomState.ENDING, "its end is decided")
        side.abort(other, "client gone, too")
        until(lambda: other.releasable, "the other room does not wait")
        until(lambda: side._fencer._unconfirmed or side._fencer._due, "the fence has timed out")
        pair.complete(3, [7], [10], aux=3)
        assert stuck.view.state is RoomState.ENDING
        assert not stuck.releasable
        with pytest.raises(ValueError, match="is being fenced"):
            pair.decode.engine.expect(stuck.view.expected[0].tag)
        frozen.serve()
        until(lambda: stuck.releasable, "the fence is confirmed")
        assert (stuck.view.state, stuck.view.reason) == (RoomState.ABORTED, "client gone")
        pair.target.kv[0, :8] = CANARY
        with pytest.raises(te.TransferFailed, match="was fenced"):
            frozen.transfer.wait(WAIT_S)
    assert (pair.target.kv[0, :8] == CANARY).all()


def test_of_several_rooms_that_one_lost_link_ends_only_the_one_that_is_stuck_waits(pair):
    uses = [requested(pair, 1, [9]), requested(pair, 2, list(range(8))), requested(pair, 3, [10])]
    with frozen_write(pair, uses[1]) as frozen:
        pair.prefill.close()
        until(lambda: uses[0].releasable and uses[2].releasable, "the others are over")
        assert {uses[0].view.state, uses[2].view.state} == {RoomState.FAILED}
        assert uses[1].view.state is RoomState.ENDING
        assert not uses[1].releasable
        frozen.serve()
        until(lambda: uses[1].releasable, "the last one is over")
        assert uses[1].view.state is RoomState.FAILED
        assert "lost the connection to prefill rank" in (uses[1].view.reason or "")


def test_a_scheduler_that_waits_is_told_whether_the_pages_are_safe(pair):
    stuck = requested(pair, 1, list(range(8)))
    side = pair.decode.side
    with frozen_write(pair, stuck) as frozen:
        side.abort(stuck, "another rank failed")
        assert not side.wait_until_safe(stuck, 0.05)
        served = threading.Timer(0.05, frozen.serve)
        served.start()
        assert side.wait_until_safe(stuck, WAIT_S)
        served.join()
    assert side.wait_until_safe(stuck, 0), "it is over"


@contextmanager
def loop_held(pair: Handover, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loop thread does nothing meanwhile."""
    held, gate = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert gate.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.side.instances, "tick", hold)
        assert held.wait(WAIT_S)
        yield
    gate.set()


@pytest.mark.usefixtures("short_grace")
def test_pages_count_as_exposed_before_the_loop_has_published_them(pair, monkeypatch):
    source, target = pair.open_both(1)
    with loop_held(pair, monkeypatch):
        pair.name_pages(target, [5], aux=0)
        assert not target.releasable, "a write may be asked for at any moment"
        pair.decode.side.abort(target, "another rank failed")
        assert not target.releasable, "only the loop knows whether it has begun to publish them"
    until(lambda: target.releasable, "the room is over")
    assert not target.view.exposed
    assert (target.view.state, target.view.expected) == (RoomState.ABORTED, ())
    until(lambda: source.view.over, "the prefill rank is told")
    assert source.view.reason == "the decode server ended the request: another rank failed"


def test_whatever_a_fence_raises_it_is_tried_again_until_it_is_confirmed(caplog):
    problems = [RuntimeError("a bug"), te.FenceTimeout("late"), OSError("another")]
    tried: list[int] = []
    confirmed: list[Room] = []

    def fence(tag: int, timeout_s: float) -> None:
        tried.append(tag)
        if tag == 1 and problems:
            raise problems.pop(0)

    stuck, other = Room(1, 0.0), Room(2, 0.0)
    fencer = Fencer(fence, confirmed.append, "fences", clock=lambda: 7.0)
    fencer.start()
    with caplog.at_level(logging.WARNING):
        fencer.close_tags(stuck, (1, 2))
        fencer.close_tags(other, (3,))
        until(lambda: other in confirmed, "the other room is over")
        until(lambda: fencer.retry() or stuck in confirmed, "it is over, too")
    fencer.close()
    assert tried == [1, 2, 3, 1, 1, 1], "what is confirmed is not fenced again"
    assert confirmed == [other, stuck]
    (problem, late) = caplog.records
    assert "RuntimeError: a bug" in caplog.text
    assert "so they stay reserved" in problem.message
    assert (
        late.message
        == "room 1: the fence was confirmed at attempt 4, after 0.0 s; its pages can be reused"
    )


def test_a_fence_that_stays_unconfirmed_is_named_again_with_the_time(caplog):
    now_s, tries = [100.0], [0]

    def fence(tag: int, timeout_s: float) -> None:
        tries[0] += 1
        raise te.FenceTimeout("stuck")

    def tried_again() -> None:
        before = tries[0]
        until(lambda: fencer.retry() or tries[0] > before, "it is tried again")

    fencer = Fencer(fence, lambda room: None, "fences", clock=lambda: now_s[0])
    fencer.start()
    fencer.close_tags(Room(1, 0.0), (1,))
    tried_again()
    tried_again()
    now_s[0] += 10.0
    tried_again()
    tried_again()
    fencer.close()
    said = [record.message for record in caplog.records]
    assert [message.split(". Writes")[0] for message in said] == [
        "room 1: the fence of tag 0x1 is not confirmed after 0.0 s",
        "room 1: the fence of tag 0x1 is not confirmed after 10.0 s",
    ]
