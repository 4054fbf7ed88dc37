# SPDX-License-Identifier: Apache-2.0
"""The way to another agent's engine: who gets what waits, and when."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from te_far import wait_until

import te
from sglang_mooncake.faces.nixl import links
from sglang_mooncake.faces.nixl.impl import AgentImpl
from sglang_mooncake.faces.nixl.inbox import packed
from sglang_mooncake.faces.nixl.links import Link
from sglang_mooncake.faces.nixl.names import Backend
from sglang_mooncake.faces.nixl.options import Options
from sglang_mooncake.workers import Workers


class Engine:
    """Connects to a new peer each time, or does not."""

    def __init__(self) -> None:
        self.peers: list[SimpleNamespace] = []
        self.problem: Exception | None = None
        self.may_connect = threading.Event()
        self.may_connect.set()

    def connect(self, card: bytes) -> Any:
        assert self.may_connect.wait(60.0)
        if self.problem is not None:
            raise self.problem
        self.peers.append(SimpleNamespace(alive=True))
        return self.peers[-1]


class Job:
    """Notes what becomes of it."""

    def __init__(self, begins: Callable[[Any], None] = lambda peer: None) -> None:
        self._begins = begins
        self.peer: Any = None
        self.problem: Exception | None = None

    def begin(self, peer: Any) -> None:
        self._begins(peer)
        self.peer = peer

    def fail(self, problem: Exception) -> None:
        self.problem = problem


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def link(engine: Engine):
    workers = Workers("test-links", 2, 100)
    yield Link(engine, b"card", workers)
    engine.may_connect.set()
    workers.close()


def sent(link: Link, *jobs: Job) -> None:
    for one in jobs:
        link.send(one)


def test_what_is_sent_while_it_connects_goes_in_order(link: Link, engine: Engine) -> None:
    engine.may_connect.clear()
    began: list[int] = []
    jobs = [Job(lambda peer, i=i: began.append(i)) for i in range(5)]
    sent(link, *jobs)
    assert not began
    engine.may_connect.set()
    wait_until(lambda: len(began) == 5, "all have begun")
    assert began == [0, 1, 2, 3, 4]
    assert len(engine.peers) == 1


def test_a_peer_that_has_gone_gets_nothing_more(link: Link, engine: Engine) -> None:
    """Not even from a thread that is handing over at the time."""
    second = Job()

    def ends(peer: Any) -> None:
        peer.alive = False
        link.send(second)

    first = Job(ends)
    link.send(first)
    wait_until(lambda: second.peer is not None, "the second has begun")
    assert first.peer is engine.peers[0]
    assert second.peer is engine.peers[1]


def test_what_a_peer_that_ends_meanwhile_does_not_take_goes_to_the_next(
    link: Link, engine: Engine
) -> None:
    def ends_first(peer: Any) -> None:
        if peer is engine.peers[0]:
            peer.alive = False
            raise te.ConnectError("the connection has ended")

    first, second = Job(ends_first), Job()
    sent(link, first, second)
    wait_until(lambda: second.peer is not None, "both have begun")
    assert first.peer is second.peer is engine.peers[1]


def test_what_a_full_queue_has_no_room_for_is_tried_again(link: Link) -> None:
    room = threading.Event()

    def full(peer: Any) -> None:
        if not room.is_set():
            raise te.QueueFull("full")

    first, second = Job(full), Job()
    sent(link, first, second)
    link.connect()
    wait_until(lambda: link._peer is not None and not link._is_draining, "it was tried")
    assert first.peer is second.peer is None
    room.set()
    link.drain()
    assert first.peer is second.peer is not None


def test_room_that_comes_while_a_job_is_refused_is_not_missed(link: Link) -> None:
    tries: list[int] = []

    def full_once(peer: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            link.drain()  # As te's thread does meanwhile.
            raise te.QueueFull("full")

    job = Job(full_once)
    link.send(job)
    wait_until(lambda: job.peer is not None, "it has begun")


def test_all_that_wait_hear_that_it_cannot_be_connected(link: Link, engine: Engine) -> None:
    engine.problem = te.ConnectError("refused")
    jobs = [Job(), Job()]
    sent(link, *jobs)
    wait_until(lambda: all(one.problem for one in jobs), "both have failed")
    assert isinstance(link.problem, te.ConnectError)
    engine.problem = None
    third = Job()
    link.send(third)
    wait_until(lambda: third.peer is not None, "it is connected")
    assert link.problem is None


def test_a_connection_for_which_there_is_no_thread_is_tried_again(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*arguments: Any) -> bool:
        raise RuntimeError("can't start new thread")

    first, second = Job(), Job()
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "submit", no_thread)
        link.send(first)
    assert isinstance(first.problem, Backend)
    link.send(second)
    wait_until(lambda: second.peer is not None, "the second has begun")


def test_what_a_job_raises_is_its_own_end(link: Link) -> None:
    def raises(peer: Any) -> None:
        raise te.BoundsError("not registered")

    first, second = Job(raises), Job()
    sent(link, first, second)
    wait_until(lambda: second.peer is not None, "the second has begun")
    assert isinstance(first.problem, te.BoundsError)


def test_what_waits_is_bounded(link: Link, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WAITING_MAX", 2)
    engine.may_connect.clear()
    sent(link, Job(), Job())
    with pytest.raises(Backend, match="wait for this peer"):
        link.send(Job())


def test_notes_of_others_are_left_out_and_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    came = [*[("a stranger", b"\0\0 no sender")] * 100, ("a friend", packed("there", b"done"))]
    notices = SimpleNamespace(take=lambda: came)
    options = Options(open_engine=lambda *_: None, make_notices=lambda _: notices)
    impl = AgentImpl("here", options, SimpleNamespace(id="0" * 32, close=lambda: None))
    with contextlib.closing(impl):
        assert impl.arrived() == [("there", b"done")]
    assert len([one for one in caplog.messages if "a stranger" in one]) == 1
