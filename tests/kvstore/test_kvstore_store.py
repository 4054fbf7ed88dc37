# SPDX-License-Identifier: Apache-2.0
"""Puts and gets: what was stored comes back, and whatever else has happened has its own name."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_far import Far
from store_makers import SIG, SIGNATURE, TIMEOUT_S, Room, config, contents, deaf, keys, until

import te
from kvstore.changes import keys_of_digests
from kvstore.handles import Handle
from kvstore.outcomes import Got, Put
from kvstore.owners import OWN
from kvstore.pieces import Pieces
from kvstore.reading import ROOMS, HeaderRoom
from kvstore.signature import Signature
from kvstore.store import Store

MIB = 1 << 20
N, NBYTES = 12, 20_000
KEYS = keys(N)


def filled(store: Store, count: int = N, nbytes: int = NBYTES, seed: int = 0) -> Room:
    """Memory with objects in it."""
    room = Room(store, count, nbytes)
    room.bytes[:] = contents(count, nbytes, seed)
    return room


def put_all(store: Store) -> Room:
    room = filled(store)
    assert store.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    return room


def sees(store: Store, count: int = N) -> None:
    until(lambda: store.exists(KEYS[:count], SIG, NBYTES).all(), "the owner's announcements")


def handle_of(store: Store, number: int) -> Handle:
    handle = store._owners.handle(number)
    assert handle is not None
    return handle


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
    tcp = te.Config(transports=("tcp",), status_dir=None)
    with (
        Store(config(directory, 8 * MIB, engine=tcp)) as owner,
        Store(config(directory, engine=tcp)) as guest,
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
    guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.setattr(guest._memory, "is_readable", lambda _: at_once)
    room = put_all(owner)
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
    guest: Store, owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = put_all(owner)
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


def test_a_changed_byte_is_noticed(guest: Store, owner: Store) -> None:
    put_all(owner)
    sees(guest)
    assert owner._owners.own is not None
    start = owner._owners.own._slab.slot_offset(0)
    owner._owners.own._bytes[start + 1234] ^= 4
    back = Room(guest, N, NBYTES)
    outcomes = guest.get(KEYS, SIG, back.pieces)
    assert sorted(one.value for one in outcomes) == ["corrupted"] + ["right"] * (N - 1)


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


# -- owners that do not answer


def test_without_an_owner_nothing_is_stored(directory: Path) -> None:
    with Store(config(directory)) as store:
        assert store.put(KEYS, SIG, filled(store).pieces) == [Put.UNREACHABLE] * N
        assert store.get(KEYS, SIG, Room(store, N, NBYTES).pieces) == [Got.MISSING] * N


def test_a_killed_owner_costs_misses(
    directory: Path, start_far: Callable[..., Far], caplog: pytest.LogCaptureFixture
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    with Store(config(directory)) as store:
        sees(store)
        room = Room(store, N, NBYTES)
        assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
        with deaf(store):
            far.kill()
            assert store.get(KEYS, SIG, room.pieces) == [Got.UNREACHABLE] * N
            assert len(store._rooms._free) == ROOMS
            assert store.get(KEYS, SIG, room.pieces) == [Got.MISSING] * N, "not asked again"
        assert "is not used for a while" in caplog.text
        assert store.put(keys(1, 9), SIG, room.pieces.of([0])) == [Put.UNREACHABLE]
        until(lambda: len(store) == 0, "it is forgotten")


def test_a_restarted_owner_is_known_by_what_it_holds_now(
    directory: Path, start_far: Callable[..., Far]
) -> None:
    start_far(8 * MIB, N, NBYTES).kill()
    with Store(config(directory)) as store:
        start_far(8 * MIB, 3, NBYTES)
        sees(store, 3)
        assert not store.exists(KEYS[3:], SIG, NBYTES).any()


def test_two_owners_stand_in_for_each_other(directory: Path, start_far: Callable[..., Far]) -> None:
    fars = [start_far(8 * MIB, 0, NBYTES) for _ in range(3)]
    with Store(config(directory, copies=2)) as store:
        until(lambda: len(store._owners.usable()) == 3)
        room = put_all(store)
        until(lambda: len(store) == 2 * N)
        assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
        with deaf(store):
            fars[0].kill()
            room.bytes[:] = 0
            assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N, "from the other one"
            assert (room.bytes == contents(N, NBYTES)).all()


def test_a_frozen_owner_costs_its_reader_the_deadline_and_comes_back(
    directory: Path, start_far: Callable[..., Far]
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    with Store(config(directory, request_timeout_s=0.5)) as store:
        sees(store)
        room = Room(store, N, NBYTES)
        far.signal(signal.SIGSTOP)
        begun_s = time.monotonic()
        outcomes = set(store.get(KEYS, SIG, room.pieces, timeout_s=0.3))
        assert outcomes <= {Got.TIMED_OUT, Got.UNREACHABLE, Got.MISSING}, outcomes
        assert len(store._rooms._free) == ROOMS
        assert time.monotonic() - begun_s < TIMEOUT_S
        assert set(store.put(keys(2, 9), SIG, room.pieces.of([0, 1]), timeout_s=0.3)) == {
            Put.UNREACHABLE
        }
        until(lambda: not store.exists(KEYS, SIG, NBYTES).any(), "it is not used meanwhile")
        far.signal(signal.SIGCONT)
        sees(store)
        until(lambda: store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N)


def test_slots_of_a_writer_that_is_gone_are_free_again(directory: Path) -> None:
    with (
        Store(config(directory, 4 * MIB, claim_timeout_s=0.2)) as owner,
        Store(config(directory)) as guest,
    ):
        until(guest._owners.usable)
        handle = handle_of(guest, 1)
        grant = handle.claim(KEYS, SIG, NBYTES, 5.0)
        assert len(grant.slots) == N
        assert owner.put(KEYS, SIG, filled(owner).pieces) == [Put.BEING_STORED] * N
        assert owner._owners.own is not None
        until(lambda: owner._owners.own.stats().abandoned == N)  # type: ignore[union-attr]
        assert "the claim is over" in handle.publish(grant.claim_id, 5.0)
        room = filled(guest)
        slots = handle.source.slots(np.array(grant.slots, np.uint64))
        late = handle.source.peer.write(room.pieces.blocks(slots, 0, to_slots=True), grant.tag)
        with pytest.raises(te.TransferFailed, match="is not open"):
            late.wait(TIMEOUT_S)
        assert owner.put(KEYS, SIG, filled(owner).pieces) == [Put.STORED] * N


def test_a_claim_without_its_write_is_not_published(owner: Store) -> None:
    handle = handle_of(owner, OWN)
    grant = handle.claim(KEYS, SIG, NBYTES, 5.0)
    assert handle.publish(grant.claim_id, 5.0) == (
        f"0 writes of 0 bytes arrived, not one of {N * NBYTES}"
    )
    assert not owner.exists(KEYS, SIG, NBYTES).any()
    assert len(owner) == 0


def test_nobody_writes_to_slots_without_a_claim(guest: Store, owner: Store) -> None:
    put_all(owner)
    sees(guest)
    until(guest._owners.usable)
    handle = handle_of(guest, 1)
    room = filled(guest, seed=7)
    blocks = room.pieces.blocks(
        handle.source.slots(np.arange(N, dtype=np.uint64)), 0, to_slots=True
    )
    with pytest.raises(te.TransferFailed, match="may not write without a tag"):
        handle.source.peer.write(blocks).wait(TIMEOUT_S)
    grant = handle.claim(keys(1, 5), SIG, NBYTES, 5.0)
    with pytest.raises(te.TransferFailed, match="range"):
        handle.source.peer.write(blocks, grant.tag).wait(TIMEOUT_S)
    handle.abandon(grant.claim_id)
    assert guest.get(KEYS, SIG, Room(guest, N, NBYTES).pieces) == [Got.RIGHT] * N


def test_a_follower_that_was_left_behind_begins_anew(guest: Store, owner: Store) -> None:
    put_all(owner)
    sees(guest)
    assert owner._owners.own is not None
    owner._owners.own._log._kept = 4
    with deaf(guest):
        for seed in range(20, 25):
            owner.put(keys(N, seed), SIG, filled(owner, seed=seed).pieces)
        owner.remove(KEYS, SIG)
    until(lambda: guest.exists(keys(N, 24), SIG, NBYTES).all())
    until(lambda: not guest.exists(KEYS, SIG, NBYTES).any())
    assert len(guest) == len(owner)


def test_arguments_are_checked(owner: Store) -> None:
    room = Room(owner, N, NBYTES)
    with pytest.raises(
        ValueError, match=r"keys must be u8 of shape \(n, 16\), not uint8 of \(3, 8\)"
    ):
        owner.get(np.zeros((3, 8), np.uint8), SIG, room.pieces)
    with pytest.raises(ValueError, match="signature has 3 bytes, not 16"):
        owner.put(KEYS, b"abc", room.pieces)
    with pytest.raises(ValueError, match="12 keys, but memory for 3 objects"):
        owner.get(KEYS, SIG, room.pieces.of(range(3)))
    with pytest.raises(te.BoundsError):
        owner.put(KEYS[:1], SIG, Pieces.whole([4096], 100))
    assert owner.put(keys_of_digests([bytes(32)]), SIG, room.pieces.of([0])) == [Put.STORED]


def test_what_is_read_is_kept_and_what_is_not_goes_first(guest: Store, owner: Store) -> None:
    """Owners hear from all readers, in their own process and in others."""
    room, theirs = filled(owner, 60, 65536), Room(guest, 20, 65536)
    names = keys(60, 1)
    assert owner.put(names, SIG, room.pieces) == [Put.STORED] * 60
    until(lambda: guest.exists(names, SIG, 65536).all())
    assert owner.get(names[:20], SIG, room.pieces.of(range(20))) == [Got.RIGHT] * 20
    assert guest.get(names[20:40], SIG, theirs.pieces) == [Got.RIGHT] * 20
    own = owner._owners.own
    assert own is not None
    (policy,) = own._shelf._policies.values()
    until(lambda: len(policy._t2) == 40, "both were told")  # type: ignore[attr-defined]
    seeds = itertools.count(2)

    def unread_are_gone() -> bool:
        owner.put(keys(40, next(seeds)), SIG, room.pieces.of(range(40)))
        return not owner.exists(names[40:], SIG, 65536).any()

    until(unread_are_gone, "those that nobody has read go")
    assert owner.exists(names[:40], SIG, 65536).all()


def test_removal_survives_an_owner_that_is_frozen(
    directory: Path, start_far: Callable[..., Far], caplog: pytest.LogCaptureFixture
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    with Store(config(directory, request_timeout_s=1.0)) as store:
        sees(store)
        assert store.get(KEYS, SIG, Room(store, N, NBYTES).pieces) == [Got.RIGHT] * N
        with deaf(store):  # Else it may be found out beforehand, and not be asked.
            far.signal(signal.SIGSTOP)
            store.remove(KEYS, SIG)
            assert "objects were not removed" in caplog.text
            store.clear(SIG)
            assert "the objects of a signature were not removed" in caplog.text
            far.signal(signal.SIGCONT)
        until(lambda: not store.exists(KEYS, SIG, NBYTES).any() or store.remove(KEYS, SIG))
