# SPDX-License-Identifier: Apache-2.0
"""scripts/healing: what is asked for, and figures from what a source has seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healing_run.figures import Figures, Times, figures, header, late, line
from healing_run.messages import Log, Moved, RailChange
from healing_run.options import parse
from healing_run.rows import NAMES, ROWS

CUT, ONLY, RESTART = ROWS["cut-1s"], ROWS["only-cut-1s"], ROWS["restart"]
BEFORE = [Moved(n / 100, n / 100 + 0.002, "") for n in range(100)]
#: The fault comes at 1 s and ends at 2 s.
TIMES = Times(1.0, 2.0)


def seen(*moved: Moved, known_s: float | None = None) -> Log:
    rails = [RailChange(0.0, "rxe0", "up")]
    rails += [] if known_s is None else [RailChange(known_s, "rxe0", "suspect")]
    return Log([*BEFORE, *moved], rails)


def test_what_a_dead_rail_held_arrives_by_another() -> None:
    log = seen(
        Moved(0.999, 1.23, ""),
        Moved(1.1, 1.102, ""),
        Moved(1.15, 1.21, ""),
        Moved(1.5, 1.502, ""),
        known_s=1.2,
    )
    found = figures(CUT, TIMES, log)
    assert found.known_s == pytest.approx(0.2)
    assert found.over_another_s == pytest.approx(0.03)
    assert found.silent_s == pytest.approx(0.272)
    assert found.again_s is None
    assert (found.slow, found.failed) == (1, 0)
    assert found.usual_s == pytest.approx(0.002)


def test_a_fault_that_no_rail_notices_has_no_such_figures() -> None:
    found = figures(CUT, TIMES, seen(Moved(1.0, 1.002, "")))
    assert (found.known_s, found.over_another_s) == (None, None)
    assert late(CUT, [found]) == []


def test_on_the_only_way_it_counts_from_the_end_of_the_fault() -> None:
    log = seen(Moved(0.999, 1.9, "the link is gone"), Moved(0.9, 1.001, ""), Moved(1.5, 2.3, ""))
    found = figures(ONLY, TIMES, log)
    assert found.again_s == pytest.approx(0.3)
    assert found.over_another_s is None
    assert (found.slow, found.failed) == (2, 1)
    assert found.longest_s == pytest.approx(0.8)


def test_bars_hold_for_the_median() -> None:
    good = Figures(0.2, 0.04, 0.3, None, 3, 0, 0.4, 0.002)
    bad = replace(good, known_s=0.3, over_another_s=0.2)
    assert late(CUT, [good, good, bad]) == []
    assert [one.split()[0] for one in late(CUT, [good, bad, bad])] == ["known_s", "over_another_s"]
    assert late(ROWS["cut-50ms"], [bad]) == []
    slow = replace(good, known_s=None, over_another_s=None, again_s=1.2)
    assert late(ONLY, [slow]) == []
    assert late(RESTART, [slow]) == ["served 1.200 s after it was ready, above 1.0 s"]


def test_a_line_has_a_cell_for_each_name() -> None:
    one = Figures(0.2, None, 0.3, 1.5, 3, 0, 0.4, 0.002)
    said = line("cut", [one])
    assert said.startswith(
        "| `cut` | 200 ms (200 ms) | – | 300 ms (300 ms) | 1.50 s (1.50 s) | 3 |"
    )
    assert said.endswith("| 0 | 400 ms (400 ms), 2 ms |")
    assert header()[0].count("|") == said.count("|")


def test_what_is_asked_for() -> None:
    assert parse([]).names == NAMES
    options = parse(["--rdma", "--rows", "restart,cut-1s", "--repeat", "1"])
    assert (options.rdma, options.names, options.repeat) == (True, ("cut-1s", "restart"), 1)
