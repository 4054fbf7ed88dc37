# SPDX-License-Identifier: Apache-2.0
"""Threads for what blocks: how many there are, and until when they work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from te_far import wait_until

from te.connect.pool import THREADS_MAX, Pool

ROOT = Path(__file__).parents[2]
NEVER_S = 1_000.0


@pytest.fixture
def pool() -> Iterator[Pool]:
    one = Pool("of-a-test")
    yield one
    one.stop()
    wait_until(lambda: not threads(), "its threads have ended")


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("of-a-test_")]


def test_each_function_that_blocks_has_a_thread_up_to_a_bound(pool: Pool) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)
    ended = threading.Semaphore(0)

    def block() -> None:
        begun.release()
        assert go_on.wait(NEVER_S)
        ended.release()

    for _ in range(THREADS_MAX + 5):
        assert pool.run(block)
    for _ in range(THREADS_MAX):
        assert begun.acquire(timeout=NEVER_S)
    assert len(threads()) == THREADS_MAX
    assert not begun.acquire(blocking=False)
    go_on.set()
    for _ in range(THREADS_MAX + 5):
        assert ended.acquire(timeout=NEVER_S)


def test_a_thread_that_has_done_is_used_again(pool: Pool) -> None:
    done = threading.Event()
    assert pool.run(done.set)
    assert done.wait(NEVER_S)
    (thread,) = threads()
    wait_until(lambda: pool._idle, "the thread has done")
    seen: list[threading.Thread] = []
    again = threading.Event()
    assert pool.run(lambda: (seen.append(threading.current_thread()), again.set())[1])
    assert again.wait(NEVER_S)
    assert seen == [thread]


def test_what_raises_is_logged_and_the_next_one_runs(pool: Pool, caplog) -> None:
    def bad() -> None:
        raise ValueError("said by the function")

    done = threading.Event()
    assert pool.run(bad)
    assert pool.run(done.set)
    assert done.wait(NEVER_S)
    pool.stop()
    wait_until(lambda: not threads(), "its threads have ended")
    assert "a bug in of-a-test" in caplog.text
    assert "said by the function" in caplog.text


def test_what_has_not_begun_when_it_is_stopped_never_does(pool: Pool) -> None:
    go_on, begun, ran = threading.Event(), threading.Semaphore(0), threading.Event()

    def block() -> None:
        begun.release()
        assert go_on.wait(NEVER_S)

    for _ in range(THREADS_MAX):
        pool.run(block)
    for _ in range(THREADS_MAX):
        assert begun.acquire(timeout=NEVER_S)
    pool.run(ran.set)
    pool.stop()
    go_on.set()
    wait_until(lambda: not threads(), "its threads have ended")
    assert not ran.is_set()
    assert not pool.run(ran.set)


def cannot_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_where_no_thread_can_be_started_those_that_there_are_do_it(pool: Pool, monkeypatch) -> None:
    go_on, begun, done = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert go_on.wait(NEVER_S)

    assert pool.run(block)
    assert begun.wait(NEVER_S)
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    assert pool.run(done.set)
    assert not done.is_set()
    go_on.set()
    assert done.wait(NEVER_S)
    assert len(threads()) == 1


def test_without_any_thread_it_takes_nothing_until_one_starts(
    pool: Pool, monkeypatch, caplog
) -> None:
    ran, done = threading.Event(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        assert not pool.run(ran.set)
    assert "of-a-test cannot start a thread, and has none: can't start" in caplog.text
    assert pool.run(done.set)
    assert done.wait(NEVER_S)
    assert not ran.is_set()


@pytest.mark.slow
def test_it_works_while_the_interpreter_ends() -> None:
    code = """
import atexit, threading
from te.connect.pool import Pool

pool = Pool("p")

def at_end():
    done = threading.Event()
    assert pool.run(done.set)
    assert done.wait(60.0)
    print("it ran")

atexit.register(at_end)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # A sanitizer is preloaded by it.
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    assert (done.returncode, done.stdout) == (0, "it ran\n"), done.stderr
