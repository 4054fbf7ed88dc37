# SPDX-License-Identifier: Apache-2.0
"""What a server has stored: what is stored again is not dropped, all is seen in turn and listed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_makers import key, keys

from kvstore.lmcache.accounts import Accounts, ObjectSpec

pytestmark = pytest.mark.pure

FORM = ObjectSpec(b"signature.......", 512)


def accounts(count: int) -> Accounts:
    made = Accounts()
    for one in keys(count):
        assert made.add(one, one.chunk_hash, FORM, 1.0) is None
    return made


def test_what_was_stored_again_meanwhile_is_not_dropped() -> None:
    made = accounts(2)
    seen = made.of(keys(3))
    assert list(seen) == keys(2)
    assert made.add(key(0), b"", FORM, 2.0) is seen[key(0)]
    assert list(made.drop(seen)) == [key(1)]
    assert list(made.of(keys(2))) == [key(0)]
    assert len(made) == 1


def test_all_are_seen_in_turn_but_those_that_were_stored_just_now() -> None:
    made = accounts(5)
    made.add(key(3), b"", FORM, 9.0)
    seen = [one for _ in range(5) for one in made.next_to_see(2, 5.0)]
    assert sorted(seen, key=keys(5).index) == sorted(
        2 * [key(0), key(1), key(2), key(4)], key=keys(5).index
    )
    made.drop(made.of(keys(5)))
    assert made.next_to_see(2, 5.0) == {}


@given(st.integers(0, 12), st.integers(1, 5), st.sets(st.integers(0, 11)))
def test_pages_have_every_key_once_though_some_go_meanwhile(
    count: int, page: int, gone: set[int]
) -> None:
    made = accounts(count)
    some, following = made.page(None, page, 0)
    listed = [one for one, _ in some]
    dropped = made.drop(made.of([key(one) for one in gone]))
    while following is not None:
        some, following = made.page(None, page, following)
        assert len(some) <= page
        assert {nbytes for _, nbytes in some} <= {FORM.nbytes}
        listed += [one for one, _ in some]
    assert len(listed) == len(set(listed))
    assert {one for one in keys(count) if one not in dropped} <= set(listed)


def test_one_model_is_listed_alone() -> None:
    made = accounts(2)
    other = key(0, model_name="other")
    made.add(other, b"", FORM, 1.0)
    assert made.page("other", 5, 0) == ([(other, FORM.nbytes)], None)
    assert made.page("neither", 5, 0) == ([], None)
