# SPDX-License-Identifier: Apache-2.0
"""Locks of look-ups: each is taken back once, and none that may have ended in the store."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lmcache.locks import Locks

pytestmark = pytest.mark.pure

TTL_S = 10.0
KEYS = "abc"


def test_each_lock_is_taken_back_once_under_its_own_signature() -> None:
    locks = Locks(10)
    locks.add("a", b"one", TTL_S)
    locks.add("a", b"two", TTL_S)
    locks.add("b", b"two", TTL_S)
    assert locks.count(0.0) == 2
    assert locks.take("abc", 0.0) == {b"one": ["a"], b"two": ["b"]}
    assert locks.held("abc", 0.0) == {"a"}
    assert locks.take("ab", 0.0) == {b"two": ["a"]}
    assert locks.take("ab", 0.0) == {}
    assert locks.room(0.0) == 10


def test_a_lock_whose_pin_has_ended_is_none() -> None:
    locks = Locks(10)
    locks.add("a", b"", TTL_S)
    assert locks.held("a", TTL_S - 1) == {"a"}
    assert locks.held("a", TTL_S) == set()
    assert locks.count(TTL_S) == 0
    assert locks.take("a", TTL_S) == {}


def test_there_is_a_bound_and_those_that_have_ended_make_room() -> None:
    locks = Locks(2)
    locks.add("a", b"", TTL_S)
    locks.add("b", b"", TTL_S + 1)
    assert locks.room(0.0) == 0
    assert locks.room(TTL_S) == 1
    assert locks.held("ab", TTL_S) == {"b"}


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS), st.floats(0, 5))))
def test_never_more_is_taken_back_than_is_held(events: list[tuple[bool, str, float]]) -> None:
    locks, now_s = Locks(1000), 0.0
    until_s: dict[str, list[float]] = {key: [] for key in KEYS}
    for is_lock, key, passed_s in events:
        now_s += passed_s
        if is_lock:
            locks.add(key, b"", now_s + TTL_S)
            until_s[key].append(now_s + TTL_S)
        else:
            until_s[key] = [one for one in until_s[key] if one > now_s]
            assert Counter(locks.take(key, now_s).get(b"", [])) == Counter(
                [key] if until_s[key] else []
            )
            until_s[key] = until_s[key][1:]
    held = {key for key, some in until_s.items() if any(one > now_s for one in some)}
    assert locks.held(KEYS, now_s) == held
    assert locks.count(now_s) == len(held)
