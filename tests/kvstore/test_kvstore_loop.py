# SPDX-License-Identifier: Apache-2.0
"""The loop outlives bugs in what it calls, and calls nothing after its end."""

from __future__ import annotations

import threading

import pytest
import zmq
from store_makers import TIMEOUT_S

from kvstore.loop import Loop


def test_a_bug_in_one_callback_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    ticks, called, ended = threading.Event(), threading.Event(), threading.Event()
    loop = Loop("test", 0.01, ticks.set)
    loop.start(ended.set)

    def bug() -> None:
        raise RuntimeError("on purpose")

    loop.call(bug)
    loop.call(called.set)
    assert called.wait(TIMEOUT_S)
    assert ticks.wait(TIMEOUT_S)
    loop.stop()
    assert ended.is_set()
    assert "on purpose" in caplog.text
    loop.stop()
    late = threading.Event()
    loop.call(late.set)
    assert not late.is_set()


def test_sockets_are_read_until_they_are_removed() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://pair")
    there.connect("inproc://pair")
    got: list[bytes] = []
    heard, removed = threading.Event(), threading.Event()

    def read() -> None:
        got.append(here.recv())
        heard.set()

    loop = Loop("test", 10.0, lambda: None)
    loop.add(here, read)
    loop.start(lambda: None)
    there.send(b"one")
    assert heard.wait(TIMEOUT_S)

    def remove() -> None:
        loop.remove(here)
        removed.set()

    loop.call(remove)
    assert removed.wait(TIMEOUT_S)
    there.send(b"two")
    loop.stop()
    assert got == [b"one"]
    context.destroy(linger=0)
