# SPDX-License-Identifier: Apache-2.0
"""The program that measures what digests cost: it hands over what it says, and reports it."""

from __future__ import annotations

import numpy as np
import pytest
from handover_cost import measured, ratio, report


@pytest.mark.slow
def test_each_kind_of_request_is_handed_over_and_those_that_are_drawn_are_compared():
    off, sample, all_, compared = measured("tcp", 2, pairs=3)
    assert (len(off), len(sample), len(all_)) == (3, 3, 1)
    # Of 8 in the sample the first one, and 4 of all; a batch of each goes ahead of the figures.
    assert compared == 1 + 4
    said = report("tcp", 2, off, sample, all_, compared)
    assert said.startswith("tcp, 2 at a time, rate: off ")
    assert "of 3 pairs; 5 requests compared" in said


def test_a_sample_that_takes_twice_as_long_has_half_the_rate():
    assert ratio(np.ones(9), np.full(9, 2.0)) == "0.5000 (0.5000 to 0.5000)"


def test_what_the_few_requests_cost_that_are_drawn_shows_for_requests_one_at_a_time():
    off = np.ones(6_400)
    sample = off + 64.0 * (np.arange(len(off)) % 64 == 0)
    said = report("tcp", 1, off, sample, off, 100)
    assert "mean: off 1000.00 ms, sample 2000.00 ms" in said
    assert "in time 0.5000 (" in said
