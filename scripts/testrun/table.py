# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/test`` prints at its end: where the time went. Pure, from records to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from testrun.lanes import Result

__all__ = ["read_times", "summary"]

SLOWEST = 20


def read_times(lines: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Seconds and processor seconds of each test, from what ``testrun.times`` has written: its
    set-up, call and tear-down together."""
    found: dict[str, tuple[float, float]] = {}
    for line in lines:
        test, seconds, cpu_s = json.loads(line)
        before_s, before_cpu_s = found.get(test, (0.0, 0.0))
        found[test] = (before_s + seconds, before_cpu_s + cpu_s)
    return found


def summary(
    results: Sequence[Result],
    times: Iterable[tuple[str, dict[str, tuple[float, float]]]],
    wall_s: float,
) -> str:
    """A table of the steps, then the slowest tests.

    Args:
        results: What became of each step.
        times: The name of a step and the time of each of its tests, for steps of pytest.
        wall_s: Of the whole run.
    """
    width = max([len("lane"), *(len(one.lane) for one in results)])
    name_width = max([len("step"), *(len(one.step) for one in results)])
    lines = [f"{'lane':{width}}  {'step':{name_width}}  {'seconds':>8}  {'CPU-s':>6}  result"]
    for one in results:
        word = "ok" if one.is_good else "left out" if one.code is None else f"FAILED ({one.code})"
        name = f"{one.lane:{width}}  {one.step:{name_width}}"
        lines.append(f"{name}  {one.seconds:8.0f}  {one.cpu_s:6.0f}  {word}")
    cpu_s = sum(one.cpu_s for one in results)
    lines.append(f"{'':{width}}  {'all':{name_width}}  {wall_s:8.0f}  {cpu_s:6.0f}")
    tests = [
        (seconds, cpu_s, f"{test} ({step})")
        for step, of_step in times
        for test, (seconds, cpu_s) in of_step.items()
    ]
    if tests:
        lines += ["", f"{'seconds':>8}  {'CPU-s':>6}  slowest of {len(tests)} tests (step)"]
        slowest = sorted(tests, reverse=True)[:SLOWEST]
        lines += [f"{seconds:8.1f}  {cpu_s:6.1f}  {name}" for seconds, cpu_s, name in slowest]
    return "\n".join(lines)
