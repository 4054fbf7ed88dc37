# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may block: bounded, in order, and none of them all one owner's."""

from __future__ import annotations

import queue
import threading
from contextlib import closing

from handover import WAIT_S, until

from sglang_mooncake.workers import Workers


def test_a_call_that_blocks_leaves_the_other_threads_to_others():
    gate, done = threading.Event(), queue.Queue()
    with closing(Workers("test", threads=2, calls_max=9, of_one_owner=1)) as workers:
        for number in range(3):
            workers.submit(lambda _, n=number: done.put(("slow", n, gate.wait(WAIT_S))), "slow")
        workers.submit(lambda _: done.put("fast"), "fast")
        assert done.get(timeout=WAIT_S) == "fast"
        until(lambda: len(workers) == 3, "it is over")
        gate.set()
        assert [done.get(timeout=WAIT_S) for _ in range(3)] == [("slow", n, True) for n in range(3)]
        until(lambda: len(workers) == 0, "all are over")


def test_so_many_calls_wait_and_no_more():
    gate, done = threading.Event(), queue.Queue()
    with closing(Workers("test", threads=1, calls_max=2)) as workers:
        assert workers.submit(lambda _: done.put(gate.wait(WAIT_S)))
        assert workers.submit(lambda _: done.put("second"))
        assert not workers.submit(lambda _: done.put("third"))
        gate.set()
        assert [done.get(timeout=WAIT_S), done.get(timeout=WAIT_S)] == [True, "second"]
        until(lambda: len(workers) == 0, "there is room again")
        assert workers.submit(lambda _: done.put("fourth"))
        assert done.get(timeout=WAIT_S) == "fourth"


def test_a_call_is_told_how_long_it_has_waited():
    gate, done, now_s = threading.Event(), queue.Queue(), [10.0]
    with closing(Workers("test", 1, 2, clock=lambda: now_s[0])) as workers:
        workers.submit(lambda waited_s: done.put((waited_s, gate.wait(WAIT_S))))
        workers.submit(lambda waited_s: done.put((waited_s, True)))
        now_s[0] = 13.0
        gate.set()
        done.get(timeout=WAIT_S)  # whose thread may have begun on either side of that
        assert done.get(timeout=WAIT_S) == (3.0, True)


def test_a_call_that_raises_is_logged_and_leaves_its_thread_to_the_next(caplog):
    done = queue.Queue()
    with closing(Workers("test", threads=1, calls_max=9)) as workers:
        workers.submit(lambda _: 1 // 0)
        workers.submit(lambda _: done.put("next"))
        assert done.get(timeout=WAIT_S) == "next"
        until(lambda: len(workers) == 0, "both are over")
    assert "a call in the worker threads test raised" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_nothing_begins_after_the_end():
    gate, done = threading.Event(), queue.Queue()
    with closing(Workers("test", 1, 9)) as workers:
        workers.submit(lambda _: done.put(gate.wait(WAIT_S)))
        workers.submit(lambda _: done.put("second"))
    assert workers.submit(lambda _: done.put("third"))
    gate.set()
    assert done.get(timeout=WAIT_S) is True
    until(lambda: not any(t.name.startswith("test_") for t in threading.enumerate()), "all end")
    assert done.empty()
