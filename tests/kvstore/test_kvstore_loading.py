# SPDX-License-Identifier: Apache-2.0
"""Objects that come part by part: a part that was handed over is right, whatever happens to owners
and slots meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from store_far import Far
from store_host import end_all, freeze, pid_of, shared
from store_makers import SIG, TIMEOUT_S, Room, config, contents, deaf, keys, until
from store_meeting import owning
from store_objects import change_byte

import te
from kvstore.loading import Load
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.store import Store

MIB = 1 << 20
N, PARTS, PART = 6, 4, 5000
KEYS = keys(N)
CONTENTS = contents(N, PARTS * PART)


class FarRoom(Room):
    """As memory of a GPU: te alone reads into it."""

    def __init__(self, store: Store, count: int, nbytes: int) -> None:
        self.bytes = np.zeros((count, nbytes), np.uint8)
        self.region = store.register(self.bytes.ctypes.data, self.bytes.nbytes)


@pytest.fixture(params=[Room, FarRoom], ids=["copied here", "read by te"])
def room_at(request: pytest.FixtureRequest) -> Callable[[Store], Room]:
    """Where objects are loaded to. Owners of this host are asked nothing if the processor can copy
    there."""
    return lambda store: request.param(store, N, PARTS * PART)


def pieces(room: Room) -> Pieces:
    return room.split(*[PART] * PARTS)


def load_of(store: Store, room: Room, timeout_s: float = TIMEOUT_S) -> Load:
    """All parts begun."""
    load = Load(store, KEYS, SIG, pieces(room), timeout_s)
    for part in range(PARTS):
        load.begin(part, part + 1)
    return load


def is_there(room: Room, part: int) -> bool:
    span = slice(part * PART, (part + 1) * PART)
    return bool((room.bytes[:, span] == CONTENTS[:, span]).all())


def put_all(store: Store) -> Room:
    room = Room(store, N, PARTS * PART)
    room.bytes[:] = CONTENTS
    assert store.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    return room


def test_each_part_is_there_when_it_was_waited_for(
    owner: Store, room_at: Callable[[Store], Room]
) -> None:
    put_all(owner)
    room = room_at(owner)
    load = load_of(owner, room)
    for part in range(PARTS):
        assert load.wait(part)
        assert is_there(room, part)
    assert load.finish() == [Got.RIGHT] * N
    load.cancel()
    assert owner.status().gets == {"right": N}


@pytest.mark.slow
def test_an_owner_that_is_dead_at_the_begin_costs_a_look_elsewhere(
    directory: Path, start_far: Callable[..., Far], room_at: Callable[[Store], Room]
) -> None:
    """Its objects are there before the first part is handed over: nothing can be mended later."""
    fars = [start_far(8 * MIB, 0, 1) for _ in range(2)]
    with owning(config(directory, copies=2)) as store:
        until(lambda: len(store._owners.usable()) == 2)
        put_all(store)
        until(lambda: len(store) == 2 * N)
        for far in fars:  # Whichever is looked at first.
            room = room_at(store)
            with deaf(store):
                if far is fars[0]:
                    far.kill()
                load = load_of(store, room)
                for part in range(PARTS):
                    assert load.wait(part)
                    assert is_there(room, part), "as soon as it was said"
                assert load.finish() == [Got.RIGHT] * N


@contextmanager
def with_far(directory: Path, start_far: Callable[..., Far]) -> Iterator[tuple[Store, Far]]:
    """A store, and an owner in another process that has all objects."""
    far = start_far(8 * MIB, 0, 1)
    with owning(config(directory)) as store:
        until(store._owners.usable)
        put_all(store)
        until(lambda: store.exists(KEYS, SIG, PARTS * PART).all())
        yield store, far


@pytest.mark.slow
def test_an_owner_that_dies_between_two_parts_costs_nothing(
    directory: Path, start_far: Callable[..., Far], room_at: Callable[[Store], Room]
) -> None:
    fars = [start_far(8 * MIB, 0, 1) for _ in range(2)]
    with owning(config(directory, copies=2)) as store:
        until(lambda: len(store._owners.usable()) == 2)
        put_all(store)
        until(lambda: len(store) == 2 * N)
        room = room_at(store)
        with deaf(store):
            load = Load(store, KEYS, SIG, pieces(room), TIMEOUT_S)
            load.begin(0, 1)
            load.begin(1, 2)
            assert load.wait(0)
            read_from = load._groups[0].source.number
            next(far for far in fars if far.number_in(store) == read_from).kill()
            load.begin(2, 3)
            load.begin(3, 4)
            for part in range(1, PARTS):
                assert load.wait(part)
                assert is_there(room, part)
            assert load.finish() == [Got.RIGHT] * N


@pytest.mark.slow
def test_without_another_copy_no_further_part_is_handed_over(
    directory: Path, start_far: Callable[..., Far]
) -> None:
    with with_far(directory, start_far) as (store, far):
        room = FarRoom(store, N, PARTS * PART)
        with deaf(store):
            load = Load(store, KEYS, SIG, pieces(room), TIMEOUT_S)
            load.begin(0, 1)
            assert load.wait(0)
            far.kill()
            for part in range(1, PARTS):
                load.begin(part, part + 1)
                assert not load.wait(part)
            assert set(load.finish()) == {Got.UNREACHABLE}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_owner_of_the_host_need_not_run_while_its_memory_is_copied(
    number: signal.Signals, directory: Path
) -> None:
    """SGLang aborts the requests of a load that fails."""
    try:
        with Store(shared(directory)) as store:
            put_all(store)
            rooms, pid = [Room(store, N, PARTS * PART) for _ in range(2)], pid_of(store)
            loads = [load_of(store, rooms[0])]
            assert loads[0].wait(0)
            freeze(pid) if number is signal.SIGSTOP else os.kill(pid, number)
            loads.append(load_of(store, rooms[1]))
            for load, room in zip(loads, rooms, strict=True):
                for part in range(PARTS):
                    assert load.wait(part)
                    assert is_there(room, part)
                assert load.finish() == [Got.RIGHT] * N
    finally:
        end_all(directory)


def test_no_part_is_copied_after_the_deadline(owner: Store) -> None:
    put_all(owner)
    room = Room(owner, N, PARTS * PART)
    load = load_of(owner, room, timeout_s=0.0)
    assert not load.wait(0)
    assert load.finish() == [Got.TIMED_OUT] * N
    assert not room.bytes.any()


def test_a_slot_that_is_used_again_between_two_parts_fails_its_object(
    guest: Store, owner: Store, room_at: Callable[[Store], Room]
) -> None:
    """What was handed over before was right; what comes after would be another object's."""
    room = put_all(owner)
    until(lambda: guest.exists(KEYS, SIG, PARTS * PART).all())
    theirs = room_at(guest)
    with deaf(guest):
        load = Load(guest, KEYS, SIG, pieces(theirs), TIMEOUT_S)
        load.begin(0, 1)
        assert load.wait(0)
        assert is_there(theirs, 0)
        owner.remove(KEYS, SIG)
        room.bytes[:] = 0
        assert owner.put(keys(N, 9), SIG, room.pieces) == [Put.STORED] * N
        load.begin(1, 2)
        assert not load.wait(1)
        assert not load.wait(1), "it stays so"
        assert Got.RIGHT not in load.finish()


