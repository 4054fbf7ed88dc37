# SPDX-License-Identifier: Apache-2.0
"""Which devices make rails."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te.transports.rdma.striping import nominal, pairs, partners

pytestmark = pytest.mark.pure


@given(st.integers(1, 16), st.integers(1, 16))
def test_pairs_use_every_nic_evenly(local: int, remote: int) -> None:
    table = pairs(local, remote)
    assert len(table) == max(local, remote)
    for column, count in zip(zip(*table, strict=True), (local, remote), strict=True):
        uses = np.bincount(column, minlength=count)
        assert uses.min() >= 1
        assert uses.max() - uses.min() <= 1
    if local == remote:
        assert all(here == there for here, there in table)


@given(st.integers(0, 15), st.integers(1, 16))
def test_partners_are_all_remote_nics_the_like_first(nic: int, remote: int) -> None:
    order = partners(nic, remote)
    assert sorted(order) == list(range(remote))
    assert order[0] == nic % remote


def test_pairs_need_devices_on_both_sides() -> None:
    assert pairs(0, 2) == pairs(2, 0) == []


def test_ports_of_unknown_speed_are_taken_to_be_as_fast_as_the_fastest() -> None:
    assert nominal([0, 5e9, 2e9]) == [5e9, 5e9, 2e9]
    one, other = nominal([0, 0])
    assert one == other > 0
