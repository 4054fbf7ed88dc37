# SPDX-License-Identifier: Apache-2.0
"""Thin clients of a host that lends no memory: objects come from other hosts, and go to them, by
way of its owner. Another host is here an owner in the test's process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_host import end_all, is_alive, kill, pid_of, pids, shared
from store_makers import SIG, Room, config, contents, keys, until
from store_objects import KEYS, MIB, NBYTES, N, filled, loaded_in_parts, put_all, sees
from store_redis import SECRET

import te
from kvstore.host import agreement
from kvstore.host.lease import Refusal
from kvstore.host.pool import HostPool
from kvstore.large import LargeObjects
from kvstore.objects.changes import fingerprint_of
from kvstore.objects.outcomes import Got, Pinned, Put, Removed
from kvstore.owning import OwningStore
from kvstore.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def host(directory: Path, meet: dict[str, Any]) -> Iterator[Store]:
    """Without memory; its owner is another process."""
    try:
        with Store(shared(directory, 0, **meet)) as store:
            assert isinstance(store._owners, HostPool)
            yield store
    finally:
        end_all(directory)


def flags(directory: Path, meet: dict[str, Any]) -> list[str]:
    """Of an operator's owner that meets them."""
    secret = directory / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    return [f"--index={meet['index']}", f"--secret-file={secret}"]


def another(directory: Path, number: int, meet: dict[str, Any]) -> OwningStore:
    """The owner of another host, which lends memory."""
    return OwningStore(config(directory, 64 * MIB, host=f"127.0.0.{number}", **meet))


@pytest.fixture
def other(directory: Path, host: Store, meet: dict[str, Any]) -> Iterator[Store]:
    """One of those. The two know each other."""
    with another(directory, 2, meet) as store:
        until(lambda: len(known_to(host)) == 2, "the owner knows the other host's")
        yield store


def known_to(host: Store) -> list[int]:
    return [number for number, rank in enumerate(host._owners.ranks) if rank]


def of_its_own(store: Store) -> int:
    own = store.status().own
    assert own is not None
    return own.objects


def is_right(store: Store, room: Room, seed: int = 0) -> bool:
    count, nbytes = room.bytes.shape
    back = Room(store, count, nbytes)
    found = store.get(keys(count, seed), SIG, back.pieces)
    store.deregister(back.region)
    return found == [Got.RIGHT] * count and bool((back.bytes == room.bytes).all())


def test_what_is_put_lies_at_other_hosts(host: Store, other: Store) -> None:
    room = put_all(host)
    assert of_its_own(other) == N
    assert other.exists(KEYS, SIG, NBYTES).all()
    assert is_right(other, room)
    assert is_right(host, room)
    assert host.put(KEYS, SIG, room.pieces) == [Put.EXISTS] * N
    assert host.pin(KEYS[:2], SIG, 60.0) == [Pinned.PINNED] * 2
    host.unpin(KEYS[:2], SIG)
    assert host.sizes(KEYS, SIG).tolist() == [NBYTES] * N
    assert host.remove(KEYS[:2], SIG) == [Removed.REMOVED] * 2
    assert of_its_own(other) == N - 2
    until(lambda: not host.exists(KEYS[:2], SIG, NBYTES).any(), "that is announced")
    host.clear(SIG)
    assert of_its_own(other) == 0
    until(lambda: host.get(KEYS, SIG, room.pieces) == [Got.MISSING] * N, "so is this")


def test_what_is_here_alone_is_stored_elsewhere(host: Store, other: Store) -> None:
    """Its owner there had to evict it, say: what has come by way of this memory soon goes."""
    room = put_all(host)
    own = other._owners.own
    assert own is not None
    own.remove(KEYS, SIG)
    fingerprint = fingerprint_of(SIG, NBYTES)
    until(lambda: (host._owners.look_up(KEYS, fingerprint)["copies"] == 1).all(), "it is told")
    assert host.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    assert of_its_own(other) == N


