# SPDX-License-Identifier: Apache-2.0
"""What each run leaves out of the layouts, it has in pairs."""

from __future__ import annotations

from serving_layouts import LAYOUTS


def test_every_two_features_that_go_together_are_served_together_in_each_run() -> None:
    of_each_run = [case for case in LAYOUTS.values() if case.each_run]
    served = set().union(*(case.pairs() for case in of_each_run))
    for name, case in LAYOUTS.items():
        missing = case.pairs() - served
        assert not missing, f"no case of each run has these features of {name} together: {missing}"


def test_each_layout_is_another() -> None:
    assert len({frozenset(case.pairs()) for case in LAYOUTS.values()}) == len(LAYOUTS)
