# SPDX-License-Identifier: Apache-2.0
"""Thin clients of a host that lends no memory, which store at other hosts themselves, over TCP:
what is stored and who finds it, and what happens when its owner, its client or its time ends
meanwhile. Another host is here an owner in the process of the test, or one that can be frozen."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_host import end_all, freeze, shared
from store_makers import SIG, Room, config, contents, engine, keys, until
from store_objects import KEYS, MIB, NBYTES, N, filled
from store_redis import SECRET

from kvstore.client.deadline import Deadline
from kvstore.host import far_puts
from kvstore.host.far_puts import FarHandle, FarPuts
from kvstore.host.handle import HostHandle
from kvstore.host.pool import HostPool
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.objects.pieces import Pieces
from kvstore.owner.owner import Owner
from kvstore.owning import OwningStore
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import Lender, Relay, Remove, encode
from kvstore.store import Store

pytestmark = pytest.mark.slow

TCP = {"engine": engine(transports=("tcp",))}


@pytest.fixture
def host(directory: Path, meet: dict[str, Any]) -> Iterator[Store]:
    """Without memory; its owner is another process."""
    try:
        with Store(shared(directory, 0, **meet | TCP)) as store:
            yield store
    finally:
        end_all(directory)


@pytest.fixture
def other(directory: Path, host: Store, meet: dict[str, Any]) -> Iterator[OwningStore]:
    """The owner of another host, to which the client of the first one is connected."""
    settings = config(directory, 64 * MIB, host="127.0.0.2", **meet | TCP)
    with OwningStore(settings) as store:
        reaches(host, 1)
        yield store


@pytest.fixture
def far(
    directory: Path,
    host: Store,
    start_lending: Callable[..., subprocess.Popen[str]],
    meet: dict[str, Any],
) -> subprocess.Popen[str]:
    """As ``other``, in a process of its own."""
    secret = directory / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    flags = [f"--index={meet['index']}", f"--secret-file={secret}", "--host=127.0.0.2"]
    process = start_lending(*flags, f"--directory={directory / 'far'}", "--transports=tcp")
    reaches(host, 1)
    return process


def pool_of(store: Store) -> HostPool:
    assert isinstance(store._owners, HostPool)
    return store._owners


def puts_of(store: Store) -> FarPuts:
    link = pool_of(store)._link
    assert link is not None
    assert link.puts is not None
    return link.puts


def reaches(store: Store, count: int) -> None:
    """It writes at so many owners of other hosts itself."""
    Room(store, 1, 64)

    def are_reached() -> bool:
        numbers = pool_of(store).storing()
        found = [pool_of(store).handle(one) for one in numbers]
        return len(found) == count and all(isinstance(one, FarHandle) for one in found)

    until(are_reached, "it is connected")


def put(store: Store, seed: int, count: int = N, nbytes: int = NBYTES) -> list[Put]:
    room = filled(store, count, nbytes, seed)
    found = store.put(keys(count, seed), SIG, room.pieces)
    store.deregister(room.region)
    return found


def reserve(store: Store) -> None:
    """From now on what fits goes there in one transfer."""
    assert put(store, 99) == [Put.STORED] * N
    until(lambda: not puts_of(store)._coming, "slots are reserved")


def is_right(store: Store, seed: int, count: int = N, nbytes: int = NBYTES) -> bool:
    room = Room(store, count, nbytes)
    got = store.get(keys(count, seed), SIG, room.pieces)
    store.deregister(room.region)
    return set(got) == {Got.RIGHT} and bool((room.bytes == contents(count, nbytes, seed)).all())


def own_of(owner: Store) -> Owner:
    own = owner._owners.own
    assert own is not None
    return own


def in_transit(store: Store) -> int:
    """Objects that have passed the memory of the host's owner."""
    own = store.figures().own
    assert own is not None
    return own.published + own.abandoned


@pytest.fixture
def through_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each object that goes through the host's owner."""
    found = list[int]()
    take = HostHandle.take

    def noted(self: HostHandle, names: Any, signature: bytes, pieces: Pieces, until: Any) -> Any:
        found.append(pieces.object_bytes)
        return take(self, names, signature, pieces, until)

    monkeypatch.setattr(HostHandle, "take", noted)
    return found


