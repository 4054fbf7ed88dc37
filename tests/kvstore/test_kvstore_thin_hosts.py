# SPDX-License-Identifier: Apache-2.0
"""Thin clients of several hosts, beside others that lend nothing, and with objects that their host
has no room for. A host is here a directory with an owner of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from store_etcd import EtcdServer
from store_host import end_all, pid_of, shared
from store_makers import SIG, Room, config, contents, keys, until
from store_objects import KEYS, MIB, NBYTES, N, filled, put_all, sees
from store_redis import RedisServer, at_index

from kvstore.host.pool import HostPool
from kvstore.large import LargeObjects
from kvstore.objects.changes import fingerprint_of
from kvstore.objects.outcomes import Got, Pinned, Put, Removed
from kvstore.owning import OwningStore
from kvstore.store import Store

pytestmark = pytest.mark.slow

BIG = 2 * MIB
NAMES = keys(2, 51)


def has(store: Store, names: Any = KEYS, nbytes: int = NBYTES, seed: int = 0) -> bool:
    """All are there, and right."""
    back = Room(store, len(names), nbytes)
    outcomes = store.get(names, SIG, back.pieces)
    store.deregister(back.region)
    right = contents(len(names), nbytes, seed)
    return outcomes == [Got.RIGHT] * len(names) and bool((back.bytes == right).all())


# -- several hosts


class Hosts:
    """Two of them."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._url, self._stack = url, stack
        self.directories = [
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv"))) for _ in range(2)
        ]
        for one in self.directories:
            stack.callback(end_all, one)

    def store(self, host: int, memory: int = 16 * MIB, **more: Any) -> Store:
        """Its host has an address of its own."""
        more |= {
            "directory": self.directories[host],
            "host": f"127.0.0.{host + 1}",
        }
        return self._stack.enter_context(Store(at_index(self._url, memory, **more)))


@pytest.fixture
def hosts(index: RedisServer | EtcdServer) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(index.url, stack)


@pytest.mark.by_turns("two hosts")
def test_what_one_host_stores_the_other_has(index: RedisServer | EtcdServer, hosts: Hosts) -> None:
    here, there = hosts.store(0), hosts.store(1)
    assert isinstance(here._owners, HostPool)
    for one in (here, there):
        until(lambda one=one: sum(map(bool, one._owners.ranks)) == 2, "the owners know each other")
    put_all(here)
    sees(there)
    assert has(there)
    places = there._owners.look_up(KEYS, fingerprint_of(SIG, NBYTES))
    assert (places["copies"] == 2).all(), "it lies in this host's memory now"
    index.kill()
    assert there.remove(KEYS[:3], SIG) == [Removed.REMOVED] * 3
    until(lambda: not here.exists(KEYS[:3], SIG, NBYTES).any(), "that is announced")
    later = filled(there, seed=5)
    names = keys(N, 5)
    assert there.put(names, SIG, later.pieces) == [Put.STORED] * N
    until(lambda: here.exists(names, SIG, NBYTES).all(), "owners tell each other without an index")
    assert has(here, names, seed=5)


@pytest.mark.by_turns("two hosts")
def test_an_owner_knows_other_hosts_before_it_has_users(hosts: Hosts) -> None:
    put_all(hosts.store(0))
    assert has(hosts.store(1))


def test_an_owner_does_not_wait_for_a_former_one_of_its_host(hosts: Hosts) -> None:
    """It stands in the index until its entry is over. Its users would not wait so long for the next
    one."""
    more = {"request_timeout_s": 3600.0}
    put_all(hosts.store(0, **more))
    end_all(hosts.directories[0])
    assert hosts.store(0, **more)._owners.usable()


