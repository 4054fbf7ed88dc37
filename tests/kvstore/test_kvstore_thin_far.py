# SPDX-License-Identifier: Apache-2.0
"""Thin clients that read at other hosts themselves, over TCP: what comes, what is kept on their own
host, and what happens when an object or its owner goes meanwhile. A host is here a directory with
an owner of its own, in a process of its own."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import end_all, freeze, kill, pid_of, shared
from store_makers import SIG, TIMEOUT_S, Room, contents, engine, keys, until
from store_objects import KEYS, MIB, NBYTES, N, filled, loaded_in_parts, put_all
from store_redis import meeting
from te_asleep import await_sleep, tasks

from kvstore.client.reading import Group
from kvstore.host.pool import HostPool
from kvstore.loading import Load
from kvstore.objects.changes import fingerprint_of
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.store import Store

pytestmark = pytest.mark.slow

FINGERPRINT = fingerprint_of(SIG, NBYTES)
# The last: the reader's own owner, which it asks then, may not answer in time either.
GONE = {Got.MISSING, Got.MOVED, Got.UNREACHABLE, Got.TIMED_OUT, Got.NOT_PROMOTED}


class Hosts:
    """Two of them, which find each other."""

    def __init__(self, meet: dict[str, Any], stack: ExitStack) -> None:
        self._meet, self._stack = meet, stack
        self._directories = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv"))) for _ in range(2)
        ]
        for one in self._directories:
            stack.callback(end_all, one)

    def store(self, host: int, memory: int = 16 * MIB, **more: Any) -> Store:
        """A client of one."""
        more = {"engine": engine(transports=("tcp",)), "host": f"127.0.0.{host + 1}"} | more
        settings = shared(self._directories[host], memory, **self._meet | more)
        return self._stack.enter_context(Store(settings))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with meeting() as meet, ExitStack() as stack:
        yield Hosts(meet, stack)


@pytest.fixture
def here(hosts: Hosts) -> Store:
    """Who gets, with memory registered."""
    store = hosts.store(0)
    Room(store, 1, 64)
    return store


@pytest.fixture
def there(hosts: Hosts, here: Store) -> Store:
    """Who puts."""
    store = hosts.store(1)
    for one in (here, store):
        until(lambda one=one: sum(map(bool, one._owners.ranks)) == 2, "the owners know each other")
    return store


def pool_of(store: Store) -> HostPool:
    assert isinstance(store._owners, HostPool)
    return store._owners


def reads_itself(store: Store, names: Any = KEYS) -> None:
    """It knows of these, and is connected to their owner."""
    until(lambda: store.exists(names, SIG, NBYTES).all(), "the announcements")
    link = pool_of(store)._link
    assert link is not None

    def is_readable() -> bool:
        store.exists(names, SIG, NBYTES)
        return bool(link.far.readable.any())

    until(is_readable, "it is connected")


def copies(store: Store, names: Any = KEYS) -> set[int]:
    return set(pool_of(store).look_up(names, FINGERPRINT)["copies"].tolist())


def test_who_reads_at_another_host_has_one_thread_more_and_all_sleep(
    hosts: Hosts, there: Store
) -> None:
    put_all(there)
    before = tasks()
    here = hosts.store(0)
    back = Room(here, N, NBYTES)
    own = tasks() - before
    reads_itself(here)
    assert here.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert len(tasks() - before - own) == 1
    assert len(tasks() - before) <= 3
    until(lambda: not pool_of(here)._untold)
    await_sleep(before)


def test_objects_come_from_another_host_and_those_wanted_again_stay(
    here: Store, there: Store
) -> None:
    room = put_all(there)
    reads_itself(here)
    back = Room(here, N, NBYTES)
    assert here.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    assert copies(here) == {1}, "the owner of this host has none of them"
    until(lambda: pool_of(here)._read_lately.has(KEYS).all(), "the lease's thread has told it")
    back.bytes[:] = 0
    assert here.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    assert copies(here) == {2}, "they were wanted again"


def test_parts_and_ranges_come_from_another_host(here: Store, there: Store) -> None:
    room = put_all(there)
    reads_itself(here)
    back, some = Room(here, N, NBYTES), Room(here, N, 100)
    assert loaded_in_parts(here, KEYS, back, NBYTES) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    assert here.status().gets == {"right": N}
    assert here.get_range(KEYS, SIG, NBYTES, 64, some.pieces) == [Got.RIGHT] * N
    assert (some.bytes == room.bytes[:, 64:164]).all()


def test_a_load_of_what_its_hosts_owner_brings_counts_once(hosts: Hosts, there: Store) -> None:
    """It asks a second time, for all that one look-up has not found in memory."""
    room = put_all(there)
    store = hosts.store(0, shared=True)
    back = Room(store, N, NBYTES)
    until(lambda: store.exists(KEYS, SIG, NBYTES).all(), "the announcements")
    load = Load(store, KEYS, SIG, back.pieces, TIMEOUT_S)
    load.begin(0, 1)
    assert load.wait(0)
    assert load.finish() == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    status = store.status()
    assert status.gets == {"right": N}
    assert status.bytes_got == N * NBYTES


def test_what_others_of_the_host_want_too_comes_once(hosts: Hosts, there: Store) -> None:
    """Eight clients, such as the ranks of a server whose pages are the same for all."""
    room = put_all(there)
    ranks = [hosts.store(0, shared=True) for _ in range(8)]
    rooms = [Room(one, N, NBYTES) for one in ranks]
    for one in ranks:
        until(lambda one=one: one.exists(KEYS, SIG, NBYTES).all(), "the announcements")
    found: dict[int, list[Got]] = {}

    def get(i: int) -> None:
        found[i] = ranks[i].get(KEYS, SIG, rooms[i].pieces)

    threads = [threading.Thread(target=get, args=[i]) for i in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(found[i] == [Got.RIGHT] * N for i in range(8))
    assert all((one.bytes == room.bytes).all() for one in rooms)
    assert copies(ranks[0]) == {2}
    own = ranks[0].figures().own
    assert own is not None
    assert own.published == N, "each was read from there once"
    assert not any(one._memory.has_engine for one in ranks)


def test_who_only_looks_up_has_no_engine(hosts: Hosts, there: Store) -> None:
    put_all(there)
    store = hosts.store(0)
    until(lambda: store.exists(KEYS, SIG, NBYTES).all(), "the announcements")
    pool_of(store)._on_reminder()
    assert not store._memory.has_engine


def while_read(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """Something happens behind the first look-up, and before the read that follows from it."""
    begin, done = Group._read, list[int]()

    def begin_late(self: Group, blocks: Any) -> None:
        if self.source.is_far and not done:
            done.append(1)
            happens()
        begin(self, blocks)

    monkeypatch.setattr(Group, "_read", begin_late)


@pytest.mark.parametrize("verify", [True, False])
def test_what_is_removed_meanwhile_is_not_taken_for_the_former_bytes(
    hosts: Hosts, here: Store, there: Store, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    """Others lie in its slots then."""
    put_all(there)
    reader = hosts.store(0, verify=verify)
    back = Room(reader, N, NBYTES)
    reads_itself(reader)
    names = keys(N, 6)

    def remove() -> None:
        assert there.remove(KEYS, SIG) == [Removed.REMOVED] * N
        assert there.put(names, SIG, filled(there, seed=6).pieces) == [Put.STORED] * N

    while_read(monkeypatch, remove)
    assert {Got.MISSING, Got.MOVED}.issuperset(reader.get(KEYS, SIG, back.pieces))
    until(lambda: reader.exists(names, SIG, NBYTES).all(), "the announcements")
    assert reader.get(names, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == contents(N, NBYTES, 6)).all()


def test_what_an_owner_evicts_while_it_is_read_is_right_or_not_there(
    hosts: Hosts, here: Store
) -> None:
    """An owner with little memory, which is filled anew all the time."""
    there = hosts.store(1, 2 * MIB)
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "the owners know each other")
    size, count = 64 << 10, 8
    rooms = [Room(there, count, size), Room(here, count, size)]
    stop = threading.Event()

    def fill() -> None:
        seed = 0
        while not stop.is_set():
            seed += 1
            rooms[0].bytes[:] = contents(count, size, seed)
            there.put(keys(count, seed), SIG, rooms[0].pieces)
            latest[0] = seed

    latest = [0]
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        outcomes: list[Got] = []
        # Its owner may hear of them too late again and again.
        while len(outcomes) < 150 * count or Got.RIGHT not in outcomes:
            seed = latest[0]
            names = keys(count, seed)
            rooms[1].bytes[:] = 0
            found = here.get(names, SIG, rooms[1].pieces)
            right = [row for row, one in enumerate(found) if one is Got.RIGHT]
            assert (rooms[1].bytes[right] == contents(count, size, seed)[right]).all()
            outcomes += found
    finally:
        stop.set()
        thread.join()
    assert Got.CORRUPTED not in outcomes


def test_an_owner_that_is_killed_while_it_is_read_costs_a_miss(
    here: Store, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(there)
    reads_itself(here)
    there._lease.close()  # Nobody starts the next one.
    while_read(monkeypatch, lambda: kill(there._lease.pid))
    back = Room(here, N, NBYTES)
    assert GONE.issuperset(here.get(KEYS, SIG, back.pieces, 5.0))
    names = keys(N, 5)
    assert here.put(names, SIG, filled(here, seed=5).pieces) == [Put.STORED] * N
    assert here.get(names, SIG, back.pieces) == [Got.RIGHT] * N


def test_an_owner_that_stands_still_costs_a_deadline(
    hosts: Hosts, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is read again once it goes on."""
    settings = engine(transports=("tcp",), stall_timeout_s=0.5)
    reader = hosts.store(0, engine=settings)
    room = put_all(there)
    back = Room(reader, N, NBYTES)
    reads_itself(reader)
    pid = pid_of(there)
    while_read(monkeypatch, lambda: freeze(pid))
    try:
        assert GONE.issuperset(reader.get(KEYS, SIG, back.pieces, 2.0))
        back.bytes[:] = 7
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (back.bytes == 7).all(), "nothing lands any more"

    def is_right() -> bool:
        return reader.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N

    until(is_right, "it is read again")
    assert (back.bytes == room.bytes).all()


