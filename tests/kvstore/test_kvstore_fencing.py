# SPDX-License-Identifier: Apache-2.0
"""Writes that do not end keep nobody waiting but the client that said they had."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_makers import SIG, TIMEOUT_S, keys, until
from store_meeting import endpoints
from store_objects import NBYTES

import te
from kvstore.owner import fencing as fencing_module
from kvstore.owner.fencing import PAUSE_S, PAUSE_S_MAX, Fencing, pause_s
from kvstore.protocol.asking import Asker
from kvstore.protocol.messages import Answer, Claim, Granted, Publish, Published
from kvstore.protocol.sockets import Sockets
from kvstore.store import Store


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=20))
def test_a_fence_is_looked_at_ever_less_often_within_bounds(waited: list[float]) -> None:
    pauses = [pause_s(one) for one in sorted(waited)]
    assert all(PAUSE_S <= one <= PAUSE_S_MAX for one in pauses)
    assert all(one <= other for one, other in pairwise(pauses))


@pytest.fixture
def fencing() -> Iterator[Fencing]:
    made = Fencing()
    yield made
    made.close()


def test_each_is_told_when_its_own_fence_has_ended(fencing: Fencing) -> None:
    is_open = [threading.Event() for _ in range(3)]
    told = [threading.Event() for _ in is_open]
    for closed, one in zip(is_open, told, strict=True):
        assert fencing.wait(closed.is_set, TIMEOUT_S, one.set)
    for number in (1, 2, 0):
        is_open[number].set()
        assert told[number].wait(TIMEOUT_S)
        assert [one.is_set() for one in told] == [one.is_set() for one in is_open]


def test_who_has_waited_long_enough_is_told_too(fencing: Fencing) -> None:
    told = threading.Event()
    assert fencing.wait(lambda: False, 0.01, told.set)
    assert told.wait(TIMEOUT_S)


def test_a_bug_keeps_no_other_waiting(fencing: Fencing, caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> bool:
        raise RuntimeError("on purpose")

    told = [threading.Event() for _ in range(2)]
    assert fencing.wait(bug, TIMEOUT_S, told[0].set)
    assert fencing.wait(lambda: True, TIMEOUT_S, bug)
    assert fencing.wait(lambda: True, TIMEOUT_S, told[1].set)
    for one in told:
        assert one.wait(TIMEOUT_S)
    until(lambda: caplog.text.count("RuntimeError: on purpose") == 2)


def test_there_is_a_bound_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing_module, "FENCES_MAX", 2)
    fencing, told = Fencing(), [threading.Event() for _ in range(2)]
    for one in told:
        assert fencing.wait(lambda: False, TIMEOUT_S, one.set)
    assert not fencing.wait(lambda: False, TIMEOUT_S, pytest.fail)
    fencing.close()
    assert all(one.is_set() for one in told)
    assert not fencing.wait(lambda: False, TIMEOUT_S, pytest.fail)


# -- at an owner


class OpenFence:
    """Of a write that does not end yet."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def poll(self) -> bool:
        return self.closed.is_set()

    def wait(self, timeout_s: float) -> int:
        if not self.closed.wait(timeout_s):
            raise te.FenceTimeout("it is open")
        return 0


@pytest.fixture
def ask(owner: Store, directory: Path) -> Iterator[Callable[[Claim | Publish], Answer]]:
    """As a client of another host does; from any thread."""
    sockets = Sockets()
    ((where,),) = endpoints(directory).values()
    asker = Asker(sockets, where, "abc")
    yield lambda question: asker.ask(question, TIMEOUT_S)
    asker.close()
    sockets.close()


def test_a_write_that_does_not_end_keeps_no_other_client_from_publishing(
    owner: Store, ask: Callable[[Claim | Publish], Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = owner._owners.own
    assert own is not None
    revoke, fences = own._engine.revoke, dict[int, OpenFence]()
    monkeypatch.setattr(own._engine, "revoke", lambda tag: fences.get(tag) or revoke(tag))

    def claimed(seed: int) -> Granted:
        granted = ask(Claim(keys(1, seed).tobytes(), SIG, NBYTES, "0" * 32, 5))
        assert isinstance(granted, Granted)
        return granted

    nothing = Published(f"0 writes of 0 bytes arrived, not one of {NBYTES}")
    held = [claimed(seed) for seed in range(5)]
    fences |= {one.tag: OpenFence() for one in held}
    with ThreadPoolExecutor(len(held)) as clients:
        waiting: list[Future[Answer]] = [clients.submit(ask, Publish(one.claim_id)) for one in held]
        until(lambda: not own.storing._tags, "all of them are being published")
        for seed in range(10, 13):
            assert ask(Publish(claimed(seed).claim_id)) == nothing
        assert not any(one.done() for one in waiting)
        for fence in fences.values():
            fence.closed.set()
        assert [one.result() for one in waiting] == [nothing] * len(held)


def test_what_was_not_published_in_time_is_freed_when_its_write_has_ended(
    owner: Store, ask: Callable[[Claim | Publish], Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = owner._owners.own
    assert own is not None
    monkeypatch.setattr("kvstore.owner.service.FENCE_TIMEOUT_S", 0.01)
    fence = OpenFence()
    granted = ask(Claim(keys(1).tobytes(), SIG, NBYTES, "0" * 32, 5))
    assert isinstance(granted, Granted)
    monkeypatch.setattr(own._engine, "revoke", lambda _: fence)
    assert ask(Publish(granted.claim_id)) == Published("writes under the claim do not end")
    own.tick()
    assert own.stats().abandoned == 0, "its slot is not free"
    fence.closed.set()
    until(lambda: own.stats().abandoned == 1)


def test_the_own_process_waits_for_a_fence_until_its_deadline(
    owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = owner._owners.own
    assert own is not None
    engine = owner._memory.engine
    writer = te.Identity(engine.id, engine.epoch)
    grant = own.storing.claim(keys(1), SIG, NBYTES, writer)
    fence = OpenFence()
    monkeypatch.setattr(own._engine, "revoke", lambda _: fence)
    assert own.storing.publish(grant.claim_id, 0.01) == "writes under the claim do not end"
    fence.closed.set()
    until(lambda: own.stats().abandoned == 1)
