# SPDX-License-Identifier: Apache-2.0
"""Whoever asks for what is new gets it whole, in order, or is told that it is not kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.objects.changes import CHANGE
from kvstore.rules.change_log import ChangeLog


@given(
    st.lists(st.integers(1, 9), max_size=30),
    st.integers(1, 40),
    st.integers(0, 300),
    st.integers(1, 20),
)
def test_changes_come_whole_and_in_order(
    batches: list[int], kept: int, number: int, limit: int
) -> None:
    log, total = ChangeLog(kept), 0
    for size in batches:
        changes = np.zeros(size, CHANGE)
        changes["slot"] = np.arange(total, total + size)
        log.append(changes)
        total += size
    assert len(log) == total
    found = log.since(number, limit)
    if found is None:
        assert number > total or number < total - kept, "what is young enough is kept"
        return
    assert found["slot"].tolist() == list(range(number, number + len(found)))
    assert len(found) >= min(limit, total - number), "a limit is no excuse to give nothing"


def test_a_follower_that_is_too_slow_is_told_so() -> None:
    log = ChangeLog(4)
    for _ in range(10):
        log.append(np.zeros(2, CHANGE))
    assert log.since(0, 10) is None
    assert log.since(21, 10) is None, "from the future: of another life of the owner"
    found = log.since(16, 10)
    assert found is not None
    assert len(found) == 4
