# SPDX-License-Identifier: Apache-2.0
"""Tasks in a thread: each has one result, and an event file descriptor tells of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from lmcache_makers import TIMEOUT_S, is_readable, told

from kvstore.lmcache import tasks
from kvstore.lmcache.tasks import Lane, Results


class Held:
    """What a lane does: it holds each task until it may go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.done: list[str] = []

    def __call__(self, work: str) -> str | None:
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        self.done.append(work)
        if work == "wrong":
            raise ValueError("wrong")
        return None if work == "untold" else f"did {work}"


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def lane(held: Held) -> Iterator[Lane[str, str]]:
    one: Lane[str, str] = Lane("test", held, lambda work: f"failed {work}")
    yield one
    held.go_on.set()
    one.close(TIMEOUT_S)


def take(lane: Lane[str, str], task: int) -> str:
    return told(lane.results.event_fd, lambda: lane.results.take(task))


def test_a_result_is_told_and_taken_once(lane: Lane[str, str], held: Held) -> None:
    lane.submit(7, "a")
    assert held.begun.wait(TIMEOUT_S)
    assert not is_readable(lane.results.event_fd)
    assert lane.results.take(7) is None
    held.go_on.set()
    assert take(lane, 7) == "did a"
    assert lane.results.take(7) is None


def test_all_results_at_once() -> None:
    results: Results[str] = Results()
    results.put(1, "a")
    results.put(2, "b")
    assert results.take_all() == {1: "a", 2: "b"}
    assert results.take_all() == {}
    results.close()


def test_what_raises_has_failed_and_the_next_task_is_done(lane: Lane[str, str], held: Held) -> None:
    held.go_on.set()
    lane.submit(1, "wrong")
    lane.submit(2, "b")
    assert take(lane, 2) == "did b"
    assert lane.results.take(1) == "failed wrong"


def test_a_task_without_a_result_is_never_told(lane: Lane[str, str], held: Held) -> None:
    held.go_on.set()
    lane.submit(1, "untold")
    lane.submit(2, "b")
    assert take(lane, 2) == "did b"
    assert lane.results.take(1) is None


def test_with_too_many_that_wait_a_task_fails_at_once(
    lane: Lane[str, str], held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    lane.submit(0, "first")
    assert held.begun.wait(TIMEOUT_S)
    for task in range(1, 1 + tasks.TASKS_MAX):
        lane.submit(task, str(task))
    assert lane.results.take_all() == {}
    lane.submit(5000, "one more")
    assert take(lane, 5000) == "failed one more"
    assert f"{tasks.TASKS_MAX} wait already" in caplog.text


def test_closing_fails_what_waits_and_ends_what_is_under_way(
    lane: Lane[str, str], held: Held
) -> None:
    lane.submit(1, "a")
    assert held.begun.wait(TIMEOUT_S)
    lane.submit(2, "b")
    closing = threading.Thread(target=lane.close, args=(TIMEOUT_S,))
    closing.start()
    assert take(lane, 2) == "failed b"
    lane.submit(3, "c")
    assert take(lane, 3) == "failed c"
    held.go_on.set()
    closing.join(TIMEOUT_S)
    assert held.done == ["a"]
    assert lane.results.take(1) == "did a"
    lane.close(TIMEOUT_S)


def test_closing_does_not_wait_for_ever(lane: Lane[str, str], held: Held) -> None:
    lane.submit(1, "a")
    assert held.begun.wait(TIMEOUT_S)
    with pytest.raises(TimeoutError, match="a test has not ended for"):
        lane.close(0.01)


def test_a_result_after_closing_has_no_effect() -> None:
    results: Results[str] = Results()
    results.close()
    results.put(1, "a")
    results.close()
    assert results.take(1) is None


def test_results_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RESULTS_MAX", 3)
    results: Results[str] = Results()
    for task in range(5):
        results.put(task, str(task))
    assert results.take_all() == {2: "2", 3: "3", 4: "4"}
    results.close()
