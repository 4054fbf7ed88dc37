# SPDX-License-Identifier: Apache-2.0
"""Owners that do not answer, end or begin anew, and clients that do."""

from __future__ import annotations

import errno
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from store_far import Far
from store_makers import (
    SIG,
    TIMEOUT_S,
    Room,
    config,
    contents,
    deaf,
    engine,
    impatient,
    keys,
    until,
)
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, filled, handle_of, put_all, sees

import te
from kvstore.client.owners import OWN
from kvstore.client.reading import ROOMS
from kvstore.objects.changes import keys_of_digests
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.objects.pieces import Pieces
from kvstore.protocol.sockets import Sockets, Where
from kvstore.store import Store


def test_without_an_owner_nothing_is_stored(directory: Path) -> None:
    with owning(config(directory)) as store:
        assert store.put(KEYS, SIG, filled(store).pieces) == [Put.UNREACHABLE] * N
        assert store.get(KEYS, SIG, Room(store, N, NBYTES).pieces) == [Got.MISSING] * N


@pytest.mark.slow
def test_a_killed_owner_costs_misses(
    directory: Path, start_far: Callable[..., Far], caplog: pytest.LogCaptureFixture
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    with owning(config(directory)) as store:
        sees(store)
        room = Room(store, N, NBYTES)
        assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
        known = store._owners._connections.get(far.number_in(store))
        assert known is not None
        with deaf(store):
            far.kill()
            until(lambda: not known.peer.alive, "its end is noticed")
            assert store.get(KEYS, SIG, room.pieces) == [Got.UNREACHABLE] * N
            assert len(store._rooms._free) == ROOMS
            assert store.get(KEYS, SIG, room.pieces) == [Got.MISSING] * N, "not asked again"
        assert "is not used for a while" in caplog.text
        assert store.put(keys(1, 9), SIG, room.pieces.of([0])) == [Put.UNREACHABLE]
        with impatient(store):
            until(lambda: len(store) == 0, "it is forgotten")


@pytest.mark.slow
def test_a_restarted_owner_is_known_by_what_it_holds_now(
    directory: Path, start_far: Callable[..., Far]
) -> None:
    start_far(8 * MIB, N, NBYTES).kill()
    with owning(config(directory)) as store:
        start_far(8 * MIB, 3, NBYTES)
        sees(store, 3)
        assert not store.exists(KEYS[3:], SIG, NBYTES).any()


@pytest.mark.slow
def test_two_owners_stand_in_for_each_other(directory: Path, start_far: Callable[..., Far]) -> None:
    fars = [start_far(8 * MIB, 0, NBYTES) for _ in range(3)]
    with owning(config(directory, copies=2)) as store:
        until(lambda: len(store._owners.usable()) == 3)
        room = put_all(store)
        until(lambda: len(store) == 2 * N)
        assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
        with deaf(store):
            fars[0].kill()
            room.bytes[:] = 0
            assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N, "from the other one"
            assert (room.bytes == contents(N, NBYTES)).all()


@pytest.mark.slow
def test_a_frozen_owner_costs_its_reader_the_deadline_and_comes_back(
    directory: Path, start_far: Callable[..., Far]
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    # What is mapped can be read while its owner is frozen.
    remote = engine(connect_timeout_s=1.0, transports=("tcp",))
    with owning(config(directory, request_timeout_s=0.5, engine=remote)) as store:
        sees(store)
        room = Room(store, N, NBYTES)
        far.signal(signal.SIGSTOP)
        begun_s = time.monotonic()
        outcomes = set(store.get(KEYS, SIG, room.pieces, timeout_s=0.3))
        assert outcomes <= {Got.TIMED_OUT, Got.UNREACHABLE, Got.MISSING}, outcomes
        assert len(store._rooms._free) == ROOMS
        assert time.monotonic() - begun_s < TIMEOUT_S
        # Late, where the get was over before it took the owner for lost, so that the put asks it.
        stored = set(store.put(keys(2, 9), SIG, room.pieces.of([0, 1]), timeout_s=0.3))
        assert stored <= {Put.UNREACHABLE, Put.TIMED_OUT}, stored
        until(lambda: not store.exists(KEYS, SIG, NBYTES).any(), "it is not used meanwhile")
        far.signal(signal.SIGCONT)
        sees(store)
        until(lambda: store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N)


def test_slots_of_a_writer_that_is_gone_are_free_again(directory: Path) -> None:
    with (
        owning(config(directory, 4 * MIB, claim_timeout_s=3600.0)) as owner,
        owning(config(directory)) as guest,
    ):
        until(guest._owners.usable)
        handle = handle_of(guest, 1)
        grant = handle.claim(KEYS, SIG, NBYTES, TIMEOUT_S)
        assert len(grant.slots) == N
        assert owner.put(KEYS, SIG, filled(owner).pieces) == [Put.BEING_STORED] * N
        assert owner._owners.own is not None
        owner._owners.own.storing._clock = lambda: time.monotonic() + 3601.0
        until(lambda: owner._owners.own.stats().abandoned == N)  # type: ignore[union-attr]
        assert "the claim is over" in handle.publish(grant, None, TIMEOUT_S)[0]
        room = filled(guest)
        slots = handle.source.slots(np.array(grant.slots, np.uint64))
        late = handle.source.peer.write(room.pieces.blocks(slots, 0, to_slots=True), grant.tag)
        with pytest.raises(te.TransferFailed, match="is not open"):
            late.wait(TIMEOUT_S)
        assert owner.put(KEYS, SIG, filled(owner).pieces) == [Put.STORED] * N


def test_a_claim_without_its_write_is_not_published(owner: Store) -> None:
    handle = handle_of(owner, OWN)
    grant = handle.claim(KEYS, SIG, NBYTES, 5.0)
    assert handle.publish(grant, None, 5.0)[0] == (
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
    grant = handle.claim(keys(1, 5), SIG, NBYTES, TIMEOUT_S)
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
    until(lambda: len(guest) == len(owner), "the rest of them")


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
    (policy,) = own._table._policies.values()
    until(lambda: len(policy._policy._t2) == 40, "both were told")  # type: ignore[attr-defined]
    seeds = itertools.count(2)

    def unread_are_gone() -> bool:
        owner.put(keys(40, next(seeds)), SIG, room.pieces.of(range(40)))
        return not owner.exists(names[40:], SIG, 65536).any()

    until(unread_are_gone, "those that nobody has read go")
    assert owner.exists(names[:40], SIG, 65536).all()


@pytest.mark.slow
def test_removal_survives_an_owner_that_is_frozen(
    directory: Path, start_far: Callable[..., Far], caplog: pytest.LogCaptureFixture
) -> None:
    far = start_far(8 * MIB, N, NBYTES)
    with owning(config(directory)) as store:
        sees(store)
        assert store.get(KEYS, SIG, Room(store, N, NBYTES).pieces) == [Got.RIGHT] * N
        with (
            deaf(store),
            impatient(store),
        ):  # Else it may be found out beforehand, and not be asked.
            far.signal(signal.SIGSTOP)
            store.remove(KEYS, SIG)
            assert "objects were not removed" in caplog.text
            store.clear(SIG)
            assert "the objects of a signature were not removed" in caplog.text
            far.signal(signal.SIGCONT)
        until(lambda: Removed.UNREACHABLE not in store.remove(KEYS, SIG), "it has heard it now")
        until(lambda: not store.exists(KEYS, SIG, NBYTES).any(), "that is announced")


@pytest.mark.slow
def test_an_owner_that_cannot_be_connected_to_is_tried_again(
    directory: Path,
    start_far: Callable[..., Far],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_far(8 * MIB, N, NBYTES)
    connect, refused = Sockets.connect, itertools.count()

    def full(sockets: Sockets, where: Where) -> zmq.Socket[bytes]:
        if next(refused) < 2:
            raise zmq.ZMQError(errno.EMFILE)
        return connect(sockets, where)

    monkeypatch.setattr(Sockets, "connect", full)
    with owning(config(directory, request_timeout_s=0.1)) as store:
        until(lambda: len(store) == N, "it is followed in the end")
    assert caplog.text.count("cannot be connected to: Too many open files") == 2
    assert "a bug" not in caplog.text
