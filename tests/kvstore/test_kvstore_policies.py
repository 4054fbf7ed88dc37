# SPDX-License-Identifier: Apache-2.0
"""Policies keep what is stored, whatever happens, and evict what they should."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.memory.policies import POLICIES, Arc, Lru

KEYS = [bytes([i]) for i in range(10)]
steps = st.lists(st.tuples(st.sampled_from(["use", "remove", "evict"]), st.sampled_from(KEYS)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(steps)
def test_a_policy_loses_and_invents_nothing(name: str, steps: list[tuple[str, bytes]]) -> None:
    policy = POLICIES[name]()
    stored: set[bytes] = set()
    for step, key in steps:
        if step == "evict":
            victim = policy.evict()
            assert (victim is None) == (not stored)
            stored.discard(victim or b"")
        elif step == "remove" and key in stored:
            policy.remove(key)
            stored.remove(key)
        elif step == "use" and key in stored:
            policy.touch(key)
        elif step == "use":
            policy.add(key)
            stored.add(key)
        assert len(policy) == len(stored)
    assert {policy.evict() for _ in range(len(stored))} == stored
    assert policy.evict() is None


@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(steps)
def test_lru_evicts_what_was_used_longest_ago(steps: list[tuple[str, bytes]]) -> None:
    policy, order = Lru(), list[bytes]()
    for step, key in steps:
        if step == "evict":
            assert policy.evict() == (order.pop(0) if order else None)
        elif key in order:
            order.remove(key)
            (policy.remove if step == "remove" else policy.touch)(key)
            if step == "use":
                order.append(key)
        elif step == "use":
            policy.add(key)
            order.append(key)


@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(steps)
def test_arc_remembers_no_more_than_its_paper_allows(steps: list[tuple[str, bytes]]) -> None:
    arc, most = Arc(), 1
    for step, key in steps:
        if step == "evict":
            arc.evict()
        elif key in arc._t1 or key in arc._t2:
            (arc.remove if step == "remove" else arc.touch)(key)
        elif step == "use":
            arc.add(key)
        most = max(most, len(arc))
        lists = [arc._t1, arc._t2, arc._b1, arc._b2]
        assert sum(map(len, lists)) == len(set().union(*lists)), "a key is in one list"
        assert len(arc._t1) + len(arc._b1) <= most
        assert sum(map(len, lists)) <= 2 * most
        assert 0 <= arc._p <= most


def through(policy: Arc | Lru, uses: list[int], capacity: int) -> int:
    """The hits of a cache of that size."""
    stored: set[bytes] = set()
    hits = 0
    for use in uses:
        key = use.to_bytes(4, "big")
        if key in stored:
            hits += 1
            policy.touch(key)
            continue
        if len(stored) == capacity:
            victim = policy.evict()
            assert victim is not None
            stored.remove(victim)
        policy.add(key)
        stored.add(key)
    return hits


def test_arc_keeps_what_is_used_often_through_a_scan() -> None:
    """40 keys that all come back, and one long scan between: LRU forgets all 40 each time."""
    uses = [
        key
        for i in range(20)
        for key in [*range(40), *range(40), *range(1000 + 100 * i, 1100 + 100 * i)]
    ]
    lru, arc = through(Lru(), uses, 60), through(Arc(), uses, 60)
    assert lru == 20 * 40
    assert arc > 1.5 * lru


def test_arc_learns_that_what_comes_once_comes_back_later() -> None:
    """A loop a little larger than the part that an untrained ARC leaves to keys used once."""
    arc = Arc()
    through(arc, list(range(50)) * 2, 100)
    for key in range(100, 160):
        arc.evict()
        arc.add(key.to_bytes(4, "big"))
    evicted = next(iter(arc._b2 or arc._b1))
    in_b1, before = evicted in arc._b1, arc._p
    arc.evict()
    arc.add(evicted)
    assert evicted in arc._t2
    assert (arc._p > before) if in_b1 else (arc._p <= before)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(st.lists(st.sampled_from(["add", "evict"]), max_size=40), st.integers(0, 8))
def test_many_at_once_are_as_many_one_by_one(name: str, steps: list[str], more: int) -> None:
    policies = POLICIES[name](), POLICIES[name]()
    stored: list[bytes] = []
    for number, step in enumerate(steps):
        if step == "add":
            batch = [bytes([number, i]) for i in range(3)]
            gone = [key for key in (bytes([0, 0]), bytes([1, 1])) if key not in stored + batch]
            batch += gone[: more % 3]  # Those may have been evicted before.
            for key in batch:
                policies[0].add(key)
            policies[1].add_all(batch)
            stored += batch
        else:
            evicted = [one.evict() for one in policies]
            assert evicted[0] == evicted[1]
            if evicted[0] is not None:
                stored.remove(evicted[0])
    assert len({len(one) for one in policies}) == 1