def test_from_the_second_put_on_objects_go_straight_there(
    host: Store, other: OwningStore, through_host: list[int]
) -> None:
    reserve(host)
    assert through_host == [NBYTES]
    for seed, count in enumerate((N, N, N - 3, 1)):
        assert put(host, seed, count) == [Put.STORED] * count
        assert host.exists(keys(count, seed), SIG, NBYTES).all(), "who has stored them finds them"
        assert is_right(host, seed, count)
    assert through_host == [NBYTES]
    for seed, count in enumerate((N, N, N - 3, 1)):
        assert is_right(other, seed, count)
    assert put(host, 0) == [Put.EXISTS] * N
    assert host.remove(keys(2), SIG) == [Removed.REMOVED] * 2
    assert own_of(other).stats().objects == 4 * N - 4


def test_what_is_too_much_for_that_goes_there_in_two_phases(
    host: Store, other: OwningStore, through_host: list[int]
) -> None:
    reserve(host)
    through_host.clear()
    assert put(host, 1, 4, 3 * MIB) == [Put.STORED] * 4
    assert put(host, 2) == [Put.STORED] * N, "what was reserved is there still"
    assert through_host == []
    assert is_right(host, 1, 4, 3 * MIB)
    assert is_right(other, 1, 4, 3 * MIB)


def test_memory_that_the_processor_cannot_read_goes_there_too(
    host: Store, other: OwningStore
) -> None:
    source = contents(N, NBYTES)
    host.register(source.ctypes.data, source.nbytes)
    starts = source.ctypes.data + np.arange(N, dtype=np.uint64) * np.uint64(NBYTES)
    assert host.put(KEYS, SIG, Pieces.whole(starts, NBYTES)) == [Put.STORED] * N
    assert is_right(other, 0)


