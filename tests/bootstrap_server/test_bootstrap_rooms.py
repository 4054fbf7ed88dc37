# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server.ranks.rooms import RoomTable


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4))),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_rooms_expire_and_are_bounded_oldest_first(
    calls: list[tuple[int, int, int]], capacity: int, expiry_s: int
) -> None:
    table = RoomTable(capacity, expiry_s)
    model: list[tuple[int, int, int]] = []  # room, dp rank, time; oldest registration first
    now_s = 0
    for room, dp_rank, wait_s in calls:
        now_s += wait_s
        table.register(room, dp_rank, now_s)
        model = [entry for entry in model if entry[0] != room and now_s - entry[2] < expiry_s]
        model = [*model, (room, dp_rank, now_s)][-capacity:]
        assert len(table) == len(model)
        assert table.query(range(6), now_s) == {entry[0]: entry[1] for entry in model}
    assert table.query(range(6), now_s + expiry_s) == {}


@pytest.mark.parametrize(("capacity", "expiry_s"), [(0, 1.0), (1, 0.0)])
def test_room_table_needs_positive_bounds(capacity: int, expiry_s: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RoomTable(capacity, expiry_s)