@pytest.mark.by_turns("two hosts")
def test_copies_lie_on_both_hosts(hosts: Hosts) -> None:
    here, there = hosts.store(0, copies=2), hosts.store(1)
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "the owners know each other")
    put_all(here)
    own = there._owners
    until(lambda: (own.held_by(0, KEYS, fingerprint_of(SIG, NBYTES))["copies"] == 1).all())
    end_all(hosts.directories[0])
    assert has(there)


# -- who lends nothing


def test_who_lends_nothing_uses_the_host_s_owner(directory: Path) -> None:
    try:
        with Store(shared(directory)) as host, Store(shared(directory, 0)) as guest:
            assert pid_of(guest) == pid_of(host)
            assert guest.put(KEYS, SIG, filled(guest).pieces) == [Put.STORED] * N
            assert has(host)
            assert has(guest)
            assert guest.pin(KEYS[:2], SIG, 60.0) == [Pinned.PINNED] * 2
            assert guest.remove(KEYS[:2], SIG) == [Removed.REMOVED] * 2
            assert not host.exists(KEYS[:2], SIG, NBYTES).any()
    finally:
        end_all(directory)


# -- objects that a chunk has no room for


@pytest.fixture
def host(directory: Path, meet: dict[str, Any]) -> Iterator[Store]:
    """In chunks of 1 MiB."""
    try:
        with Store(shared(directory, **meet)) as store:
            yield store
    finally:
        end_all(directory)


@pytest.fixture
def other(directory: Path, meet: dict[str, Any]) -> Iterator[Store]:
    """The owner of another host, in chunks of 4 MiB."""
    with OwningStore(config(directory, 64 * MIB, host="127.0.0.2", **meet)) as store:
        yield store


def test_what_fits_no_chunk_of_the_host_is_no_hit(host: Store, other: Store) -> None:
    """A load would be aborted."""
    room = filled(other, 2, BIG)
    assert host.put(NAMES, SIG, filled(host, 2, BIG).pieces) == [Put.TOO_LARGE] * 2
    assert other.put(NAMES, SIG, room.pieces) == [Put.STORED] * 2
    # It may know of them before it is connected to their owner.
    until(lambda: host.sizes(NAMES, SIG).tolist() == [BIG] * 2, "the host's owner can ask")
    assert host.known(NAMES).all()
    assert not host.exists(NAMES, SIG, BIG).any()
    assert host.admit(NAMES, SIG, BIG, None).offered == 0
    back = Room(host, 2, BIG)
    assert host.get(NAMES, SIG, back.pieces) == [Got.MISSING] * 2
    assert host.remove(NAMES, SIG) == [Removed.REMOVED] * 2


def test_it_is_stored_in_parts_on_this_host_and_read_from_another(
    host: Store, other: Store
) -> None:
    until(lambda: sum(map(bool, host._owners.ranks)) == 2, "they know each other")
    mine, theirs = LargeObjects(host, MIB // 2), LargeObjects(other, MIB // 2)
    room, back = filled(host, 2, BIG), Room(host, 2, BIG)
    assert theirs.put(NAMES, SIG, filled(other, 2, BIG).pieces) == [Put.STORED] * 2
    until(lambda: mine.exists(NAMES, SIG, BIG).all(), "the host's owner knows of them")
    assert mine.get(NAMES, SIG, back.pieces) == [Got.RIGHT] * 2
    assert (back.bytes == room.bytes).all()
    assert mine.remove(NAMES, SIG, BIG) == [Removed.REMOVED] * 2
    more = keys(2, 52)
    assert mine.put(more, SIG, room.split(5, BIG - 5)) == [Put.STORED] * 2
    back.bytes[:] = 0
    assert mine.get(more, SIG, back.split(BIG - 9, 9)) == [Got.RIGHT] * 2
    assert (back.bytes == room.bytes).all()
    some = Room(host, 2, MIB)
    assert mine.get_range(more, SIG, BIG, 300_000, some.pieces) == [Got.RIGHT] * 2
    assert (some.bytes == room.bytes[:, 300_000 : 300_000 + MIB]).all()
