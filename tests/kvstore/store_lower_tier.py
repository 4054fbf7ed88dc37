# SPDX-License-Identifier: Apache-2.0
"""More objects than the memory of an owner holds. For import in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from store_makers import SIG, TIMEOUT_S, Room, config, contents, keys, until

from kvstore.config import Config
from kvstore.memory.slab import class_of
from kvstore.objects.changes import LOWER_TIER, Found, fingerprint_of
from kvstore.objects.outcomes import Got, Put
from kvstore.owner.owner import Owner
from kvstore.store import Store

MIB = 1 << 20
N, NBYTES = 100, 50_000
KEYS, OBJECTS = keys(N), contents(N, NBYTES)
MEMORY = 2 * MIB
"""For about 30 objects."""


def with_disk(directory: Path, **more: Any) -> Config:
    more = {"disk": directory / "disk", "disk_size": 16 * MIB} | more
    return config(directory, MEMORY, **more)


def owner_of(store: Store) -> Owner:
    own = store._owners.own
    assert own is not None
    return own


def has_room(owner: Owner) -> bool:
    """For one more object, and no other is waiting for the disk."""
    free = owner._slab.free_slots(class_of(NBYTES))
    return free > 0 and not owner._table.ledger.demoting


def rests(store: Store) -> bool:
    """Its owner demotes nothing, and will not before somebody stores or reads. The store knows
    where everything lies: the owner tells it after a change, not with it."""
    owner = owner_of(store)
    table, low = owner._table, owner._config.free_low
    with owner._lock:
        rooms = [(table.slab.free_slots(one), table.slab.capacity(one)) for one in table._policies]
        has_room = all(free >= max(low * capacity, 1) for free, capacity in rooms)
        is_busy = table._starved or table.ledger.demoting or table.ledger.has_work
        changes = len(owner._log)
    return has_room and not is_busy and store._owners._applied >= changes


def put_all(client: Store, owner: Store | None, rows: Any = range(N)) -> None:
    """If the owner is known, so slowly that its disk need not drop anything."""
    room = Room(client, N, NBYTES)
    room.bytes[:] = OBJECTS
    left = list(rows)
    while left:
        if owner is not None:
            until(lambda: has_room(owner_of(owner)), "room")
        (outcome,) = client.put(KEYS[left[:1]], SIG, room.pieces.of(left[:1]))
        if outcome in (Put.STORED, Put.EXISTS):
            left.pop(0)
    client.deregister(room.region)


def stored(client: Store) -> np.ndarray:
    """Which objects there are behind ``put_all`` at an owner in another process. Behind a put that
    it has refused it may drop others at its next tick, while what leaves is not written yet."""

    def is_written() -> bool:
        own = client.figures().own
        return own is not None and not own.demoting

    until(is_written, "what leaves")
    found: np.ndarray = client.exists(KEYS, SIG, NBYTES)
    return found


def in_lower_tier(store: Store) -> np.ndarray:
    """Which objects a store believes to lie in the lower tier."""
    places = store._owners.look_up(KEYS, fingerprint_of(SIG, NBYTES))
    found: np.ndarray = (places["found"] == Found.HERE) & (places["slot"] == LOWER_TIER)
    return found


def get(client: Store, rows: Any = range(N), timeout_s: float = TIMEOUT_S) -> list[Got]:
    """Outcomes; whatever is right has the right bytes."""
    rows = list(rows)
    room = Room(client, len(rows), NBYTES)
    outcomes = client.get(KEYS[rows], SIG, room.pieces, timeout_s)
    for i, row in enumerate(rows):
        assert outcomes[i] is not Got.RIGHT or (room.bytes[i] == OBJECTS[row]).all()
    client.deregister(room.region)
    return outcomes
