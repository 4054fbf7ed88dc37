# SPDX-License-Identifier: Apache-2.0
"""Reads that do not stop when they are cancelled: their memory stays theirs until they have."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_makers import until

import te
from kvstore.client.reading import ROOMS, Group, HeaderRoom, HeaderRooms, Source, cancel
from kvstore.objects.headers import HEADER
from kvstore.objects.outcomes import Got
from kvstore.store import StillLanding


class Read:
    """Some of its cancellations are in vain; each takes a second."""

    nbytes = 64

    def __init__(self, in_vain: int = 0) -> None:
        self.in_vain, self.cancelled, self.now_s = in_vain, 0, 0.0

    def wait(self, timeout_s: float) -> te.Status:
        raise te.WaitTimeout(f"no outcome after {timeout_s} s")

    def cancel(self) -> None:
        self.cancelled += 1
        self.now_s += 1.0
        if self.cancelled <= self.in_vain:
            raise te.FenceTimeout("a landing did not end")

    def clock(self) -> float:
        return self.now_s


class Rooms:
    """One room for headers."""

    def __init__(self) -> None:
        self.free = 1

    def take(self, timeout_s: float) -> HeaderRoom:
        self.free -= 1
        return HeaderRoom(4096, np.zeros(1, HEADER), self.give_back)

    def give_back(self) -> None:
        self.free += 1


def group_of(number: int, *reads: Read, room: HeaderRoom | None = None) -> Group:
    """``reads`` are under way; a look at headers gets the last one."""
    peer: Any = SimpleNamespace(read=lambda _: reads[-1])
    source = Source(number, peer, 0, 0)
    transfers: Any = list(reads)
    return Group(source, [0], np.zeros(1, np.uint64), np.zeros(1, HEADER), transfers, room=room)


def test_all_reads_are_cancelled_though_the_first_does_not_stop() -> None:
    rooms, others = (Rooms(), Rooms()), [Read(), Read(), Read()]
    stuck = Read(in_vain=2)
    groups = [
        group_of(1, stuck, others[0], room=rooms[0].take(0.0)),
        group_of(2, others[1], others[2], room=rooms[1].take(0.0)),
    ]
    with pytest.raises(te.FenceTimeout, match=r"1 reads of 64 bytes .* \(1\) did not stop") as told:
        cancel(groups)
    assert isinstance(told.value, StillLanding)
    assert told.value.transfers == [stuck]
    assert [one.cancelled for one in others] == [1] * 3
    assert [one.free for one in rooms] == [0, 1], "headers may still land in the first one"
    told.value.wait(stuck.clock)
    assert stuck.cancelled == 3, "it returned once nothing lands, and not before"
    assert told.value.transfers == []
    assert rooms[0].free == 1


def test_what_is_waited_for_is_said_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Read(in_vain=25)
    with pytest.raises(StillLanding) as told:
        group_of(7, stuck).cancel()
    told.value.wait(stuck.clock)
    assert stuck.cancelled == 26
    said = "until nothing lands any more in the memory of a get: 1 reads of 64 bytes from owners"
    assert [said in one.getMessage() for one in caplog.records] == [True] * 3


class Engine:
    """Registers memory for headers."""

    def register(self, buffer: Any, *, remote: str) -> te.Region:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        return te.Region(address, len(buffer), "host", 1, buffer, remote=remote)


def test_each_read_has_headers_of_its_own() -> None:
    engine: Any = Engine()
    rooms = HeaderRooms(lambda: engine)
    taken = [rooms.take(0.0) for _ in range(ROOMS)]
    for number, one in enumerate(taken):
        assert one is not None
        assert one.records.ctypes.data == one.address
        one.records["nbytes"] = number
    assert [set(one.records["nbytes"].tolist()) for one in taken if one] == [{i} for i in range(16)]
    assert rooms.take(0.0) is None


def test_who_waits_for_memory_for_headers_gets_what_is_given_back() -> None:
    engine: Any = Engine()
    rooms = HeaderRooms(lambda: engine)
    taken = [rooms.take(0.0) for _ in range(ROOMS)]
    with ThreadPoolExecutor(2) as pool:
        later = [pool.submit(rooms.take, 30.0) for _ in range(2)]
        until(lambda: rooms._waiting == 2)
        for one in taken[3:5]:
            assert one is not None
            one.give_back()
        assert {one.address for one in map(Future.result, later) if one} == {
            one.address for one in taken[3:5] if one
        }
    assert rooms.take(0.01) is None


def test_headers_that_come_late_come_to_nobody_elses_memory() -> None:
    rooms, stuck = Rooms(), Read(in_vain=1)
    group = group_of(1, stuck)
    looks_at: Any = rooms
    group.transfers.clear()
    with pytest.raises(StillLanding) as told:
        group.check(looks_at, time.monotonic())
    assert group.failed is Got.TIMED_OUT
    assert rooms.free == 0
    told.value.wait()
    assert rooms.free == 1
