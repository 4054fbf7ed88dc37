# SPDX-License-Identifier: Apache-2.0
"""The loop thread: order, and that no single error ends it."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import zmq
from handover import HOST, PATIENT, WAIT_S, until
from te_ports import two_ports

from sglang_mooncake.control import ControlLoop
from sglang_mooncake.links.sockets import PortsTaken, open_dealer, open_router


class Poison:
    pass


class Log:
    """A handler that notes what it is given."""

    def __init__(self):
        self.seen, self.ticks = [], 0
        self.threads = set()
        self.is_stopped = threading.Event()

    def started(self, loop):
        self.threads.add(threading.get_ident())

    def on_stimulus(self, stimulus, now_s):
        self.threads.add(threading.get_ident())
        if isinstance(stimulus, Poison):
            raise ValueError("poison")
        self.seen.append(stimulus)

    def on_tick(self, now_s):
        self.ticks += 1
        if self.ticks == 1:
            raise ValueError("a bad first tick")

    def stopped(self):
        self.threads.add(threading.get_ident())
        self.is_stopped.set()


@pytest.fixture
def loop():
    made = ControlLoop("test", Log())
    made.log = made._handler
    made.start()
    yield made
    made.close()
    assert made.log.is_stopped.is_set()
    assert len(made.log.threads) == 1


def test_stimuli_arrive_in_order_from_each_thread(loop):
    def post(name):
        for i in range(500):
            loop.post((name, i))

    threads = [threading.Thread(target=post, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(loop.log.seen) == 2000, "all stimuli arrive")
    for name in range(4):
        assert [i for n, i in loop.log.seen if n == name] == list(range(500))


def test_what_was_left_comes_with_the_next_wake_or_tick_in_order(loop):
    loop.leave("left")
    loop.post("posted")
    until(lambda: loop.log.seen == ["left", "posted"], "a post brings what was left")
    loop.leave("alone")
    until(lambda: loop.log.seen[-1] == "alone", "a tick finds what nobody woke the loop for")


def test_an_error_does_not_end_the_loop(loop, caplog):
    loop.post(Poison())
    loop.post("after")
    until(lambda: loop.log.seen == ["after"], "the loop goes on")
    assert "ValueError: poison" in caplog.text


def test_ticks_go_on_after_one_that_failed(loop):
    until(lambda: loop.log.ticks >= 3, "ticks go on")


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_sockets_talk_both_ways_and_a_broken_connection_is_reported(host):
    from zmq.utils.monitor import recv_monitor_message

    with zmq.Context() as context:
        router, port = open_router(context, host, 1000, deadlines=PATIENT)
        dealer, monitor = open_dealer(context, host, port, PATIENT, 1000)
        try:
            dealer.send(b"hello")
            identity, frame = router.recv_multipart()
            assert frame == b"hello"
            router.send_multipart([identity, b"welcome"])
            assert dealer.recv() == b"welcome"
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_CONNECTED
            assert not monitor.poll(0)
            router.close(linger=0)
            assert monitor.poll(WAIT_S * 1000), "the dealer's monitor tells"
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
        finally:
            dealer.disable_monitor()
            for socket in (monitor, dealer, router):
                socket.close(linger=0)


def test_a_control_socket_listens_on_the_first_free_port_of_its_range():
    with two_ports(1) as first, zmq.Context() as context:
        ports = (first, first + 1)
        router, port = open_router(context, HOST, 1 << 20, ports)
        try:
            assert port == first + 1
            with pytest.raises(PortsTaken, match=f"from {first} to {first + 1} is free"):
                open_router(context, HOST, 1 << 20, ports)
        finally:
            router.close(linger=0)


def test_a_loop_that_was_closed_gives_its_descriptor_back(monkeypatch):
    """A server that changes its role makes a new one each time."""
    closed, close = [], os.close
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
    handler = Log()
    handler.ticks = 1  # An error's traceback would keep the loop.
    loop = ControlLoop("test", handler)
    fd = loop._eventfd
    loop.start()
    loop.close()
    loop.post("late")
    assert fd not in closed
    del loop
    gc.collect()
    assert fd in closed
