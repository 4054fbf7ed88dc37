# SPDX-License-Identifier: Apache-2.0
"""A process that uses the owner of its host has little of its own: no engine, no thread that wakes
up. What other owners have it gets by way of the host's memory."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import end_all, owner_here, pid_of, shared
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until
from store_objects import KEYS, MIB, NBYTES, N, filled, loaded_in_parts, put_all

import te
from kvstore.host.pool import HostPool
from kvstore.loading import Load
from kvstore.objects.changes import fingerprint_of
from kvstore.objects.outcomes import Got, Pinned, Put, Removed
from kvstore.owning import OwningStore
from kvstore.protocol import calling
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller, Line
from kvstore.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def host(directory: Path, meet: dict[str, Any]) -> Iterator[Store]:
    """Uses the owner of its host, which is another process."""
    try:
        with Store(shared(directory, **meet)) as store:
            yield store
    finally:
        end_all(directory)


@pytest.fixture
def other(directory: Path, meet: dict[str, Any]) -> Iterator[Store]:
    """The owner of another host."""
    with OwningStore(config(directory, 16 * MIB, host="127.0.0.2", **meet)) as store:
        yield store


def switches() -> dict[str, int]:
    """How often each thread of this process has slept, but for the one that runs the tests."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            try:
                lines = (task / "status").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue  # It has ended: a thread of a test before.
            (line,) = (one for one in lines if one.startswith("voluntary_ctxt_switches"))
            found[task.name] = int(line.split()[1])
    return found


def knows(store: Store, signature: bytes = SIG) -> None:
    """Waits until it finds all of the objects, wherever they are."""
    until(lambda: store.exists(KEYS, signature, NBYTES).all(), "it knows of them")


def test_no_thread_wakes_up_without_work(directory: Path) -> None:
    before = set(switches())
    try:
        with Store(shared(directory)) as store:
            put_all(store)
            own = set(switches()) - before
            assert len(own) <= 3
            until(lambda: not store._owners._untold)  # type: ignore[attr-defined]

            def rest_for_a_second() -> bool:
                asleep = switches()
                time.sleep(1.0)
                awake = switches()
                return {one: awake[one] for one in own} == {one: asleep[one] for one in own}

            # What they still had to do may have come late.
            until(rest_for_a_second, "none wakes up")
            assert not store._memory.has_engine
    finally:
        end_all(directory)


def test_what_another_owner_has_comes_by_the_host_s_memory(host: Store, other: Store) -> None:
    room = put_all(other)
    knows(host)
    back = Room(host, N, NBYTES)
    assert host.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    held = host._owners.held_by(0, KEYS, fingerprint_of(SIG, NBYTES))
    assert (held["copies"] == 1).all(), "it lies in this host's memory now"
    back.bytes[:] = 0
    assert host.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_it_is_loaded_part_by_part_and_in_ranges(host: Store, other: Store) -> None:
    room = put_all(other)
    knows(host)
    back = Room(host, N, NBYTES)
    assert loaded_in_parts(host, KEYS, back, NBYTES) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    some = Room(host, N, 100)
    assert host.get_range(KEYS, SIG, NBYTES, 64, some.pieces) == [Got.RIGHT] * N
    assert (some.bytes == room.bytes[:, 64:164]).all()


def test_several_who_want_the_same_have_it_read_once(
    directory: Path, host: Store, other: Store, meet: dict[str, Any]
) -> None:
    room = put_all(other)
    knows(host)
    with ThreadPoolExecutor(8) as threads:

        def use(_: int) -> bool:
            with Store(shared(directory, **meet)) as store:
                back = Room(store, N, NBYTES)
                came = store.get(KEYS, SIG, back.pieces, TIMEOUT_S)
                return came == [Got.RIGHT] * N and bool((back.bytes == room.bytes).all())

        assert all(threads.map(use, range(8)))
    places = host._owners.look_up(KEYS, fingerprint_of(SIG, NBYTES))
    assert (places["copies"] == 2).all(), "there and here"


