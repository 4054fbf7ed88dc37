# SPDX-License-Identifier: Apache-2.0
"""Labels, and what an owner does with slots that somebody has written with one: whoever says so,
and whether anybody does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_makers import SIG, TIMEOUT_S, Room, config, engine, keys, until
from store_meeting import owning
from store_objects import KEYS, NBYTES, N, filled, handle_of

import te
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.copying import Copier
from kvstore.objects.labels import LABEL_BYTES_MAX, LABEL_OBJECTS_MAX, Label, label_bytes, label_of
from kvstore.objects.outcomes import Got, Put
from kvstore.owner import labelling
from kvstore.owner.claims import Content, Grant
from kvstore.owner.labelling import LabelRooms
from kvstore.owner.owner import Owner
from kvstore.store import Store

pytestmark = pytest.mark.fast


def test_a_label_says_what_it_was_made_of() -> None:
    label = Label(7, KEYS, SIG, np.arange(N, dtype=np.uint64))
    raw = label.pack()
    assert len(raw) == label_bytes(N)
    found = label_of(raw.ljust(LABEL_BYTES_MAX, b"\xff"), 7)
    assert found is not None
    assert (found.keys == KEYS).all()
    assert (found.signature, found.checksums.tolist()) == (SIG, list(range(N)))
    assert label_of(raw, 8) is None, "of another write"
    assert label_of(raw[:-1], 7) is None
    many = keys(LABEL_OBJECTS_MAX + 1)
    longer = Label(7, many, SIG, np.zeros(len(many), np.uint64)).pack()
    assert label_of(longer, 7) is None, "no room has place for so many"
    assert label_bytes(LABEL_OBJECTS_MAX) <= LABEL_BYTES_MAX


@pytest.fixture
def writer(owner: Store, directory: Path) -> Iterator[Store]:
    """Another owner, which writes by te over TCP."""
    with owning(config(directory, engine=engine(transports=("tcp",)))) as one:
        until(one._owners.usable, "the owner is known")
        yield one


def own_of(owner: Store) -> Owner:
    assert owner._owners.own is not None
    return owner._owners.own


def reserved(owner: Store, writer: Store, count: int = N) -> Grant:
    engine = writer._memory.engine
    grant = own_of(owner).storing.reserve(te.Identity(engine.id, engine.epoch), NBYTES, count)
    assert grant is not None
    assert grant.label
    return grant


def write(writer: Store, grant: Grant, room: Room, label: Label) -> None:
    """Objects and their label, in one transfer."""
    source = handle_of(writer, 1).source
    raw = Room(writer, 1, LABEL_BYTES_MAX)
    packed = label.pack()
    raw.bytes[0, : len(packed)] = np.frombuffer(packed, np.uint8)
    address = int(raw.pieces.addresses[0, 0])
    numbers = np.array(grant.slots[: len(room.pieces)], np.uint64)
    label_to = address, grant.label, len(packed)
    blocks = room.pieces.blocks_and_one(numbers, source.slots_address, UNIT_BYTES, *label_to)
    source.peer.write(blocks, grant.tag).wait(TIMEOUT_S)


def written(owner: Store, writer: Store) -> tuple[Grant, Room, Label]:
    grant, room = reserved(owner, writer), filled(writer)
    label = Label(grant.tag, KEYS, SIG, Copier().checksums(room.pieces))
    write(writer, grant, room, label)
    return grant, room, label


def is_there(owner: Store, room: Room) -> bool:
    back = Room(owner, N, NBYTES)
    found = owner.get(KEYS, SIG, back.pieces)
    return found == [Got.RIGHT] * N and bool((back.bytes == room.bytes).all())


def overdue(own: Owner) -> None:
    """As if much time had passed."""
    now = own.storing._clock
    own.storing._clock = lambda: now() + 3600.0
    own.tick()
    own.storing._clock = now


def is_empty(own: Owner) -> bool:
    own.tick()
    return own.stats().bytes_used == 0


def free_rooms(own: Owner) -> int:
    return len(own._labels._free)


def test_what_its_client_says_is_stored(owner: Store, writer: Store) -> None:
    own = own_of(owner)
    grant, room, label = written(owner, writer)
    held = own.storing.begin_publishing(grant.claim_id)
    assert held is not None
    held.wait()
    content = Content(label.checksums, KEYS, SIG)
    assert own.storing.end_publishing(held, content)[0] == ""
    assert is_there(owner, room)
    assert free_rooms(own) == labelling.ROOMS


def test_without_a_word_it_is_stored_when_its_time_is_over(owner: Store, writer: Store) -> None:
    """Its client was killed, say."""
    own = own_of(owner)
    _, room, _ = written(owner, writer)
    assert not owner.exists(KEYS, SIG, NBYTES).any()
    overdue(own)
    until(lambda: own.tick() or owner.exists(KEYS, SIG, NBYTES).all(), "it is stored")
    assert is_there(owner, room)
    assert free_rooms(own) == labelling.ROOMS


def test_who_removes_removes_it_also_before_a_word(owner: Store, writer: Store) -> None:
    own = own_of(owner)
    grant, _, _ = written(owner, writer)
    assert all(own.remove(KEYS[:4], SIG))
    assert owner.exists(KEYS, SIG, NBYTES).tolist() == [False] * 4 + [True] * (N - 4)
    assert own.storing.begin_publishing(grant.claim_id) is None, "that comes too late"
    written_again = written(owner, writer)[1]
    assert own.clear(SIG) == N
    assert not is_there(owner, written_again)
    assert is_empty(own)


def test_an_owner_that_ends_stores_it_first(owner: Store, writer: Store) -> None:
    own = own_of(owner)
    _, room, _ = written(owner, writer)
    own.storing.close()
    assert is_there(owner, room)


def test_a_reservation_ends_the_one_before_with_what_has_come(owner: Store, writer: Store) -> None:
    own = own_of(owner)
    _, room, _ = written(owner, writer)
    reserved(owner, writer)
    until(lambda: own.tick() or owner.exists(KEYS, SIG, NBYTES).all(), "it is stored")
    assert is_there(owner, room)
    used = own.stats().bytes_used
    reserved(owner, writer)
    until(lambda: own.tick() or own.stats().bytes_used == used, "one is there at a time")
    assert free_rooms(own) == labelling.ROOMS - 1


def test_what_its_client_gives_up_is_not_stored(owner: Store, writer: Store) -> None:
    own = own_of(owner)
    grant, _, _ = written(owner, writer)
    own.storing.abandon(grant.claim_id)
    until(lambda: is_empty(own), "the slots are free")
    assert not owner.exists(KEYS, SIG, NBYTES).any()
    assert free_rooms(own) == labelling.ROOMS


@pytest.mark.parametrize("wrong", ["bytes", "tag", "too many", "nothing"])
def test_what_is_not_as_its_label_says_is_not_stored(
    owner: Store, writer: Store, wrong: str
) -> None:
    """Such as memory that was used again, as its client was told that it came too late."""
    own = own_of(owner)
    grant, room = reserved(owner, writer), filled(writer)
    label = Label(grant.tag, KEYS, SIG, Copier().checksums(room.pieces))
    if wrong == "bytes":
        room.bytes[3, 5] ^= 1
    if wrong == "tag":
        label = label._replace(tag=grant.tag ^ 1)
    if wrong == "too many":
        more = np.vstack([KEYS, keys(1, 9)])
        label = label._replace(keys=more, checksums=np.append(label.checksums, np.uint64(1)))
    if wrong != "nothing":
        write(writer, grant, room, label)
    overdue(own)
    until(lambda: is_empty(own), "the slots are free")
    assert not owner.exists(KEYS, SIG, NBYTES).any()
    assert free_rooms(own) == labelling.ROOMS


def test_of_what_has_come_twice_one_is_stored(owner: Store, writer: Store) -> None:
    own = own_of(owner)
    _, room, _ = written(owner, writer)
    twice = filled(owner).pieces.of([0, 1])
    assert owner.put(KEYS[:2], SIG, twice) == [Put.STORED] * 2
    overdue(own)
    until(lambda: own.tick() or owner.exists(KEYS, SIG, NBYTES).all(), "the others are stored")
    assert is_there(owner, room)
    assert own.stats().objects == N


def test_without_a_room_slots_are_reserved_all_the_same() -> None:
    with te.Engine(engine()) as one:
        rooms = LabelRooms(one)
        taken = [rooms.take() for _ in range(labelling.ROOMS)]
        assert len(set(taken)) == labelling.ROOMS
        assert all(taken)
        assert rooms.take() == 0
        rooms.give_back(taken[5])
        assert rooms.take() == taken[5]
        assert rooms.read(taken[5]) == bytes(LABEL_BYTES_MAX)
        rooms.close()


def test_a_reservation_of_more_objects_than_a_label_has_comes_without(
    owner: Store, writer: Store
) -> None:
    identity = te.Identity(writer._memory.engine.id, writer._memory.engine.epoch)
    grant = own_of(owner).storing.reserve(identity, 64, LABEL_OBJECTS_MAX + 1)
    assert grant is None or not grant.label
