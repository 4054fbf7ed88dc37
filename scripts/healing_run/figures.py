# SPDX-License-Identifier: Apache-2.0
"""From what a source has seen to figures, and whether they reach the bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from healing_run.messages import Log, Moved
from healing_run.rows import Row

__all__ = ["BARS", "Figures", "Times", "figures", "header", "late", "line"]

#: A transfer that takes longer was held up: undisturbed ones take some milliseconds.
SLOW_S: Final = 0.1


@dataclass(frozen=True)
class Times:
    """Of a fault, `time.monotonic`: just before it, and when it was undone; of a destination that
    was started again, when it was ready."""

    fault_s: float
    undone_s: float


@dataclass(frozen=True)
class Figures:
    """All in seconds; None where the row has no such thing.

    known_s: from the fault until a rail was known not to carry; None if it was over before.
    over_another_s: from then until whatever was under way by the dead rail had arrived by another.
    silent_s: the longest time in which nothing arrived at all.
    again_s: with no other rail, from when the fault was undone until something arrived.
    slow, failed: transfers that took longer than SLOW_S, and that failed.
    longest_s: of those that arrived. usual_s: the median before the fault.
    """

    known_s: float | None
    over_another_s: float | None
    silent_s: float
    again_s: float | None
    slow: int
    failed: int
    longest_s: float
    usual_s: float


BARS: Final = {"known_s": 0.25, "over_another_s": 0.05}
#: A destination that is started again.
SERVED_S: Final = 1.0


def figures(row: Row, times: Times, log: Log) -> Figures:
    arrived = sorted((one for one in log.moved if not one.error), key=_ended_s)
    before = [one for one in arrived if one.ended_s < times.fault_s]
    behind = [one for one in arrived if one.ended_s >= times.fault_s]
    known_s = next(
        (
            one.at_s
            for one in log.rails
            if times.fault_s <= one.at_s <= times.undone_s and one.state != "up"
        ),
        None,
    )
    healed = [one for one in behind if one.ended_s >= times.undone_s]
    has_another = row.rails > 1
    return Figures(
        known_s=None if known_s is None else known_s - times.fault_s,
        over_another_s=_over_another_s(behind, known_s) if has_another else None,
        silent_s=_silent_s(times.fault_s, behind),
        again_s=None if has_another else _first_s(healed) - times.undone_s,
        slow=sum(one.ended_s - one.began_s > SLOW_S for one in behind),
        failed=sum(bool(one.error) for one in log.moved),
        longest_s=max((one.ended_s - one.began_s for one in behind), default=math.inf),
        usual_s=median(one.ended_s - one.began_s for one in before),
    )


def late(row: Row, found: Sequence[Figures]) -> list[str]:
    """Of the median of several runs, in sentences. A fault that is over before a rail has to be
    known to be dead has no bars."""
    bad = []
    if row.rails > 1 and row.lasts_s > BARS["known_s"]:
        for name, limit_s in BARS.items():
            values = [v for one in found if (v := getattr(one, name)) is not None]
            if values and median(values) > limit_s:
                bad.append(f"{name} {median(values):.3f} s is above {limit_s} s")
    if row.fault == "restart":
        values = [one.again_s for one in found if one.again_s is not None]
        if median(values) > SERVED_S:
            bad.append(f"served {median(values):.3f} s after it was ready, above {SERVED_S} s")
    return bad


def header() -> list[str]:
    names = [
        "fault",
        "dead rail known after",
        "its bytes over another rail, from then",
        "longest silence",
        "flows again after the end",
        "held up > 0.1 s",
        "failed",
        "longest transfer (usual)",
    ]
    return [_line(names), _line(["---"] * len(names))]


def line(name: str, found: Sequence[Figures]) -> str:
    """Of several runs of a row, in Markdown: the median, and the worst in parentheses."""

    def cell(field: str) -> str:
        values = [v for one in found if (v := getattr(one, field)) is not None]
        return f"{_time(median(values))} ({_time(max(values))})" if values else "–"

    usual = _time(median(one.usual_s for one in found))
    counts = (f"{median(getattr(one, of) for one in found):g}" for of in ("slow", "failed"))
    times = (cell(field) for field in ("known_s", "over_another_s", "silent_s", "again_s"))
    return _line([f"`{name}`", *times, *counts, f"{cell('longest_s')}, {usual}"])


def _over_another_s(behind: Sequence[Moved], known_s: float | None) -> float | None:
    """Those that were under way when the rail was known to be dead."""
    if known_s is None:
        return None
    held = [one.ended_s for one in behind if one.began_s <= known_s <= one.ended_s]
    return max(held, default=known_s) - known_s


def _silent_s(fault_s: float, behind: Sequence[Moved]) -> float:
    ends = [fault_s, *(one.ended_s for one in behind)]
    return max((b - a for a, b in pairwise(ends)), default=math.inf)


def _first_s(behind: Sequence[Moved]) -> float:
    return behind[0].ended_s if behind else math.inf


def _ended_s(one: Moved) -> float:
    return one.ended_s


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