def test_an_object_that_lies_elsewhere_now_is_read_from_there(
    guest: Store, owner: Store, room_at: Callable[[Store], Room]
) -> None:
    """The forward may have used its first part: that was right, too."""
    room = put_all(owner)
    until(lambda: guest.exists(KEYS, SIG, PARTS * PART).all())
    theirs = room_at(guest)
    load = Load(guest, KEYS, SIG, pieces(theirs), TIMEOUT_S)
    load.begin(0, 1)
    assert load.wait(0)
    owner.remove(KEYS, SIG)
    others = Room(owner, N, PARTS * PART)
    assert owner.put(keys(N, 9), SIG, others.pieces) == [Put.STORED] * N  # Takes the slots.
    assert owner.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    until(lambda: guest.exists(keys(N, 9), SIG, PARTS * PART).all())
    until(lambda: guest.exists(KEYS, SIG, PARTS * PART).all())
    for part in range(1, PARTS):
        load.begin(part, part + 1)
        assert load.wait(part)
        assert is_there(theirs, part)
    assert load.finish() == [Got.RIGHT] * N


def test_a_changed_byte_is_noticed_at_the_end(guest: Store, owner: Store) -> None:
    """Checksums are of whole objects, so that SGLang must not use the batch's output before."""
    put_all(owner)
    until(lambda: guest.exists(KEYS, SIG, PARTS * PART).all())
    change_byte(owner, 3)
    room = Room(guest, N, PARTS * PART)
    load = load_of(guest, room)
    assert all(load.wait(part) for part in range(PARTS))
    outcomes = load.finish()
    assert sorted(one.value for one in outcomes) == ["corrupted"] + ["right"] * (N - 1)
    wrong = [outcomes.index(Got.CORRUPTED)]
    until(lambda: not guest.exists(KEYS[wrong], SIG, PARTS * PART).any(), "it is removed")


def test_what_is_not_there_is_told_before_the_first_part(
    owner: Store, room_at: Callable[[Store], Room]
) -> None:
    put_all(owner)
    owner.remove(KEYS[2:3], SIG)
    room = room_at(owner)  # Whose memory lasts for as long as the load.
    load = load_of(owner, room)
    assert not load.wait(0)
    assert load.finish()[2] is Got.MISSING


def test_a_load_that_is_given_up_lands_nothing_more(
    owner: Store, room_at: Callable[[Store], Room]
) -> None:
    put_all(owner)
    room = room_at(owner)
    load = load_of(owner, room)
    load.cancel()
    room.bytes[:] = 7
    owner.deregister(room.region)  # It would refuse while a read is under way.
    assert (room.bytes == 7).all()


def test_memory_that_is_not_registered_is_refused(owner: Store) -> None:
    put_all(owner)
    room = Room(owner, N, PARTS * PART)
    owner.deregister(room.region)
    load = Load(owner, KEYS, SIG, pieces(room), TIMEOUT_S)
    with pytest.raises(te.BoundsError):
        load.begin(0, 1)
    load.cancel()
    assert not np.any(room.bytes)
