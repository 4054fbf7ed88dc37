# SPDX-License-Identifier: Apache-2.0
"""The rate at which bytes land, from transfers as they end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.pace import SAMPLE_BYTES_MIN, Pace


def test_time_in_which_nothing_is_under_way_does_not_count():
    pace = Pace()
    for begin_s in (0.0, 100.0):
        pace.began(begin_s)
        pace.ended(10 << 20, begin_s + 2.0)
    assert pace.bytes_per_s == pytest.approx(5 << 20)


def test_transfers_beside_each_other_share_their_time():
    pace = Pace()
    pace.began(0.0)
    pace.began(0.0)
    pace.ended(4 << 20, 2.0)
    pace.ended(4 << 20, 4.0)
    assert pace.bytes_per_s == pytest.approx(2 << 20)


def test_small_transfers_are_taken_together():
    pace = Pace()
    for nth in range(4):
        pace.began(float(nth))
        pace.ended(SAMPLE_BYTES_MIN // 4, nth + 0.5)
        assert bool(pace.bytes_per_s) == (nth == 3)
    assert pace.bytes_per_s == pytest.approx(SAMPLE_BYTES_MIN / 2)


def test_what_fails_lands_nothing_but_takes_its_time():
    pace = Pace()
    pace.began(0.0)
    pace.ended(0, 1.0)
    assert pace.bytes_per_s == 0.0
    pace.began(1.0)
    pace.ended(SAMPLE_BYTES_MIN, 2.0)
    assert SAMPLE_BYTES_MIN / 2 <= pace.bytes_per_s < SAMPLE_BYTES_MIN


@pytest.mark.parametrize("took_s", [0.001, 0.2, 5.0])
def test_transfers_that_end_together_are_one_measurement(took_s):
    pace, nbytes = Pace(), 4 * SAMPLE_BYTES_MIN
    for begin_s in (0.0, 100.0):
        for _ in range(5):
            pace.began(begin_s)
        for nth in range(5):
            pace.ended(nbytes, begin_s + took_s + nth * 1e-6)
        assert pace.bytes_per_s == pytest.approx(5 * nbytes / took_s, rel=0.01)


def test_a_rate_that_has_changed_is_soon_believed():
    pace, now_s = Pace(), 0.0
    for nbytes in [100 << 20] * 20 + [10 << 20] * 20:
        pace.began(now_s)
        now_s += 0.1
        pace.ended(nbytes, now_s)
    assert pace.bytes_per_s == pytest.approx(100 << 20, rel=0.2)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-6, 10.0)), min_size=1))
def test_it_stays_between_the_slowest_and_the_fastest(samples):
    pace, now_s = Pace(), 0.0
    for nbytes, took_s in samples:
        pace.began(now_s)
        now_s += took_s
        pace.ended(nbytes + SAMPLE_BYTES_MIN, now_s)
        now_s += 1.0
    rates = [(nbytes + SAMPLE_BYTES_MIN) / took_s for nbytes, took_s in samples]
    assert min(rates) * 0.99 <= pace.bytes_per_s <= max(rates) * 1.01
