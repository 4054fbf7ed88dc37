# SPDX-License-Identifier: Apache-2.0
"""The loop outlives bugs in what it calls, and calls nothing after its end."""

from __future__ import annotations

import threading

import pytest
import zmq
from store_makers import TIMEOUT_S

from kvstore.protocol.loop import Loop


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


def test_what_comes_while_a_socket_is_used_otherwise_is_read_all_the_same() -> None:
    """Sending takes in what the kernel has told of: nobody tells of it again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://pair")
    there.connect("inproc://pair")
    got: list[bytes] = []
    heard = threading.Event()

    def read() -> None:
        got.append(here.recv(zmq.NOBLOCK))  # One of several each time.
        if len(got) == 6:
            heard.set()

    loop = Loop("test", 3600.0, lambda: None)
    loop.add(here, read)
    loop.start(lambda: None)

    def send_late() -> None:
        for number in range(3):
            there.send(b"%d" % number)
        assert here.getsockopt(zmq.EVENTS) & zmq.POLLIN, "as a send does now and then"
        here.send(b"answer")
        loop.has_sent(here)

    for _ in range(2):
        loop.call(send_late)
    assert heard.wait(TIMEOUT_S)
    loop.stop()
    assert got == [b"0", b"1", b"2"] * 2
    context.destroy(linger=0)


def test_a_socket_with_the_number_of_one_that_was_removed_is_another() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    got: list[int] = []
    heard = [threading.Event() for _ in range(5)]
    loop = Loop("test", 3600.0, lambda: None)
    loop.start(lambda: None)

    def pair(number: int) -> None:
        here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        here.bind(f"inproc://pair-{number}")
        there.connect(f"inproc://pair-{number}")
        there.send(b"%d" % number)

        def read() -> None:
            got.append(int(here.recv(zmq.NOBLOCK)))
            loop.remove(here)
            here.close()
            there.close()
            heard[number].set()

        loop.add(here, read)

    for number, one in enumerate(heard):
        loop.call(lambda number=number: pair(number))  # type: ignore[misc]
        assert one.wait(TIMEOUT_S)
    loop.stop()
    assert got == list(range(len(heard)))
    context.destroy(linger=0)
