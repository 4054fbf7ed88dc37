# SPDX-License-Identifier: Apache-2.0
"""The program that measures what digests cost: it hands over what it says, and reports it."""

from __future__ import annotations

import numpy as np
import pytest
from handover_cost import cost, measured, report

from sglang_mooncake.layout.chosen import SAMPLE_ROOMS


@pytest.mark.slow
def test_each_kind_of_request_is_handed_over_and_those_with_digests_are_compared():
    off, drawn, all_, compared = measured("tcp", 2, pairs=3)
    assert (len(off), len(drawn), len(all_)) == (3, 3, 1)
    # Two a batch, and a batch of each kind goes ahead of the figures.
    assert compared == 2 * (4 + 2)
    said = report("tcp", 2, off, drawn, all_, compared)
    assert said.startswith("tcp, 2 at a time, rate: off ")
    assert "of 3 pairs, 12 requests compared" in said


def test_what_a_drawn_request_takes_longer_counts_as_often_as_one_is_drawn():
    off = np.ones(9)
    assert cost(off, off + SAMPLE_ROOMS / 100) == "1.00% (1.00% to 1.00%)"
    assert cost(off, off) == "0.00% (0.00% to 0.00%)"
