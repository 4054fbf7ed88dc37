# SPDX-License-Identifier: Apache-2.0
"""Objects that no chunk has room for are stored in parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_makers import SIG, contents, keys, until
from store_objects import Room, filled

from kvstore.large import LargeObjects
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.objects.pieces import Pieces
from kvstore.store import StillLanding, Store

PART, NBYTES, N = 500_000, 1_200_001, 2
KEYS = keys(N)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_a_cut_has_the_bytes_of_its_range(sizes: list[int], data: st.DataObject) -> None:
    starts = np.array([[1000 * row + 100 * i for i in range(len(sizes))] for row in range(3)])
    pieces = Pieces(starts, np.array(sizes))
    first = data.draw(st.integers(0, pieces.object_bytes - 1))
    end = data.draw(st.integers(first + 1, pieces.object_bytes))

    def addresses(of: Pieces) -> list[list[int]]:
        rows = of.addresses.tolist()
        return [
            [at + i for at, n in zip(row, of.nbytes.tolist(), strict=True) for i in range(n)]
            for row in rows
        ]

    assert addresses(pieces.cut(first, end)) == [row[first:end] for row in addresses(pieces)]


@pytest.mark.parametrize("way", ["owner", "guest", "tcp_guest"])
def test_what_was_stored_in_parts_comes_back(
    request: pytest.FixtureRequest, owner: Store, way: str
) -> None:
    store: Store = request.getfixturevalue(way)
    until(store._owners.usable, "the owner is known")
    large = LargeObjects(store, PART)
    room, back = filled(store, N, NBYTES), Room(store, N, NBYTES)
    assert store.put(KEYS, SIG, room.pieces) == [Put.TOO_LARGE] * N
    assert not large.exists(KEYS, SIG, NBYTES).any()
    assert large.put(KEYS, SIG, room.split(1, 600_000, NBYTES - 600_001)) == [Put.STORED] * N
    assert large.put(KEYS, SIG, room.pieces) == [Put.EXISTS] * N
    assert large.exists(KEYS, SIG, NBYTES).all()
    assert large.sizes(keys(3), SIG).tolist() == [NBYTES, NBYTES, 0]
    assert large.get(KEYS, SIG, back.split(NBYTES - 2, 2)) == [Got.RIGHT] * N
    assert (back.bytes == contents(N, NBYTES)).all()
    assert large.remove(keys(3), SIG, NBYTES) == [Removed.REMOVED] * N + [Removed.MISSING]
    until(lambda: large.get(KEYS, SIG, back.pieces) == [Got.MISSING] * N, "that is announced")
    assert large.sizes(KEYS, SIG).tolist() == [0, 0]


@pytest.mark.parametrize("way", ["owner", "tcp_guest"])
@pytest.mark.parametrize("offset", [0, 499_999, 500_000, NBYTES - 600_001])
def test_a_range_of_several_parts_is_read(
    request: pytest.FixtureRequest, owner: Store, way: str, offset: int
) -> None:
    store: Store = request.getfixturevalue(way)
    until(store._owners.usable, "the owner is known")
    large = LargeObjects(store, PART)
    large.put(KEYS, SIG, filled(store, N, NBYTES).pieces)
    back = Room(store, N, 600_001)
    assert large.get_range(KEYS, SIG, NBYTES, offset, back.split(2, 599_999)) == [Got.RIGHT] * N
    assert (back.bytes == contents(N, NBYTES)[:, offset : offset + 600_001]).all()
    owner.clear(SIG)
    assert Got.RIGHT not in large.get_range(KEYS, SIG, NBYTES, offset, back.pieces)
    with pytest.raises(ValueError, match=f"600001 bytes from {NBYTES} on are no part of an object"):
        large.get_range(KEYS, SIG, NBYTES, NBYTES, back.pieces)


def test_all_of_a_signature_are_removed_and_counted(owner: Store) -> None:
    large = LargeObjects(owner, PART)
    large.put(KEYS, SIG, filled(owner, N, NBYTES).pieces)
    large.put(KEYS, bytes(16), filled(owner, N, NBYTES).pieces)
    assert large.clear(SIG) == N
    assert large.sizes(KEYS, SIG).tolist() == [0] * N
    assert large.sizes(KEYS, bytes(16)).tolist() == [NBYTES] * N
    assert large.clear(bytes(16)) == N
    assert len(owner) == 0


def test_one_part_that_is_missing_is_a_miss(owner: Store) -> None:
    large = LargeObjects(owner, PART)
    room = filled(owner, N, NBYTES)
    assert large.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    own = owner._owners.own
    assert own is not None
    (first,) = own._table._objects.keys() - set(list(own._table._objects)[1:])
    owner.remove(np.frombuffer(first[:16], np.uint8).reshape(1, 16), SIG)
    assert large.exists(KEYS, SIG, NBYTES).tolist() == [False, True]
    assert large.get(KEYS, SIG, room.pieces) == [Got.MISSING, Got.RIGHT]


@pytest.mark.parametrize("other_bytes", [NBYTES - 1, NBYTES])
@pytest.mark.parametrize("other_part", [PART, 2 * PART])
def test_parts_of_another_size_are_never_taken_for_one_s_own(
    owner: Store, other_bytes: int, other_part: int
) -> None:
    """Under the same key lies an object of another size, or one that somebody has cut otherwise."""
    other = filled(owner, 1, other_bytes, seed=4 if other_bytes != NBYTES else 0)
    large = LargeObjects(owner, PART)
    large_other = LargeObjects(owner, other_part)
    assert large_other.put(KEYS[:1], SIG, other.pieces) == [Put.STORED]
    is_same = (other_bytes, other_part) == (NBYTES, PART)
    room, back = filled(owner, 1, NBYTES), Room(owner, 1, NBYTES)
    assert large.exists(KEYS[:1], SIG, NBYTES).tolist() == [is_same]
    large.put(KEYS[:1], SIG, room.pieces)
    assert large.get(KEYS[:1], SIG, back.pieces) == [Got.RIGHT]
    assert (back.bytes == contents(1, NBYTES)).all()


def test_none_of_them_is_none(owner: Store) -> None:
    large = LargeObjects(owner, PART)
    nothing = Pieces(np.zeros((0, 1), np.uint64), np.array([NBYTES]))
    assert large.put(KEYS[:0], SIG, nothing) == []
    assert large.get(KEYS[:0], SIG, nothing) == []
    assert len(large.sizes(KEYS[:0], SIG)) == 0


def test_memory_for_sizes_is_given_up_once_nothing_lands_there(
    owner: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []

    class Stuck(StillLanding):
        def wait(self, clock: object = None) -> None:
            waited.append(True)

    def stuck(*_: object) -> None:
        raise Stuck([])

    def deregister(region: object) -> None:
        assert waited

    monkeypatch.setattr(owner, "get", stuck)
    monkeypatch.setattr(owner, "deregister", deregister)
    with pytest.raises(StillLanding):
        LargeObjects(owner, PART).sizes(KEYS, SIG)
    assert waited
