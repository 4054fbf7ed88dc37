# SPDX-License-Identifier: Apache-2.0
"""A thread that works for requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from vllm_makers import TIMEOUT_S, until

from sglang_mooncake.vllm.lane import Lane


class Gate:
    """Work that waits until it may go on, and notes what was done."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[int] = []
        self.done: list[int] = []

    def __call__(self, work: int) -> None:
        self.begun.append(work)
        assert self.open.wait(TIMEOUT_S)
        if work < 0:
            raise ValueError("negative")
        self.done.append(work)


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.open.set()


@pytest.fixture
def lane(gate: Gate) -> Iterator[Lane[int]]:
    one = Lane("save", gate, 2)
    yield one
    gate.open.set()
    one.close(TIMEOUT_S)


def test_work_is_done_in_turn(lane: Lane[int], gate: Gate) -> None:
    assert lane.submit("a", 1)
    until(lambda: gate.begun, "the first one begins")
    assert lane.submit("b", 2)
    assert lane.left("a")
    assert lane.left("b")
    assert not lane.left("c")
    gate.open.set()
    until(lambda: not lane.left("b"), "all is done")
    assert gate.done == [1, 2]


def test_too_much_is_refused(lane: Lane[int], gate: Gate) -> None:
    lane.submit("a", 1)
    until(lambda: gate.begun, "the first one begins")
    assert lane.submit("b", 2)
    assert lane.submit("b", 3)
    assert not lane.submit("b", 4)


def test_work_that_raises_stops_nothing(
    lane: Lane[int], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    gate.open.set()
    lane.submit("a", -1)
    lane.submit("b", 2)
    until(lambda: gate.done == [2], "the next one is done")
    assert "a save of request a failed" in caplog.text


def test_what_waits_of_a_request_is_dropped(lane: Lane[int], gate: Gate) -> None:
    lane.submit("a", 1)
    until(lambda: gate.begun, "the first one begins")
    lane.submit("b", 2)
    lane.submit("c", 3)
    lane.drop({"b"}, 0)
    assert not lane.left("b")
    gate.open.set()
    until(lambda: gate.done == [1, 3], "the others are done")


def test_a_drop_waits_for_what_is_under_way(lane: Lane[int], gate: Gate) -> None:
    lane.submit("a", 1)
    until(lambda: gate.begun, "it begins")
    assert not lane.drop({"a"}, 0)
    opener = threading.Timer(0.01, gate.open.set)
    opener.start()
    assert lane.drop({"a"}, TIMEOUT_S)
    assert gate.done == [1]
    opener.join()


def test_an_end_drops_what_waits(gate: Gate) -> None:
    lane = Lane("load", gate, 2)
    lane.submit("a", 1)
    until(lambda: gate.begun, "it begins")
    lane.submit("b", 2)
    with pytest.raises(TimeoutError, match="a load of pages has not ended"):
        lane.close(0)
    assert not lane.submit("c", 3)
    gate.open.set()
    lane.close(TIMEOUT_S)
    lane.close(0)
    assert gate.done == [1]
