# SPDX-License-Identifier: Apache-2.0
"""Layouts take turns, and each run has some of each kind."""

from __future__ import annotations

import pytest
from serving_layouts import LAYOUTS, Case
from testrun.turns import PARTS, Turn


def kinds(case: Case) -> set[str]:
    """What a layout shows that another one may not."""
    found = {case.model if case.model in ("deepseek", "qwen3") else "heads"}
    if case.prefill != case.decode:
        found.add("sizes differ")
    if case.page_size > 1:
        found.add("pages")
    return found | ({"chunks"} if case.chunked else set())


@pytest.mark.parametrize("before", range(PARTS))
def test_each_run_has_each_kind(before: int) -> None:
    """However many groups of other files come before them."""
    others = {f" {number}" for number in range(before)}
    every = set().union(*(kinds(case) for case in LAYOUTS.values()))
    for number in range(1, PARTS + 1):
        names = Turn(number).choose(others | set(LAYOUTS)) - others
        assert set().union(*(kinds(LAYOUTS[name]) for name in names)) == every, number


def test_each_layout_is_another() -> None:
    assert len(set(LAYOUTS.values())) == len(LAYOUTS)
