# SPDX-License-Identifier: Apache-2.0
"""Puts and gets: what was stored comes back, and whatever else has happened has its own name."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from store_makers import SIG, SIGNATURE, TIMEOUT_S, Room, config, deaf, engine, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, change_byte, filled, put_all, sees

import te
from kvstore.client.reading import ROOMS, Group, HeaderRoom
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.objects.pieces import Pieces
from kvstore.objects.signature import Signature
from kvstore.store import StillLanding, Store

# -- what was stored comes back


def test_own_objects_come_back(owner: Store) -> None:
    room, back = put_all(owner), Room(owner, N, NBYTES)
    assert owner.exists(KEYS, SIG, NBYTES).all(), "at once"
    assert owner.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    assert owner.put(KEYS, SIG, room.pieces) == [Put.EXISTS] * N


def test_another_process_of_the_host_reads_and_stores(guest: Store, owner: Store) -> None:
    room = put_all(owner)
    sees(guest)
    back = Room(guest, N, NBYTES)
    assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    more = filled(guest, seed=3)
    assert guest.put(keys(N, 3), SIG, more.pieces) == [Put.STORED] * N
    assert owner.get(keys(N, 3), SIG, Room(owner, N, NBYTES).pieces) == [Got.RIGHT] * N


def test_objects_may_lie_in_pieces_that_differ_on_both_sides(owner: Store) -> None:
    room, back = filled(owner), Room(owner, N, NBYTES)
    assert owner.put(KEYS, SIG, room.split(1, 4999, 15_000)) == [Put.STORED] * N
    assert owner.get(KEYS, SIG, back.split(12_000, 8000)) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_some_are_there_and_some_are_not(owner: Store) -> None:
    room, back = filled(owner), Room(owner, N, NBYTES)
    owner.put(KEYS[:5], SIG, room.pieces.of(range(5)))
    assert owner.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * 5 + [Got.MISSING] * 7
    assert (back.bytes[:5] == room.bytes[:5]).all()
    assert not back.bytes[5:].any(), "nothing landed for what was not found"
    assert owner.put(KEYS, SIG, room.pieces) == [Put.EXISTS] * 5 + [Put.STORED] * 7
    status = owner.status()
    assert status.gets == {"right": 5, "missing": 7}
    assert status.puts == {"stored": 12, "exists": 5}
    assert (status.bytes_got, status.bytes_put) == (5 * NBYTES, 12 * NBYTES)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 500_000])
def test_sizes(owner: Store, nbytes: int) -> None:
    room, back = filled(owner, 3, nbytes), Room(owner, 3, nbytes)
    assert owner.put(KEYS[:3], SIG, room.pieces) == [Put.STORED] * 3
    assert owner.get(KEYS[:3], SIG, back.pieces) == [Got.RIGHT] * 3
    assert (back.bytes == room.bytes).all()


def test_over_tcp(directory: Path) -> None:
    tcp = engine(transports=("tcp",))
    with (
        owning(config(directory, 8 * MIB, engine=tcp)) as owner,
        owning(config(directory, engine=tcp)) as guest,
    ):
        room = put_all(owner)
        sees(guest)
        back = Room(guest, N, NBYTES)
        assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
        assert (back.bytes == room.bytes).all()
        assert guest.put(keys(3, 5), SIG, back.pieces.of(range(3))) == [Put.STORED] * 3


def test_nothing_to_do(owner: Store) -> None:
    nothing = Room(owner, 1, NBYTES).pieces.of([])
    assert owner.get(KEYS[:0], SIG, nothing) == []
    assert owner.put(KEYS[:0], SIG, nothing) == []


# -- what must not be taken for a hit


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "tuned"},
        {"dtype": "float16"},
        {"page_size": 32},
        {"layers": (0, 3)},
        {"heads": (0, 1)},
        {"layout": "test/2"},
        {"pool": "swa"},
    ],
)
def test_another_signature_is_no_hit(owner: Store, other: dict[str, object]) -> None:
    put_all(owner)
    digest = Signature(**(SIGNATURE.__dict__ | other)).digest
    assert not owner.exists(KEYS, digest, NBYTES).any()
    back = Room(owner, N, NBYTES)
    assert owner.get(KEYS, digest, back.pieces) == [Got.REJECTED] * N
    assert not back.bytes.any()
    status = owner.status()
    assert status.gets == {"rejected": N}
    assert status.lookups == {"rejected": N, "found": 0, "missing": 0}
    room = filled(owner, seed=9)
    assert owner.put(KEYS, digest, room.pieces) == [Put.STORED] * N, "both can be stored"
    assert owner.get(KEYS, digest, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_another_size_is_no_hit(owner: Store) -> None:
    put_all(owner)
    for nbytes in (NBYTES - 1, NBYTES + 1, 2 * NBYTES):
        assert not owner.exists(KEYS, SIG, nbytes).any()
        back = Room(owner, N, nbytes)
        assert owner.get(KEYS, SIG, back.pieces) == [Got.REJECTED] * N


def test_what_was_removed_meanwhile_has_moved(guest: Store, owner: Store) -> None:
    put_all(owner)
    sees(guest)
    back = Room(guest, N, NBYTES)
    with deaf(guest):
        owner.remove(KEYS[:4], SIG)
        outcomes = guest.get(KEYS, SIG, back.pieces)
    assert outcomes == [Got.MOVED] * 4 + [Got.RIGHT] * 8
    until(lambda: guest.get(KEYS[:1], SIG, back.pieces.of([0])) == [Got.MISSING])


def test_who_removes_is_told_whether_every_owner_has(guest: Store, owner: Store) -> None:
    put_all(owner)
    sees(guest)
    (number,) = guest._owners.usable()
    with deaf(guest):  # Else it is connected to again half a second later.
        guest._owners.pause(number, "the test says so")
        assert guest.remove(KEYS, SIG) == [Removed.UNREACHABLE] * N
    assert owner.exists(KEYS, SIG, NBYTES).all()
    until(guest._owners.usable, "it is connected to again")
    assert guest.remove(KEYS[:5], SIG) == [Removed.REMOVED] * 5
    assert guest.remove(KEYS, SIG) == [Removed.MISSING] * 5 + [Removed.REMOVED] * (N - 5)
    assert not owner.exists(KEYS, SIG, NBYTES).any()


def test_what_lies_at_an_owner_that_cannot_be_used_is_remembered(
    guest: Store, owner: Store
) -> None:
    put_all(owner)
    sees(guest)
    (number,) = guest._owners.usable()
    with deaf(guest):  # Else whatever the owner says makes it usable again.
        guest._owners.table.set_rank(number, 0)
        counted = guest.status().lookups
        assert guest.remembered(KEYS, SIG, NBYTES).all()
        assert not guest.remembered(KEYS, SIG, 2 * NBYTES).any()
        assert guest.status().lookups == counted
        assert not guest.exists(KEYS, SIG, NBYTES).any()


def test_an_owner_is_asked_once_where_something_is_that_has_moved(
    guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(owner)
    sees(guest)
    back = Room(guest, N, NBYTES)
    own = owner._owners.own
    assert own is not None
    asked, promote = list[int](), own.promote
    monkeypatch.setattr(
        own, "promote", lambda keys, *more: (asked.append(len(keys)), promote(keys, *more))[1]
    )
    with deaf(guest):
        owner.remove(KEYS[:4], SIG)
        assert guest.get(KEYS, SIG, back.pieces) == [Got.MOVED] * 4 + [Got.RIGHT] * (N - 4)
    assert asked == [4]


def test_a_slot_that_was_used_again_is_not_taken_for_its_former_object(
    guest: Store, owner: Store
) -> None:
    put_all(owner)
    sees(guest)
    back = Room(guest, N, NBYTES)
    with deaf(guest):
        owner.remove(KEYS, SIG)
        others = filled(owner, seed=4)
        assert owner.put(keys(N, 4), SIG, others.pieces) == [Put.STORED] * N
        assert guest.get(KEYS, SIG, back.pieces) == [Got.MOVED] * N


@pytest.mark.parametrize("at_once", [True, False])
def test_the_same_object_in_another_slot_is_found_by_the_second_look(
    tcp_guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    guest, room = tcp_guest, put_all(owner)
    monkeypatch.setattr(guest._memory, "is_readable", lambda _: at_once)
    sees(guest)
    back = Room(guest, N, NBYTES)
    heard = threading.Event()

    class Slow(type(guest._rooms)):  # type: ignore[misc]
        """Between the look-up and the read of the headers the news arrives."""

        def take(self, timeout_s: float) -> HeaderRoom | None:
            if not heard.is_set():
                owner.remove(KEYS[:1], SIG)
                owner.put(keys(1, 8), SIG, room.pieces.of([1]))  # Takes its slot.
                owner.put(KEYS[:1], SIG, room.pieces.of([0]))
                until(lambda: guest.exists(keys(1, 8), SIG, NBYTES).all())
                sees(guest)
                heard.set()
            return super().take(timeout_s)  # type: ignore[no-any-return]

    guest._rooms.__class__ = Slow
    assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_without_memory_for_headers_they_are_read_afterwards(
    tcp_guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, room = tcp_guest, put_all(owner)
    sees(guest)
    rooms = [guest._rooms.take(0) for _ in range(ROOMS)]
    waited: list[float] = []
    take = guest._rooms.take

    def freed_when_waited_for(timeout_s: float) -> HeaderRoom | None:
        waited.append(timeout_s)
        if timeout_s:
            for one in rooms:
                assert one is not None
                one.give_back()
        return take(timeout_s)

    monkeypatch.setattr(guest._rooms, "take", freed_when_waited_for)
    back = Room(guest, N, NBYTES)
    assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()
    assert waited[0] == 0 < waited[1]
    assert len(guest._rooms._free) == ROOMS


def test_a_read_that_does_not_stop_is_waited_for(
    tcp_guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest, room = tcp_guest, put_all(owner)
    sees(guest)
    back, in_vain, cancel = Room(guest, N, NBYTES), [1] * 5, te.Transfer.cancel

    def late(read: te.Transfer) -> None:
        if in_vain:
            in_vain.pop()
            raise te.FenceTimeout("a landing did not end")
        cancel(read)

    with monkeypatch.context() as patch:
        patch.setattr(Group, "wait_for", lambda self, *_: self.fail(Got.TIMED_OUT, "slow"))
        patch.setattr(te.Transfer, "cancel", late)
        with pytest.raises(StillLanding) as told:
            guest.get(KEYS, SIG, back.pieces)
        assert len(guest._rooms._free) == ROOMS - 1
        told.value.wait()
    assert not in_vain
    assert len(guest._rooms._free) == ROOMS
    assert guest.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == room.bytes).all()


def test_which_memory_the_processor_can_read(owner: Store) -> None:
    memory = owner._memory
    assert not memory.is_readable(Pieces.whole([4096], 1)), "nothing is registered"
    first, second = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8)
    address = first.ctypes.data
    owner.register(first)
    owner.register(second.ctypes.data, 4096)
    assert memory.is_readable(Pieces.whole([address, address + 8190], 2))
    assert not memory.is_readable(Pieces.whole([address, address + 8191], 2))
    assert not memory.is_readable(Pieces.whole([address - 1], 1))
    assert not memory.is_readable(Pieces.whole([address, second.ctypes.data], 2))


@pytest.mark.parametrize("way", ["guest", "tcp_guest", "owner"])
@pytest.mark.parametrize("sizes", [(NBYTES,), (1, 1023, NBYTES - 1024)])
def test_a_changed_byte_is_noticed(
    request: pytest.FixtureRequest, owner: Store, way: str, sizes: tuple[int, ...]
) -> None:
    reader: Store = request.getfixturevalue(way)
    put_all(owner)
    sees(reader)
    change_byte(owner, 1234)
    back = Room(reader, N, NBYTES)
    outcomes = reader.get(KEYS, SIG, back.split(*sizes))
    assert sorted(one.value for one in outcomes) == ["corrupted"] + ["right"] * (N - 1)
    # It is removed, so that it can be stored again.
    wrong = [outcomes.index(Got.CORRUPTED)]
    until(lambda: not reader.exists(KEYS[wrong], SIG, NBYTES).any(), "nobody finds it any more")
    assert set(owner.put(KEYS, SIG, filled(owner).pieces)) == {Put.STORED, Put.EXISTS}
    sees(reader)
    assert reader.get(KEYS, SIG, back.split(*sizes)) == [Got.RIGHT] * N


def test_memory_behind_a_bare_address_is_read_without_checksums(owner: Store) -> None:
    room = put_all(owner)
    back = np.zeros((N, NBYTES), np.uint8)
    region = owner.register(back.ctypes.data, back.nbytes)
    pieces = Pieces.whole(back.ctypes.data + np.arange(N) * NBYTES, NBYTES)
    assert owner.get(KEYS, SIG, pieces) == [Got.RIGHT] * N
    assert (back == room.bytes).all()
    owner.deregister(region)
    with pytest.raises(te.BoundsError):
        owner.get(KEYS, SIG, pieces)
    with pytest.raises(te.RegistrationError, match="was not registered with the store"):
        owner.deregister(region)


# -- room


def test_a_full_owner_evicts_in_the_background_and_says_so(owner: Store) -> None:
    room = filled(owner, 64, 65536)
    for seed in range(5):
        until(lambda seed=seed: Put.STORED in owner.put(keys(64, seed), SIG, room.pieces))
    own = owner.status().own
    assert own is not None
    assert own.evicted > 0
    assert own.objects * 65536 <= 8 * MIB
    until(lambda: owner.status().own.objects == len(owner))  # type: ignore[union-attr]


def test_too_large_for_a_chunk(owner: Store) -> None:
    room = filled(owner, 1, 2 * MIB)
    assert owner.put(KEYS[:1], SIG, room.pieces) == [Put.TOO_LARGE]


def test_two_who_store_the_same_at_once_store_it_once(guest: Store, owner: Store) -> None:
    rooms = [filled(owner), filled(guest)]
    until(guest._owners.usable)
    outcomes: list[list[Put]] = [[], []]

    def store(i: int) -> None:
        outcomes[i] = [owner, guest][i].put(KEYS, SIG, rooms[i].pieces)

    threads = [threading.Thread(target=store, args=[i]) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(TIMEOUT_S)
    for a, b in zip(*outcomes, strict=True):
        assert {a, b} - {Put.EXISTS, Put.BEING_STORED} == {Put.STORED}
        assert a is not b