def test_what_other_hosts_have_is_got_in_all_ways(host: Store, other: Store) -> None:
    room = put_all(other)
    until(lambda: host.exists(KEYS, SIG, NBYTES).all(), "it knows of them")
    some = Room(host, N, 100)
    assert host.get_range(KEYS, SIG, NBYTES, 64, some.pieces) == [Got.RIGHT] * N
    assert (some.bytes == room.bytes[:, 64:164]).all()
    held = host._owners.held_by(0, KEYS, fingerprint_of(SIG, NBYTES))
    assert (held["copies"] == 1).all(), "it lies in this host's memory now"
    names, more = keys(N, 5), filled(other, seed=5)
    assert other.put(names, SIG, more.pieces) == [Put.STORED] * N
    until(lambda: host.exists(names, SIG, NBYTES).all(), "it knows of them")
    back = Room(host, N, NBYTES)
    assert loaded_in_parts(host, names, back, NBYTES) == [Got.RIGHT] * N
    assert (back.bytes == more.bytes).all()
    assert is_right(host, room)


def test_large_objects_go_there_and_come_from_there(host: Store, other: Store) -> None:
    room = filled(host, 3, 3 * MIB)
    assert host.put(keys(3), SIG, room.split(5, 3 * MIB - 5)) == [Put.STORED] * 3
    assert is_right(other, room)
    names, chunk = keys(2, 5), 4 * MIB
    assert host.put(names, SIG, filled(host, 2, chunk + 1).pieces) == [Put.TOO_LARGE] * 2
    assert not other.known(names).any()
    mine, theirs = LargeObjects(host, chunk), LargeObjects(other, chunk)
    whole = filled(host, 2, 10 * MIB, seed=5)
    assert mine.put(names, SIG, whole.pieces) == [Put.STORED] * 2
    back, there = Room(host, 2, 10 * MIB), Room(other, 2, 10 * MIB)
    assert theirs.get(names, SIG, there.pieces) == [Got.RIGHT] * 2
    assert mine.get(names, SIG, back.pieces) == [Got.RIGHT] * 2
    assert (there.bytes == whole.bytes).all()
    assert (back.bytes == whole.bytes).all()


def test_memory_that_the_processor_cannot_read_takes_the_same_way(
    host: Store, other: Store
) -> None:
    source, back = contents(N, NBYTES), contents(N, NBYTES, 9)
    rooms = []
    for array in (source, back):
        room = Room.__new__(Room)
        room.bytes = array
        room.region = host.register(array.ctypes.data, array.nbytes)
        rooms.append(room)
    assert host.put(KEYS, SIG, rooms[0].pieces) == [Put.STORED] * N
    assert of_its_own(other) == N
    assert host.get(KEYS, SIG, rooms[1].pieces) == [Got.RIGHT] * N
    assert (source == back).all()
    other.close()
    until(lambda: len(known_to(host)) == 1, "the other host has gone")
    assert host.put(keys(N, 3), SIG, rooms[0].pieces) == [Put.UNREACHABLE] * N


def test_copies_lie_at_several_hosts(
    directory: Path, other: Store, host: Store, meet: dict[str, Any]
) -> None:
    with (
        Store(shared(directory, 0, copies=2, **meet)) as two,
        another(directory, 3, meet) as third,
    ):
        until(lambda: len(known_to(host)) == 3, "the owner knows both")
        room = put_all(two)
        assert of_its_own(other) == of_its_own(third) == N
        other.close()
        until(lambda: len(known_to(host)) == 2, "one has gone")
        with another(directory, 4, meet) as fourth:
            until(lambda: len(known_to(host)) == 3, "the owner knows the new one")
            assert set(two.put(KEYS, SIG, room.pieces)) <= {Put.EXISTS, Put.STORED}
            assert of_its_own(fourth) == N


def test_without_another_host_nothing_is_stored(host: Store) -> None:
    room = filled(host)
    assert host.put(KEYS, SIG, room.pieces) == [Put.UNREACHABLE] * N
    assert host.get(keys(N, 3), SIG, room.pieces) == [Got.MISSING] * N
    assert host.status().memory == 0


def test_the_owner_of_such_a_host_dies_and_another_one_is_started(
    host: Store, other: Store
) -> None:
    room, first = put_all(host), pid_of(host)
    kill(first)
    until(lambda: pid_of(host) != first and host.exists(KEYS, SIG, NBYTES).all(), "another one")
    assert is_right(host, room)
    assert of_its_own(other) == N