def test_eight_who_store_the_same_store_it_once(
    directory: Path, host: Store, meet: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(8) as threads:

        def use(_: int) -> list[Put]:
            with Store(shared(directory, **meet)) as store:
                return store.put(KEYS, SIG, filled(store).pieces)

        outcomes = [one for found in threads.map(use, range(8)) for one in found]
    assert outcomes.count(Put.STORED) == N
    assert set(outcomes) <= {Put.STORED, Put.EXISTS, Put.BEING_STORED}
    assert len(host) == N


def test_what_is_asked_of_the_store_is_asked_of_all_owners(host: Store, other: Store) -> None:
    put_all(other)
    knows(host)
    assert host.sizes(KEYS, SIG).tolist() == [NBYTES] * N
    assert host.pin(KEYS[:2], SIG, 60.0) == [Pinned.PINNED] * 2
    assert other.status().own.pinned == 2  # type: ignore[union-attr]
    host.unpin(KEYS[:2], SIG)
    assert other.status().own.pinned == 0  # type: ignore[union-attr]
    assert host.remove(KEYS[:2], SIG) == [Removed.REMOVED] * 2
    assert not other.exists(KEYS[:2], SIG, NBYTES).any()
    assert host.clear(SIG) == N - 2
    assert not other.exists(KEYS, SIG, NBYTES).any()


def test_copies_go_to_another_owner(directory: Path, other: Store, meet: dict[str, Any]) -> None:
    try:
        with Store(shared(directory, copies=2, **meet)) as store:
            until(lambda: sum(map(bool, store._owners.ranks)) == 2, "the owner knows the other")
            put_all(store)
            knows(other)
            assert store.put(KEYS, SIG, filled(store).pieces) == [Put.EXISTS] * N
            fingerprint = fingerprint_of(SIG, NBYTES)
            until(lambda: (store._owners.look_up(KEYS, fingerprint)["copies"] == 2).all())
    finally:
        end_all(directory)


def test_objects_larger_than_a_tray_and_more_than_fit_one(directory: Path) -> None:
    try:
        with Store(shared(directory, 128 * MIB)) as store:
            for count, nbytes in ((2, 5 * MIB), (70, 100_000)):
                names, right = keys(count, nbytes), contents(count, nbytes)
                room, back = Room(store, count, nbytes), Room(store, count, nbytes)
                room.bytes[:] = right
                assert store.put(names, SIG, room.split(9, nbytes - 9)) == [Put.STORED] * count
                assert store.get(names, SIG, back.pieces) == [Got.RIGHT] * count
                assert (back.bytes == right).all()
    finally:
        end_all(directory)


def test_memory_that_the_processor_cannot_read_goes_by_te(host: Store) -> None:
    """A bare address, as that of a GPU's memory."""
    bytes_ = np.zeros((N, NBYTES), np.uint8)
    bytes_[:] = right = contents(N, NBYTES)
    buffered = Room(host, N, NBYTES)
    region = host.register(bytes_.ctypes.data, bytes_.nbytes)
    assert host._memory.has_engine
    room = Room.__new__(Room)
    room.bytes, room.region = bytes_, region
    assert host.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    assert host.get(KEYS, SIG, buffered.pieces) == [Got.RIGHT] * N
    assert (buffered.bytes == right).all()
    bytes_[:] = 0
    assert host.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
    assert (bytes_ == right).all()
    host.deregister(region)
    host.deregister(buffered.region)


def test_without_a_connection_by_te_such_memory_gets_outcomes(host: Store) -> None:
    """As in the moment behind the owner's death."""
    put_all(host)
    bytes_ = np.zeros((N, NBYTES), np.uint8)
    room = Room.__new__(Room)
    room.bytes, room.region = bytes_, host.register(bytes_.ctypes.data, bytes_.nbytes)
    others = keys(N, 5)
    pool = host._owners
    assert isinstance(pool, HostPool)
    assert pool._link is not None
    pool._link.connect_s = time.monotonic() + 10 * TIMEOUT_S
    pool._link.peer = None
    assert host.get(KEYS, SIG, room.pieces) == [Got.UNREACHABLE] * N
    load = Load(host, KEYS, SIG, room.pieces, TIMEOUT_S)
    load.begin(0, 1)
    assert not load.wait(0)
    assert load.finish() == [Got.UNREACHABLE] * N
    assert host.put(others, SIG, room.pieces) == [Put.UNREACHABLE] * N
    back = Room(host, N, NBYTES)
    assert host.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N, "the processor needs no connection"
    pool._link.connect_s = 0.0
    until(lambda: host.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N)
    assert host.put(others, SIG, room.pieces) == [Put.STORED] * N, "no slot was claimed"


def test_who_looks_up_does_not_connect(host: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_all(host)
    pool, threads = host._owners, list[str]()
    assert isinstance(pool, HostPool)
    former = pool._connect

    def connect() -> None:
        threads.append(threading.current_thread().name)
        former()

    monkeypatch.setattr(pool, "_connect", connect)
    until(lambda: not pool._untold)
    pool._joins = 0
    assert host.exists(KEYS, SIG, NBYTES).all(), "what is mapped is there without a connection"
    until(lambda: pool.usable())
    assert threads == ["kvstore-host"]


def test_memory_that_is_not_registered_is_refused(host: Store) -> None:
    put_all(host)
    back = Room(host, N, NBYTES)
    host.deregister(back.region)
    with pytest.raises(te.BoundsError, match="lie in registered memory"):
        host.get(KEYS, SIG, back.pieces)
    with pytest.raises(te.BoundsError, match="lie in registered memory"):
        host.put(keys(N, 4), SIG, back.pieces)
    with pytest.raises(te.RegistrationError, match="was not registered"):
        host.deregister(back.region)
    host.register(back.bytes)
    with pytest.raises(te.RegistrationError, match="overlaps"):
        host.register(back.bytes[1:])


def test_without_the_owner_its_memory_is_read_and_all_else_is_a_miss(
    directory: Path, other: Store, meet: dict[str, Any]
) -> None:
    elsewhere = keys(N, 77)
    with Store(shared(directory, **meet)) as store:
        try:
            put_all(store)
            room = filled(other)
            assert other.put(elsewhere, SIG, room.pieces) == [Put.STORED] * N
            until(lambda: store.exists(elsewhere, SIG, NBYTES).all())
            store._lease.close()  # type: ignore[union-attr]
            store._lease._line = None  # type: ignore[union-attr]
            back = Room(store, N, NBYTES)
            assert store.exists(KEYS, SIG, NBYTES).all()
            assert store.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
            assert not store.exists(elsewhere, SIG, NBYTES).any()
            assert store.get(elsewhere, SIG, back.pieces) == [Got.MISSING] * N
            assert store.put(keys(N, 9), SIG, back.pieces) == [Put.UNREACHABLE] * N
            assert store.remove(KEYS, SIG) == [Removed.UNREACHABLE] * N
        finally:
            end_all(directory)


def test_a_reminder_that_comes_late_is_taken(host: Store) -> None:
    """Of two threads that remind at once, one may write when the other's has been seen to."""
    lease = host._owners._lease  # type: ignore[attr-defined]
    assert not lease._is_reminded
    os.eventfd_write(lease._reminder_fd, 1)

    def is_taken() -> bool:
        poll = select.poll()
        poll.register(lease._reminder_fd, select.POLLIN)
        return not poll.poll(0)

    until(is_taken, "the lease's thread has read it")


def test_the_lease_goes_on_when_the_owner_cannot_be_called(
    host: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for too many open files."""
    lease = host._owners._lease  # type: ignore[attr-defined]

    def fail() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(lease, "on_reminder", fail)
    lease.remind()
    until(lambda: not lease._is_reminded, "it was reminded")
    assert lease._thread.is_alive()
    joined = threading.Event()
    monkeypatch.setattr(lease, "on_reminder", joined.set)
    lease.remind()
    assert joined.wait(TIMEOUT_S)


def test_an_owner_with_the_number_of_the_last_one_is_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, where each may be process 1; and it does not answer at first."""
    lends = config(directory, 16 * MIB)
    monkeypatch.setattr("kvstore.host.pool.PAUSE_S", 0.0)
    with contextlib.ExitStack() as stack:
        with owner_here(lends):
            store = stack.enter_context(Store(shared(directory)))
            put_all(store)
            called: list[object] = []

            def call(*words: Any) -> Caller:
                called.append(words)
                if len(called) == 1:
                    raise NoAnswer("not yet")
                return Caller(*words)

            monkeypatch.setattr("kvstore.host.link.Caller", call)
        with owner_here(lends):
            until(lambda: called and store._owners.usable(), "the second one is connected to")
            assert pid_of(store) == os.getpid()
            assert len(called) == 2
            assert not store.exists(KEYS, SIG, NBYTES).any(), "its table is another"
            put_all(store)


def test_without_a_descriptor_there_is_no_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_socket(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(calling.socket, "socket", no_socket)
    with pytest.raises(NoAnswer, match=r"owner abc cannot be called: .*Too many open files"):
        Line(str(directory / "owner.calls"), "abc", TIMEOUT_S, lambda _: None)


def test_another_user_s_process_gets_no_table(host: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = host._owners._lease  # type: ignore[attr-defined]
    path = str(lease._place.socket.with_name("owner.calls"))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(NoAnswer, match=f"a process of the user {user} is at the other end"):
        Line(path, "abc", TIMEOUT_S, lambda _: None)
