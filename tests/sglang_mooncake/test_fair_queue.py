# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mooncake.fair_queue import FairQueue


def test_who_has_enough_at_work_lets_others_go_first():
    queue: FairQueue[int] = FairQueue(at_work=3, of_one_owner=2, waiting=9)
    for number, owner in enumerate(["a", "a", "a", "b", "b"]):
        assert queue.add(owner, number, now_s=0.0)
    taken = [queue.take() for _ in range(4)]
    assert [work.item for work in taken if work is not None] == [0, 1, 3]
    assert taken[0] is not None
    queue.done(taken[0])
    after = queue.take()
    assert after is not None
    assert after.item == 2


@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(
    at_work=st.integers(1, 4),
    of_one_owner=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["a", "b", "c", "take", "done"]), max_size=60),
)
def test_all_that_is_added_is_taken_once_within_the_limits(at_work, of_one_owner, steps):
    queue: FairQueue[int] = FairQueue(at_work, of_one_owner, waiting=10)
    added, waiting, taken, under_way = 0, [], [], []
    for step in [*steps, *["take", "done"] * 60]:
        if step == "take":
            work = queue.take()
            room = len(under_way) < at_work
            may = [
                number
                for number, owner in waiting
                if sum(one.owner == owner for one in under_way) < of_one_owner
            ]
            assert (None if work is None else work.item) == (may[0] if room and may else None)
            if work is not None:
                waiting.remove((work.item, work.owner))
                taken.append(work.item)
                under_way.append(work)
        elif step == "done":
            if under_way:
                queue.done(under_way.pop(0))
        else:
            assert len(queue) == len(waiting)
            assert queue.add(step, added, 0.0) is (len(waiting) < 10)
            if len(waiting) < 10:
                waiting.append((added, step))
                added += 1
        assert len(under_way) <= at_work
        for owner in "abc":
            assert sum(work.owner == owner for work in under_way) <= of_one_owner
    assert sorted(taken) == list(range(added))