def test_what_nobody_tells_the_owner_of_is_stored_later(
    host: Store, other: OwningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was killed behind the write, say."""

    def untold(*_: object) -> None:
        raise NoAnswer("as from an owner that is silent")

    reserve(host)
    with monkeypatch.context() as patch:
        patch.setattr(FarHandle, "_tell", untold)
        assert put(host, 1) == [Put.STORED] * N
    assert not other.exists(keys(N, 1), SIG, NBYTES).any()
    assert put(host, 2) == [Put.STORED] * N, "through the host's owner"
    until(lambda: other.exists(keys(N, 1), SIG, NBYTES).all(), "the next reservation tells")
    assert is_right(other, 1)


@pytest.mark.usefixtures("other")
def test_who_looks_for_what_is_not_told_waits_once(
    host: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_puts, "SETTLE_S", 0.01)
    reserve(host)
    with monkeypatch.context() as patch:
        patch.setattr(FarPuts, "soon", lambda *_: None)
        assert put(host, 1) == [Put.STORED] * N
        assert puts_of(host)._unsettled
        assert not host.exists(keys(N, 1), SIG, NBYTES).any()
        assert not puts_of(host)._unsettled


def while_written(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens when objects are about to be written there."""
    blocks = Pieces.blocks_and_one

    def late(self: Pieces, *where: Any) -> Any:
        happens()
        return blocks(self, *where)

    monkeypatch.setattr(Pieces, "blocks_and_one", late)


def test_a_put_whose_deadline_ends_meanwhile_stores_nothing(
    host: Store, other: OwningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve(host)
    used = own_of(other).stats().objects
    until_over, room = Deadline(600.0), filled(host, seed=1)
    while_written(monkeypatch, until_over.end)
    found = host.put(keys(N, 1), SIG, room.pieces, deadline=until_over)
    assert found == [Put.TIMED_OUT] * N
    until(lambda: own_of(other).storing._tags == {}, "the owner has ended the claim")
    assert own_of(other).stats().objects == used
    assert not other.exists(keys(N, 1), SIG, NBYTES).any()


def test_slots_that_the_owner_has_taken_back_are_not_written_to(
    host: Store, other: OwningStore, monkeypatch: pytest.MonkeyPatch, through_host: list[int]
) -> None:
    reserve(host)
    through_host.clear()
    storing = own_of(other).storing
    while_written(monkeypatch, lambda: [storing.abandon(one) for one in list(storing._tags)])
    assert put(host, 1) == [Put.STORED] * N
    assert through_host == [NBYTES], "the host's owner has stored them"
    assert is_right(other, 1)


def test_one_of_another_shape_goes_through_the_hosts_owner_and_the_next_does_not(
    host: Store, other: OwningStore, through_host: list[int]
) -> None:
    reserve(host)
    through_host.clear()
    for seed in (1, 2):
        assert put(host, seed, 3, 1000) == [Put.STORED] * 3
        until(lambda: not puts_of(host)._coming, "slots are reserved")
    assert through_host == [1000]
    assert is_right(other, 1, 3, 1000)
    assert is_right(other, 2, 3, 1000)


def test_an_owner_with_nothing_to_spare_is_not_asked_all_the_time(
    host: Store, other: OwningStore, monkeypatch: pytest.MonkeyPatch, through_host: list[int]
) -> None:
    asked = list[int]()

    def none(*_: object) -> None:
        asked.append(1)

    monkeypatch.setattr(own_of(other).storing, "reserve", none)
    monkeypatch.setattr(far_puts, "SCARCE_S", 3600.0)
    for seed in range(3):
        assert put(host, seed) == [Put.STORED] * N
        until(lambda: not puts_of(host)._coming, "it has answered")
    assert len(through_host) == 3
    assert len(asked) == 1


def test_several_hosts_share_what_is_put_as_their_owners_would(
    directory: Path, host: Store, other: OwningStore, meet: dict[str, Any]
) -> None:
    with OwningStore(config(directory, 64 * MIB, host="127.0.0.3", **meet | TCP)) as third:
        reaches(host, 2)
        for seed in range(4):
            assert put(host, seed, 40, 1000) == [Put.STORED] * 40
            until(lambda: not puts_of(host)._coming, "slots are reserved")
        held = [own_of(one).stats().objects for one in (other, third)]
        assert sum(held) == 160
        assert min(held) > 40
        assert all(is_right(host, seed, 40, 1000) for seed in range(4))
        numbers = pool_of(host).storing()
        mine = [pool_of(host).known_as(numbers)[i] for i in range(3)]
        names_of_all = {one._memory.engine.id for one in (other, third)}
        assert {one.hex() for one in mine[0]} == names_of_all
        card = own_of(other).card
        assert mine[1] == [float(card.chunks * card.object_bytes_max)] * 2
        assert set(mine[2]) == {"127.0.0.2", "127.0.0.3"}


def test_an_owner_is_not_asked_under_the_number_of_another(host: Store, other: OwningStore) -> None:
    (number,) = pool_of(host).storing()
    lender = puts_of(host).far.lenders[number]
    wrong = Lender(number, b"", 0, 0, "f" * 32, "", 1)
    source = puts_of(host).far.source(number)
    assert source is not None
    assert lender.name == other._memory.engine.id
    with pytest.raises(NoAnswer, match="is not known any more"):
        FarHandle(source, wrong, puts_of(host)).claim(KEYS, SIG, NBYTES, 60.0)
    for question, why in (
        (encode(Remove(KEYS.tobytes(), SIG)), "Remove is not passed on"),
        (b"\xc1", "malformed|invalid|Invalid"),
    ):
        with pytest.raises(NoAnswer, match=why):
            puts_of(host).caller.ask(Relay(number, lender.name, question), 60.0)


def test_an_owner_that_stands_still_costs_a_put_its_deadline_and_no_more(
    host: Store, far: subprocess.Popen[str]
) -> None:
    reserve(host)
    freeze(far.pid)
    room = filled(host, seed=1)
    found = host.put(keys(N, 1), SIG, room.pieces, 0.5)
    assert set(found) <= {Put.TIMED_OUT, Put.UNREACHABLE}
    far.send_signal(signal.SIGCONT)
    until(lambda: put(host, 2)[0] in {Put.STORED, Put.EXISTS}, "it answers again")
    assert is_right(host, 2)
    found = host.get(keys(N, 1), SIG, Room(host, N, NBYTES).pieces)
    assert not set(found) & {Got.CORRUPTED}


def test_an_owner_that_dies_is_told(host: Store, far: subprocess.Popen[str]) -> None:
    reserve(host)
    far.kill()
    far.wait()
    room = filled(host, seed=1)
    found = host.put(keys(N, 1), SIG, room.pieces)
    assert set(found) <= {Put.UNREACHABLE, Put.TIMED_OUT, Put.FAILED}
