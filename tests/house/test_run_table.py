# SPDX-License-Identifier: Apache-2.0
"""The table at the end of scripts/test."""

from __future__ import annotations

from testrun.lanes import Result
from testrun.table import SLOWEST, summary


def test_it_has_each_step_and_what_became_of_it() -> None:
    results = [
        Result("one", "set-up", 0, is_good=True, seconds=61.4, cpu_s=30.2),
        Result("one", "tests", 7, is_good=False, seconds=5.0, cpu_s=9.0),
        Result("other", "more tests", None, is_good=False),
    ]
    assert summary(results, 66.6, {}, []).splitlines() == [
        "lane   step         seconds   CPU-s  result",
        "one    set-up            61      30  ok",
        "one    tests              5       9  FAILED (7)",
        "other  more tests         0       0  left out",
        "       all               67      39",
    ]


def test_it_has_the_slowest_tests_of_all_steps() -> None:
    results = [Result("one", name, 0, is_good=True) for name in ("a", "b")]
    times = {
        "a": {f"test_a{number}": (float(number), 0.0) for number in range(30)},
        "b": {"test_b": (25.5, 1.25)},
    }
    shown = summary(results, 1.0, times, []).split("\n\n")[1].splitlines()
    assert shown[0] == " seconds   CPU-s  slowest of 31 tests (step)"
    assert len(shown) == 1 + SLOWEST
    assert shown[1:6] == [
        "    29.0     0.0  test_a29 (a)",
        "    28.0     0.0  test_a28 (a)",
        "    27.0     0.0  test_a27 (a)",
        "    26.0     0.0  test_a26 (a)",
        "    25.5     1.2  test_b (b)",
    ]


def test_it_has_what_was_set_up() -> None:
    shown = summary([], 1.0, {}, ["serving: SGLang\t71", "fast: this project\t9"])
    assert shown.split("\n\n")[1].splitlines() == [
        " seconds  set up",
        "      71  serving: SGLang",
        "       9  fast: this project",
    ]


def test_it_ends_with_what_failed() -> None:
    results = [
        Result("one", "set-up", 1, is_good=False, last_words="no connection\ngiving up"),
        Result("one", "tests", None, is_good=False),
        Result("two", "tests", 0, is_good=True),
    ]
    shown = summary(results, 1.0, {}, ["serving: SGLang\t71"])
    assert shown.endswith("### the end of what one: set-up said\nno connection\ngiving up")
    assert shown.count("###") == 1
