# SPDX-License-Identifier: Apache-2.0
"""The store's executor: what it runs, what it refuses, and what it knows no more."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
from store_makers import TIMEOUT_S, until, without_more_threads

from kvstore.threads import Latch, NoThread, Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    one = Threads(2, "of-a-test")
    yield one
    one.shutdown()
    until(lambda: not running(), "its threads have ended")


def running() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("of-a-test_")]


def test_all_who_wait_for_a_latch_go_on_once_it_is_set(threads: Threads) -> None:
    latch = Latch()
    assert not latch.wait(0.0)
    assert not latch.wait(0.01)
    waiting = [threads.submit(latch.wait, TIMEOUT_S) for _ in range(2)]
    latch.set()
    assert [one.result(TIMEOUT_S) for one in waiting] == [True, True]
    assert latch.wait(0.0)
    with pytest.raises(RuntimeError):
        latch.set()


def test_results_and_what_is_raised_come_to_who_asks(threads: Threads) -> None:
    def bad(_: int) -> None:
        raise ValueError("said by the function")

    assert list(threads.map(pow, range(5), [2] * 5)) == [0, 1, 4, 9, 16]
    with pytest.raises(ValueError, match="said by the function"):
        list(threads.map(bad, [1]))


def test_there_are_no_more_threads_than_were_asked_for(threads: Threads) -> None:
    both = threading.Barrier(3)
    open_ = [threads.submit(both.wait, TIMEOUT_S) for _ in range(4)]
    both.wait(TIMEOUT_S)
    assert len(running()) == 2
    both.wait(TIMEOUT_S)
    assert {one.result(TIMEOUT_S) for one in open_} <= {0, 1, 2}


def test_shutdown_waits_for_what_was_taken_and_takes_no_more(threads: Threads) -> None:
    go_on, done = threading.Event(), []
    threads.submit(go_on.wait, TIMEOUT_S)
    for i in range(5):
        threads.submit(done.append, i)
    threads.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="were ended"):
        threads.submit(done.append, 5)
    go_on.set()
    threads.shutdown()
    assert sorted(done) == [0, 1, 2, 3, 4]


def test_what_has_not_begun_can_be_cancelled(threads: Threads) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> bool:
        begun.release()
        return go_on.wait(TIMEOUT_S)

    held = [threads.submit(hold) for _ in range(2)]
    for _ in held:
        assert begun.acquire(timeout=TIMEOUT_S)
    waiting = [threads.submit(go_on.set) for _ in range(3)]
    assert waiting[0].cancel()
    threads.shutdown(wait=False, cancel_futures=True)
    assert [one.cancelled() for one in (*held, *waiting)] == [False] * 2 + [True] * 3
    assert not go_on.is_set()
    go_on.set()
    threads.shutdown()
    assert [one.result() for one in held] == [True] * 2


def test_nothing_of_the_work_is_known_after_shutdown(threads: Threads) -> None:
    """Memory that it was given can be unmapped then."""

    class Memory:
        def use(self) -> None: ...

    memory = Memory()
    gone = weakref.ref(memory)
    future = threads.submit(memory.use)
    del memory
    threads.shutdown()
    assert future.done()
    assert gone() is None


def test_without_any_thread_it_refuses(threads: Threads) -> None:
    with without_more_threads(), pytest.raises(NoThread, match="none can be started"):
        threads.submit(print)
    threads.begin()
    with without_more_threads():
        assert threads.submit(int).result(TIMEOUT_S) == 0
