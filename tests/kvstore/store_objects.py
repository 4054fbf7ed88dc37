# SPDX-License-Identifier: Apache-2.0
"""The objects that several tests store. For import in tests."""

from __future__ import annotations

from store_makers import SIG, TIMEOUT_S, Room, contents, keys, until

from kvstore.client.handles import Handle
from kvstore.loading import Load
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Got, Put
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


def change_byte(owner: Store, at: int) -> None:
    """Of the object in the first slot."""
    own = owner._owners.own
    assert own is not None
    memoryview(own._buffer)[own._slab.slot_offset(0) + at] ^= 4


def handle_of(store: Store, number: int) -> Handle:
    handle = store._owners.handle(number)
    assert handle is not None
    return handle


def loaded_in_parts(store: Store, names: Keys, room: Room, nbytes: int) -> list[Got]:
    """What a load of objects of so many bytes brings into a room, a quarter of each first, and then
    the rest."""
    load = Load(store, names, SIG, room.split(nbytes // 4, nbytes - nbytes // 4), TIMEOUT_S)
    load.begin(0, 1)
    load.begin(1, 2)
    assert load.wait(0)
    assert load.wait(1)
    return load.finish()
