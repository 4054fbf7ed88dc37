# SPDX-License-Identifier: Apache-2.0
"""Memory that peers on this host have mapped, while links, registrations and their ends race."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from te_far import wait_until
from te_raw import RAW_ID, TIMEOUT_S, host_welcome, open_greeting, take_call, welcome

import te
from te.connect.greeting import GREETING, Proven
from te.core.engine import Engine as Plane
from te.handshake import PROTOCOL_VERSION, Card, decode_body, encode
from te.transports.samehost._core import SamehostLink
from te.transports.samehost.messages import HostHello
from te.transports.samehost.sharing import SharedMemory, Shares, Sharing

PAGE = 4096
#: Of engines, unless a test is about it: a thread may stand still for seconds.
PATIENT = te.Config(
    transports=("samehost",), connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S
)


class HeldDestination:
    """An engine by hand, on this host: it welcomes a link, and keeps words about memory waiting."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"\0te-{RAW_ID}")
        self.listener.listen(16)
        #: (serial, number, whether it is to be mapped), in the order in which they came.
        self.words: list[tuple[int, int, bool]] = []
        self.may_answer = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._kept: list[socket.socket] = []
        self._answering: list[threading.Thread] = []
        self._thread.start()

    def card(self) -> bytes:
        return encode(
            Card(
                protocol=PROTOCOL_VERSION,
                id=RAW_ID,
                epoch=1,
                host="127.0.0.1",
                port=1,
                offers={"samehost": b""},
                regions=[],
            )
        )

    def close(self) -> None:
        self.may_answer.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(TIMEOUT_S)
        for thread in self._answering:
            thread.join(TIMEOUT_S)
        for sock in (self.listener, *self._kept):
            sock.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        turn = take_call(sock)
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        for fd in fds:
            os.close(fd)
        proven = open_greeting(data[GREETING.size :], turn)
        shared = decode_body(proven.hello.body, HostHello).shared
        if shared is None:
            self._kept.append(sock)
            sock.sendall(host_welcome(proven))
            return
        self.words.append((shared.serial, shared.number, bool(fds)))
        self._answering.append(threading.Thread(target=self._answer, args=[sock, proven]))
        self._answering[-1].start()

    def _answer(self, sock: socket.socket, proven: Proven) -> None:
        with sock, contextlib.suppress(OSError):
            if self.may_answer.wait(TIMEOUT_S):
                sock.sendall(welcome(proven))


@contextlib.contextmanager
def running(function: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(TIMEOUT_S)


@pytest.fixture
def held() -> Iterator[HeldDestination]:
    destination = HeldDestination()
    yield destination
    destination.close()


def test_memory_deregistered_while_a_link_is_being_made_is_unmapped(
    held: HeldDestination,
) -> None:
    with te.Engine(PATIENT) as engine:
        region = engine.register(te.allocate(PAGE))
        with running(lambda: engine.connect(held.card())) as connecting:
            wait_until(lambda: held.words, "the peer is told to map it")
            # The engine has no peer yet, but there is one that may have it mapped.
            with running(lambda: engine.deregister(region)) as deregistering:
                wait_until(lambda: not engine._memory.regions, "it is taken away")
                assert deregistering.is_alive()
                held.may_answer.set()
            assert not deregistering.is_alive()
        assert not connecting.is_alive()
    assert held.words == [(region.serial, 1, True), (region.serial, 2, False)]


def test_memory_deregistered_while_it_is_being_shared_with_a_peer_is_unmapped(
    held: HeldDestination,
) -> None:
    with te.Engine(PATIENT) as engine:
        engine.connect(held.card())
        memory = te.allocate(PAGE)
        with running(lambda: engine.register(memory)):
            wait_until(lambda: held.words, "the peer is told to map it")
            region = engine._memory.regions[0]
            with running(lambda: engine.deregister(region)):
                wait_until(lambda: not engine._memory.regions, "it is taken away")
                held.may_answer.set()
    assert held.words == [(region.serial, 1, True), (region.serial, 2, False)]


@pytest.mark.slow
def test_a_peer_that_does_not_confirm_loses_its_link(held: HeldDestination) -> None:
    with te.Engine(replace(PATIENT, connect_timeout_s=3.0)) as engine:  # It may read late.
        peer = engine.connect(held.card(), TIMEOUT_S)
        region = engine.register(te.allocate(PAGE))
        assert peer.alive  # Without the mapping it works, only slower.
        engine.deregister(region)
        assert not peer.alive
    # It was asked nevertheless: it may have done what it did not confirm.
    wait_until(lambda: len(held.words) == 2, "it was asked")
    assert held.words == [(region.serial, 1, True), (region.serial, 2, False)]


@pytest.mark.pure
def test_registering_waits_once_for_each_peer_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And for all of them together not longer than for one."""
    now_s, asked = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("te.transports.samehost.sharing.time", clock)
    export: Any = SimpleNamespace(parts=lambda: [None])
    memory = [SharedMemory(serial, PAGE, PAGE, export) for serial in range(3)]
    sharing = Sharing(lambda: tuple(memory))

    def attach(name: str, answers: bool) -> None:
        def say(one: SharedMemory, _turn: int, _part: object, deadline_s: float) -> str | None:
            asked.append((name, one.serial))
            now_s[0] += 0.1 if answers else deadline_s - now_s[0]
            return None if answers else "no answer in time"

        link: Any = SimpleNamespace(alive=True, mapped_by_peer=lambda *_: None)
        sharing.attach(Shares(link, say))

    for name, answers in (("stopped", False), ("stopped too", False), ("well", True)):
        attach(name, answers)
    for one in memory:
        sharing.add(one, 5.0)
    assert asked == [("stopped", 0), ("stopped too", 1), ("well", 2)]
    assert now_s == [10.1]


def test_a_region_at_the_address_of_an_earlier_one_is_copied_from_its_own_memory() -> None:
    """Register, write, deregister, register another at once, beside a thread that connects."""
    landing = np.zeros(PAGE, np.uint8)
    config = te.Config(connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
    with te.Engine(config) as source, te.Engine(config) as target:
        there = target.register(landing, remote="read-write")
        for turn in range(1, 30):
            memory = te.allocate(PAGE)
            with running(lambda: source.connect(target.card())):
                region = source.register(memory)
            memory[:] = bytes([turn]) * PAGE
            peer = source.connect(target.card())
            blocks = te.Blocks.of(region.address, there.address, PAGE)
            assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
            assert (landing == turn).all()
            source.deregister(region)
            del memory, region
            if turn % 3 == 0:
                peer.close()


def test_a_link_that_is_collected_with_its_engine_goes_first() -> None:
    """The collector clears what objects of a cycle refer to in any order; it must not take the
    engine from a link that has memory mapped."""
    memory = te.allocate(PAGE)
    for keep in (0, 1):
        plane = Plane(1, 1.0, 1.0, 0.0, 1 << 20, 16)
        link = SamehostLink(plane, True, os.getpid(), os.pidfd_open(os.getpid()), 1, bytes(16))
        link.add_mapping(1, PAGE, memory.fd, PAGE)
        cycle: list[object] = [link, plane] if keep else [plane, link]
        cycle.append(cycle)
        del link, plane, cycle
        gc.collect()
