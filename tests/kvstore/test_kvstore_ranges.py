# SPDX-License-Identifier: Apache-2.0
"""A part of an object, for who needs no more of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_lower_tier import KEYS as TIERED
from store_lower_tier import NBYTES as TIERED_BYTES
from store_lower_tier import OBJECTS, in_lower_tier, with_disk
from store_lower_tier import put_all as put_too_many
from store_makers import SIG, config, contents, deaf, until
from store_meeting import owning
from store_objects import KEYS, NBYTES, N, Room, put_all, sees

from kvstore.objects.outcomes import Got
from kvstore.store import Store


@pytest.mark.parametrize("way", ["owner", "guest", "tcp_guest"])
@pytest.mark.parametrize(("offset", "count"), [(0, 1), (4095, 4098), (NBYTES - 7, 7), (0, NBYTES)])
def test_a_part_is_read(
    request: pytest.FixtureRequest, owner: Store, way: str, offset: int, count: int
) -> None:
    store: Store = request.getfixturevalue(way)
    put_all(owner)
    sees(store)
    room = Room(store, N, count)
    assert store.get_range(KEYS, SIG, NBYTES, offset, room.pieces) == [Got.RIGHT] * N
    assert (room.bytes == contents(N, NBYTES)[:, offset : offset + count]).all()
    assert store.get_range(KEYS, SIG, NBYTES + 1, offset, room.pieces) == [Got.REJECTED] * N


@pytest.mark.parametrize("way", ["guest", "tcp_guest"])
def test_what_has_gone_meanwhile_is_not_right(
    request: pytest.FixtureRequest, owner: Store, way: str
) -> None:
    store: Store = request.getfixturevalue(way)
    put_all(owner)
    sees(store)
    room = Room(store, N, 100)
    with deaf(store):
        owner.remove(KEYS[:4], SIG)
        outcomes = store.get_range(KEYS, SIG, NBYTES, 50, room.pieces)
    assert outcomes == [Got.MOVED] * 4 + [Got.RIGHT] * (N - 4)


@pytest.mark.parametrize("offset", [-1, NBYTES - 99, NBYTES])
def test_a_part_beyond_the_object_is_refused(owner: Store, offset: int) -> None:
    room = Room(owner, N, 100)
    with pytest.raises(ValueError, match=f"100 bytes from {offset} on are no part of an object"):
        owner.get_range(KEYS, SIG, NBYTES, offset, room.pieces)


def test_a_part_of_what_lies_in_the_lower_tier_is_promoted_first(directory: Path) -> None:
    with owning(with_disk(directory)) as lender, owning(config(directory)) as reader:
        put_too_many(lender, lender)
        until(lambda: in_lower_tier(reader).any() and len(reader) == len(TIERED), "it is announced")
        lower = np.flatnonzero(in_lower_tier(reader))[:3]
        room = Room(reader, len(lower), 1000)
        outcomes = reader.get_range(TIERED[lower], SIG, TIERED_BYTES, 700, room.pieces)
        assert outcomes == [Got.RIGHT] * len(lower)
        assert (room.bytes == OBJECTS[lower, 700:1700]).all()
