# SPDX-License-Identifier: Apache-2.0
"""Connections to owners are made before anybody needs them, and never by who loads or stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_makers import SIG, TIMEOUT_S, Room, config, deaf, keys, until
from store_meeting import owning
from store_objects import KEYS, NBYTES, N, filled, handle_of, put_all, sees

import te
from kvstore.client import handles, writing
from kvstore.client.connecting import PAUSE_S, PAUSE_S_MAX, Connections, Known
from kvstore.client.deadline import Deadline
from kvstore.client.owners import OWN
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Got, Put
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Line
from kvstore.protocol.messages import Clear
from kvstore.store import Store

MIB = 1 << 20


class Firewall:
    """Lets nobody but an engine itself connect to an engine; remembers which threads have tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_shut = True
        self.threads: set[threading.Thread] = set()
        connect = te.Engine.connect

        def guarded(engine: te.Engine, card: bytes, timeout_s: float | None = None) -> te.Peer:
            if engine.card() == card:
                return connect(engine, card, timeout_s)
            self.threads.add(threading.current_thread())
            if self.is_shut:
                raise te.ConnectError("a firewall is in between")
            return connect(engine, card, timeout_s)

        monkeypatch.setattr(te.Engine, "connect", guarded)


def test_what_lies_at_an_owner_that_cannot_be_connected_to_is_missing(
    directory: Path, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is announced: an error would abort SGLang's requests."""
    put_all(owner)
    wall = Firewall(monkeypatch)
    with owning(config(directory)) as guest:
        until(lambda: len(guest) == N, "its announcements come")
        until(lambda: wall.threads, "it was tried")
        owner.put(keys(1, 9), SIG, filled(owner, 1).pieces)
        until(lambda: len(guest) == N + 1, "further ones come")
        assert not guest.exists(KEYS, SIG, NBYTES).any()
        room = Room(guest, N, NBYTES)
        assert guest.get(KEYS, SIG, room.pieces) == [Got.MISSING] * N
        assert guest.put(keys(N, 5), SIG, room.pieces) == [Put.UNREACHABLE] * N
        wall.is_shut = False
        sees(guest)
        assert guest.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
        assert guest.put(keys(N, 5), SIG, room.pieces) == [Put.STORED] * N
        assert threading.current_thread() not in wall.threads, "nobody waits for a connection"


def test_a_connection_that_ends_is_made_anew(guest: Store, owner: Store) -> None:
    put_all(owner)
    sees(guest)
    (number,) = guest._owners.usable()
    known = guest._owners._connections.get(number)
    assert known is not None
    known.peer.close()
    room = Room(guest, N, NBYTES)
    until(lambda: guest._owners._connections.get(number) not in (None, known), "another one stands")
    until(lambda: guest.exists(KEYS, SIG, NBYTES).all(), "it is used")
    assert guest.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N


def test_the_own_owner_is_used_again_after_a_pause(owner: Store) -> None:
    room = put_all(owner)
    with deaf(owner):  # Else it is connected to again half a second later.
        owner._owners.pause(OWN, "a test says so")
        assert owner.put(keys(N, 5), SIG, room.pieces) == [Put.UNREACHABLE] * N
    until(owner._owners.usable, "it is used again")
    assert owner.put(keys(N, 5), SIG, room.pieces) == [Put.STORED] * N
    assert owner.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N


# -- when owners are tried again


class Dials:
    """Connections to one owner, by a clock that is set by hand. Each attempt is counted."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self.is_shut = False
        self.tried = 0
        self.connections = Connections(self._connect, lambda _: None, lambda: self.time_s)

    def _connect(self, _number: int) -> Known:
        self.tried += 1
        if self.is_shut:
            raise te.ConnectError("the way is cut")
        return Known(b"engine", SimpleNamespace(alive=True, close=lambda: None))  # type: ignore[arg-type]

    def ticked(self) -> int:
        """How often it was tried, once what a tick has begun is over."""
        self.connections.tick()
        until(lambda: not self.connections._states[1].is_connecting, "the attempt ends")
        return self.tried

    def lose(self) -> None:
        known = self.connections.get(1)
        assert known is not None
        assert self.connections.lost(1, known)


@pytest.fixture
def dials() -> Iterator[Dials]:
    made = Dials()
    made.connections.make(1)
    made.time_s += PAUSE_S_MAX
    yield made
    made.connections.close()


def test_a_connection_that_was_cut_is_made_anew_within_a_second_each_time(dials: Dials) -> None:
    for cut in range(1, 5):
        dials.lose()
        dials.time_s += PAUSE_S
        assert dials.ticked() == 1 + cut
        dials.time_s += 2.0  # of use
    assert PAUSE_S < 1.0


def test_an_owner_that_is_heard_again_is_tried_at_once_however_often_it_was_in_vain(
    dials: Dials,
) -> None:
    dials.lose()
    dials.is_shut = True
    for _ in range(10):
        dials.time_s += PAUSE_S_MAX
        tried = dials.ticked()
    dials.time_s += PAUSE_S
    assert dials.ticked() == tried, "it is left alone"
    dials.is_shut = False
    dials.connections.hurry(1)
    until(lambda: dials.connections.get(1), "the connection stands")
    assert dials.tried == tried + 1


def test_a_connection_that_never_stands_for_long_is_made_ever_less_often(dials: Dials) -> None:
    pauses_s = []
    for _ in range(5):
        dials.lose()
        pauses_s.append(dials.connections._states[1].try_s - dials.time_s)
        dials.time_s = dials.connections._states[1].try_s
        dials.ticked()
    assert pauses_s == [PAUSE_S * 2**n for n in range(5)]


def test_without_a_thread_it_is_tried_later(dials: Dials, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a limit of threads is reached for a while."""
    dials.lose()
    dials.time_s += PAUSE_S
    with monkeypatch.context() as limit:
        limit.setattr("te.connect.pool.Pool.run", lambda *_: False)
        assert dials.ticked() == 1
    dials.time_s += PAUSE_S_MAX
    assert dials.ticked() == 2


# -- deadlines


def test_nothing_is_asked_when_no_time_is_left(guest: Store, calls: str) -> None:
    until(guest._owners.usable)
    (number,) = guest._owners.usable()
    far = guest._owners._following.owner(number)
    assert far is not None
    line = Line(calls, "abc", TIMEOUT_S, lambda _: None)
    for ask in (far.asker.ask, line.ask):
        with pytest.raises(NoAnswer, match="time"):
            ask(Clear(SIG), 0.0)
    line.close()
    with pytest.raises(NoAnswer, match="does not answer in time"):
        Line(calls, "abc", 0.0, lambda _: None)


@contextmanager
def ending_after_writes(deadline: Deadline, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if somebody ended it when all bytes have been written."""
    wait = te.Transfer.wait

    def ended(transfer: te.Transfer, timeout_s: float) -> te.Status:
        status = wait(transfer, timeout_s)
        deadline.end()
        return status

    with monkeypatch.context() as patch:
        patch.setattr(te.Transfer, "wait", ended)
        yield


@pytest.mark.parametrize("is_own", [True, False])
def test_a_put_whose_deadline_was_ended_is_not_published(
    is_own: bool, guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends it may use the source again at once."""
    store = owner if is_own else guest
    until(store._owners.usable)
    handle = handle_of(store, store._owners.usable()[0])
    deadline = Deadline(TIMEOUT_S)
    with ending_after_writes(deadline, monkeypatch):
        outcomes = writing.put_group(handle, KEYS, SIG, filled(store).pieces, deadline, None)
    assert outcomes == [Put.TIMED_OUT] * N
    assert owner._owners.own is not None
    until(lambda: owner._owners.own.stats().abandoned == N, "its slots are free")  # type: ignore[union-attr]
    assert not owner.exists(KEYS, SIG, NBYTES).any()


@pytest.mark.parametrize("way", ["own memory", "message"])
def test_a_put_whose_deadline_was_ended_while_it_was_copied_is_not_stored(
    way: str, guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = owner if way == "own memory" else guest
    until(store._owners.usable)
    handle, deadline = handle_of(store, store._owners.usable()[0]), Deadline(TIMEOUT_S)
    source, some = filled(store), KEYS[:2]
    pieces = source.pieces.between(0, 2)
    target, name = (Copier, "take") if way == "own memory" else (handles, "gather")
    copy = getattr(target, name)

    def changing(*args: Any) -> Any:
        deadline.end()
        source.bytes[1] = 7
        return copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, changing)
        outcomes = writing.put_at_once(handle, some, SIG, pieces, deadline)
    assert outcomes == [Put.TIMED_OUT] * 2
    own = owner._owners.own
    assert own is not None
    assert not own.holds(some, SIG, NBYTES).any()
    assert own._slab.used_bytes == 0
    assert store.put(KEYS, SIG, filled(store).pieces) == [Put.STORED] * N


def test_a_put_after_its_deadline_stores_nothing(owner: Store) -> None:
    deadline = Deadline(TIMEOUT_S)
    assert not deadline.is_over
    deadline.end()
    outcomes = owner.put(KEYS, SIG, filled(owner).pieces, deadline=deadline)
    assert outcomes == [Put.TIMED_OUT] * N
    assert not owner.exists(KEYS, SIG, NBYTES).any()


# -- what the owner does from time to time


class OpenFence:
    """Of a write that does not end yet."""

    def __init__(self) -> None:
        self.is_closed = False

    def poll(self) -> bool:
        return self.is_closed


def test_claims_whose_writes_do_not_end_keep_neither_each_other_nor_eviction(
    owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = owner._owners.own
    assert own is not None
    fences: list[OpenFence] = []

    def revoke(_: int) -> OpenFence:
        fences.append(OpenFence())
        return fences[-1]

    def forbidden(*_: object) -> None:
        pytest.fail("a tick waits")

    monkeypatch.setattr(own._engine, "revoke", revoke)
    monkeypatch.setattr(own._engine, "fence", forbidden)
    engine = owner._memory.engine
    writer = te.Identity(engine.id, engine.epoch)
    grants = [own.storing.claim(keys(1, seed), SIG, NBYTES, writer) for seed in range(3)]
    for grant in grants:
        own.storing.abandon(grant.claim_id)
    assert len(fences) == len(grants)
    own.tick()
    assert own.stats().abandoned == 0, "their slots are not free"
    fences[1].is_closed = True
    until(lambda: own.stats().abandoned == 1, "each is free when its own write has ended")
    for fence in fences:
        fence.is_closed = True
    until(lambda: own.stats().abandoned == len(grants), "the others are")
