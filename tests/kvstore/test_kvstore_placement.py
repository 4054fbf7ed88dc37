# SPDX-License-Identifier: Apache-2.0
"""Everybody chooses the same owners, and their shares follow their weights."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from store_makers import keys

from kvstore.client.placement import choose

NAMES = [bytes([i]) * 16 for i in range(6)]


@given(st.integers(1, 6), st.integers(1, 4), st.randoms())
def test_the_choice_does_not_depend_on_who_chooses(
    owners: int, copies: int, random: object
) -> None:
    some = keys(50, 1)
    names = NAMES[:owners]
    weights = [1.0 + i for i in range(owners)]
    order = list(range(owners))
    random.shuffle(order)  # type: ignore[attr-defined]
    hosts = [str(i % 4) for i in range(owners)]
    here = choose(some, names, weights, hosts, copies, None)
    there = choose(
        some, *([one[i] for i in order] for one in (names, weights, hosts)), copies, None
    )
    assert here.shape == (50, min(copies, owners))
    assert (np.array(order)[there] == here).all()
    assert all(len(set(row)) == len(row) for row in here.tolist()), "copies lie apart"
    of_hosts = [{hosts[one] for one in row} for row in here.tolist()]
    assert {len(one) for one in of_hosts} == {min(copies, len(set(hosts)))}, "on other hosts, too"


def test_an_owner_that_goes_moves_its_own_share_alone() -> None:
    some = keys(2000, 2)
    before = choose(some, NAMES, [1.0] * 6, [""] * 6, 1, None)[:, 0]
    after = choose(some, NAMES[:5], [1.0] * 5, [""] * 5, 1, None)[:, 0]
    assert (before[before != 5] == after[before != 5]).all()
    shares = np.bincount(before, minlength=6) / 2000
    assert (abs(shares - 1 / 6) < 0.04).all()


def test_shares_follow_weights() -> None:
    chosen = choose(keys(4000, 3), NAMES[:2], [3.0, 1.0], [""] * 2, 1, None)[:, 0]
    assert abs((chosen == 0).mean() - 0.75) < 0.04


def test_the_own_one_comes_first_and_copies_go_elsewhere() -> None:
    chosen = choose(keys(100, 4), NAMES[:3], [1.0] * 3, [""] * 3, 2, 1)
    assert (chosen[:, 0] == 1).all()
    assert set(chosen[:, 1].tolist()) == {0, 2}


def test_without_owners_there_is_no_choice() -> None:
    assert choose(keys(3), [], [], [], 2, None).shape == (3, 0)
