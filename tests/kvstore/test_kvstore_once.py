# SPDX-License-Identifier: Apache-2.0
"""An object is stored as often as the settings say, whoever stores it, and found at once by who has
stored it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_makers import SIG, config, contents, deaf, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, Room, filled, put_all, sees

from kvstore.objects.changes import LOWER_TIER
from kvstore.objects.outcomes import Got, Put
from kvstore.protocol.messages import Placed
from kvstore.store import Store

# What an owner takes at once, and what is claimed and written.
SIZES = pytest.mark.parametrize("nbytes", [NBYTES, 300_000])


def test_what_another_process_has_is_not_stored_again(directory: Path, owner: Store) -> None:
    with owning(config(directory, 8 * MIB)) as other:
        put_all(other)
        sees(owner)
        more = np.concatenate([KEYS, keys(2, 1)])
        outcomes = owner.put(more, SIG, filled(owner, N + 2).pieces)
        assert outcomes == [Put.EXISTS] * N + [Put.STORED] * 2
        assert owner._owners.own is not None
        assert owner._owners.own.stats().objects == 2


def test_copies_of_the_pool_are_counted(directory: Path, owner: Store) -> None:
    put_all(owner)
    with owning(config(directory, 8 * MIB, copies=2)) as other:
        sees(other)
        room = filled(other)
        assert other.put(KEYS, SIG, room.pieces) == [Put.STORED] * N, "one of two is missing"
        assert other.put(KEYS, SIG, room.pieces) == [Put.EXISTS] * N
        assert len(other) == 2 * N


@SIZES
@pytest.mark.parametrize("way", ["guest", "tcp_guest"])
def test_who_has_stored_finds_it_before_it_is_announced(
    request: pytest.FixtureRequest, owner: Store, way: str, nbytes: int
) -> None:
    store: Store = request.getfixturevalue(way)
    until(store._owners.usable, "the owner is known")
    room, back = filled(store, N, nbytes), Room(store, N, nbytes)
    with deaf(store):
        assert store.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
        assert store.exists(KEYS, SIG, nbytes).all()
        assert store.known(KEYS).all()
        assert store.get(KEYS, SIG, back.pieces) == [Got.RIGHT] * N
    assert (back.bytes == contents(N, nbytes)).all()
    assert owner.clear(SIG) == N
    until(lambda: not store.exists(KEYS, SIG, nbytes).any(), "what is announced later counts")


def test_what_was_announced_already_is_not_taken_from_an_answer(guest: Store, owner: Store) -> None:
    """The object may have gone since the answer."""
    until(guest._owners.usable, "the owner is known")
    (followed,) = guest._owners._following.owners()
    put_all(owner)
    # A snapshot may have told of them before.
    until(lambda: followed._changes == N, "the owner's announcements")
    slots, generations = np.array([5, LOWER_TIER, 0], "<u4"), np.array([1, 0, 0], "<u4")

    def learn(number: int) -> list[bool]:
        placed = Placed(number, slots.tobytes(), generations.tobytes())
        followed.learn(keys(3, 5), SIG, NBYTES, placed)
        found: list[bool] = guest.exists(keys(3, 5), SIG, NBYTES).tolist()
        return found

    assert learn(N) == [False] * 3
    assert learn(N + 1) == [True, True, False]
    followed.forget()
    assert learn(N + 2) == [False] * 3, "its number may be another's"