def test_it_gives_way_to_one_that_lends(
    directory: Path, host: Store, other: Store, meet: dict[str, Any]
) -> None:
    room, first = put_all(host), pid_of(host)
    with Store(shared(directory, 16 * MIB, **meet)) as lender:
        assert pid_of(lender) != first
        until(lambda: not is_alive(first), "the first one has ended")
        until(lambda: pid_of(host) == pid_of(lender), "all use the other one")
        until(lambda: host.exists(KEYS, SIG, NBYTES).all(), "it knows the other host's")
        assert is_right(host, room)
        other.close()
        until(lambda: len(known_to(host)) == 1, "the other host has gone")
        names = keys(N, 4)
        assert host.put(names, SIG, filled(host, seed=4).pieces) == [Put.STORED] * N
        assert lender.exists(names, SIG, NBYTES).all()
        with Store(shared(directory, 0, **meet)) as guest:
            assert pid_of(guest) == pid_of(lender) != os.getpid()


def test_a_server_that_cannot_start_the_next_owner_does_not_keep_others_from_it(
    directory: Path,
    host: Store,
    other: Store,
    monkeypatch: pytest.MonkeyPatch,
    meet: dict[str, Any],
) -> None:
    monkeypatch.setattr("kvstore.host.lifetime.GIVEN_WAY_S", 3600.0)
    monkeypatch.setattr("kvstore.host.lifetime.UNTAKEN_S", 0.5)
    room, first = put_all(other), pid_of(host)
    with pytest.raises(Refusal, match="more memory than this process can have"):
        Store(shared(directory, 1 << 46, **meet))
    until(lambda: not is_alive(first), "it gives the lock back some time before it has ended")
    until(lambda: pid_of(host) in pids(directory), "there is another one")
    until(lambda: host.exists(KEYS, SIG, NBYTES).all(), "it knows the other host's")
    assert is_right(host, room)


def test_it_gives_way_to_the_first_that_says_how_hosts_reach_each_other(directory: Path) -> None:
    """Both lend nothing; the one that comes first is a router, say. The next owner is as the
    second wants it, whoever starts it."""
    plain = te.Config(status_dir=None)
    try:
        with Store(shared(directory, 0, engine=plain)) as router:
            first, settings = pid_of(router), shared(directory, 0)
            with Store(settings) as server:
                second = pid_of(server)
                assert second != first
                until(lambda: not is_alive(first), "the first one has ended")
                until(lambda: pid_of(router) == second, "both use the other one")
                kill(second)
                for store in (router, server):
                    until(lambda store=store: pid_of(store) != second, "another one")
                    lease = store._lease
                    assert lease is not None
                    assert lease._was["network"] == agreement.wishes(settings)["network"]
                assert pid_of(router) == pid_of(server)
    finally:
        end_all(directory)


def test_it_gives_way_to_an_operator_s_and_comes_back_behind_that(
    directory: Path,
    host: Store,
    other: Store,
    start_lending: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    meet: dict[str, Any],
) -> None:
    room, first = put_all(host), pid_of(host)
    lender = start_lending(*flags(directory, meet))
    until(lambda: pid_of(host) == lender.pid, "it uses the operator's")
    until(lambda: not is_alive(first), "the first one has ended")
    until(lambda: len(known_to(host)) == 2, "that one knows the other host's")
    monkeypatch.setattr("kvstore.host.lifetime.ENDED_S", 0.5)
    lender.kill()
    lender.wait()
    until(lambda: pids(directory) and pid_of(host) in pids(directory), "there is one of its own")
    until(lambda: host.exists(KEYS, SIG, NBYTES).all(), "it knows the other host's")
    assert is_right(host, room)
    assert host.status().memory == 0


def test_a_server_with_memory_that_waits_for_an_operator_starts_one_if_one_gives_way_to_it(
    directory: Path,
    host: Store,
    start_lending: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    meet: dict[str, Any],
) -> None:
    """It would else end the owner of those that lend nothing again and again."""
    lender = start_lending(*flags(directory, meet))
    until(lambda: pid_of(host) == lender.pid, "it uses the operator's")
    with Store(shared(directory, 16 * MIB, **meet)) as server:
        assert pid_of(server) == lender.pid
        monkeypatch.setattr("kvstore.host.lifetime.ENDED_S", 0.5)
        lender.kill()
        lender.wait()
        until(lambda: pid_of(host) == pid_of(server) in pids(directory), "both use its owner")
        room = filled(server)
        # The first put may find that the connection to the last owner has ended.
        stored = {Put.STORED, Put.EXISTS}
        until(lambda: stored.issuperset(server.put(KEYS, SIG, room.pieces)), "it stores there")
        sees(host)
        lease = server._lease
        assert lease is not None
        assert lease._was["linger_s"] == server._config.linger_s, "nothing of the operator's"