def test_the_own_owner_dies_while_objects_are_read_elsewhere(
    here: Store, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, first = put_all(there), pid_of(here)
    reads_itself(here)
    while_read(monkeypatch, lambda: kill(first))
    back = Room(here, N, NBYTES)
    here.get(KEYS, SIG, back.pieces)
    until(lambda: pid_of(here) != first, "there is another one")
    until(lambda: here.exists(KEYS, SIG, NBYTES).all(), "which knows the other host")
    back.bytes[:] = 0
    assert here.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_bytes_that_have_changed_are_noticed_and_removed(
    here: Store, there: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On their way, say."""
    put_all(there)
    reads_itself(here)
    back = Room(here, N, NBYTES)
    wait = Group.wait

    def spoil(self: Group, deadline_s: float) -> None:
        wait(self, deadline_s)
        if self.source.is_far:
            back.bytes[0, 5] ^= 1

    monkeypatch.setattr(Group, "wait", spoil)
    assert here.get(KEYS, SIG, back.pieces) == [Got.CORRUPTED] + [Got.RIGHT] * (N - 1)
    until(lambda: not there.exists(KEYS[:1], SIG, NBYTES).any(), "it is removed there")
    assert np.array_equal(there.exists(KEYS, SIG, NBYTES), [False] + [True] * (N - 1))
