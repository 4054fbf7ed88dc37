# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/test`` prints at its end: where the time went. Pure, from records to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from testrun.lanes import Result

__all__ = ["read_times", "summary"]

SLOWEST = 20
Times: TypeAlias = Mapping[str, tuple[float, float]]
"""Seconds and processor seconds of each test."""


def read_times(lines: Iterable[str]) -> dict[str, tuple[float, float]]:
    """The time of each test, its set-up, call and tear-down together, from what the plugin has
    written."""
    found: dict[str, tuple[float, float]] = {}
    for line in lines:
        test, seconds, cpu_s = json.loads(line)
        before_s, before_cpu_s = found.get(test, (0.0, 0.0))
        found[test] = (before_s + seconds, before_cpu_s + cpu_s)
    return found


def summary(
    results: Sequence[Result], wall_s: float, times: Mapping[str, Times], set_up: Sequence[str]
) -> str:
    """A table of the steps, then the slowest tests, what was set up, and the last lines of each
    step that failed: who keeps only the end of a run's output has what he needs.

    Args:
        results: What became of each step.
        wall_s: How long the whole run took.
        times: Of steps that are pytest, by their names.
        set_up: Lines of a text, a tab, and seconds.
    """
    parts = [_steps(results, wall_s)]
    tests = [(one, f"{test} ({step})") for step in times for test, one in times[step].items()]
    if tests:
        rows = [f"{seconds:8.1f}  {cpu_s:6.1f}  {name}" for (seconds, cpu_s), name in tests]
        slowest = sorted(rows, reverse=True)[:SLOWEST]
        parts.append([f" seconds   CPU-s  slowest of {len(tests)} tests (step)", *slowest])
    if set_up:
        done = (line.rpartition("\t") for line in set_up)
        parts.append([" seconds  set up", *(f"{seconds:>8}  {what}" for what, _, seconds in done)])
    parts += [
        [f"### the end of what {one.lane}: {one.step} said", one.last_words]
        for one in results
        if one.last_words
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _steps(results: Sequence[Result], wall_s: float) -> list[str]:
    width = max([len("lane"), *(len(one.lane) for one in results)])
    name_width = max([len("step"), *(len(one.step) for one in results)])
    lines = [f"{'lane':{width}}  {'step':{name_width}}  {'seconds':>8}  {'CPU-s':>6}  result"]
    for one in results:
        word = "ok" if one.is_good else "left out" if one.code is None else f"FAILED ({one.code})"
        name = f"{one.lane:{width}}  {one.step:{name_width}}"
        lines.append(f"{name}  {one.seconds:8.0f}  {one.cpu_s:6.0f}  {word}")
    cpu_s = sum(one.cpu_s for one in results)
    return [*lines, f"{'':{width}}  {'all':{name_width}}  {wall_s:8.0f}  {cpu_s:6.0f}"]
