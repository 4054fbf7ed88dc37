# SPDX-License-Identifier: Apache-2.0
"""Results of steps: lines and tables for people, an object for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpu_check.steps import Step

__all__ = ["SCHEMA", "Result", "as_json", "exit_status", "line", "tables", "verdicts"]

#: Rises when a key of the object means something else.
SCHEMA: Final = 1
State = Literal["passed", "failed", "hung", "skipped", "no-gpu", "left-out"]


@dataclass(frozen=True)
class Result:
    """Of one step. ``found``: its figures and facts, units in their names; ``tables``: those for
    people, each with ``title``, ``headings`` and ``rows``, or ``text``; ``bars``: each with
    ``bar``, ``value`` and ``is_reached``."""

    step: Step
    state: State
    #: Why it is not passed; where it was, if it failed or hung.
    reason: str = ""
    elapsed_s: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    tables: Sequence[dict[str, Any]] = ()
    bars: Sequence[dict[str, Any]] = ()


def line(result: Result) -> str:
    """One, for when the step has ended."""
    what = f"{result.state:8}  {result.step.name:26}  {result.elapsed_s:6.1f} s"
    return f"{what}  {result.reason}".rstrip()


def exit_status(results: Sequence[Result]) -> int:
    """0 when every correctness step passed, or says why it cannot be run here; 2 without a GPU."""
    if any(one.state == "no-gpu" for one in results):
        return 2
    bad = ("failed", "hung", "left-out")
    return int(any(one.state in bad and one.step.kind == "correctness" for one in results))


def tables(results: Sequence[Result], caveat: str) -> str:
    """Facts, then figures, then the bars."""
    parts = []
    for result in results:
        if result.found and result.step.kind == "facts":
            facts = [[name, _cell(value)] for name, value in result.found.items()]
            parts.append(_table({"title": result.step.name, "headings": ["", ""], "rows": facts}))
        for one in result.tables:
            text = one["text"] if "text" in one else _table(one)
            parts.append(f"[{caveat}] {text}" if caveat else text)
    parts += [f"bar: {text}" for text in verdicts(results)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def verdicts(results: Sequence[Result]) -> list[str]:
    """A line for each bar."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    return [
        f"{result.step.name}: {one['bar']}: "
        + ("" if one["value"] is None else f"{one['value']:.2f}, ")
        + words[one["is_reached"]]
        for result in results
        for one in result.bars
    ]


def as_json(results: Sequence[Result], caveat: str, about: dict[str, Any]) -> dict[str, Any]:
    """The object of ``--json``."""
    return {
        "schema": SCHEMA,
        "exit_status": exit_status(results),
        #: Not empty if the figures mean nothing.
        "caveat": caveat,
        **about,
        "steps": {
            one.step.name: {
                "kind": one.step.kind,
                "state": one.state,
                "reason": one.reason,
                "elapsed_s": round(one.elapsed_s, 3),
                "found": one.found,
                "bars": list(one.bars),
            }
            for one in results
        },
    }


def _cell(value: Any) -> str:
    if isinstance(value, float):
        for limit, digits in ((0.1, 4), (1.0, 3), (10.0, 2), (100.0, 1)):
            if abs(value) < limit:
                return f"{value:.{digits}f}"
        return f"{value:.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cell(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "–" if value is None else str(value)


def _table(table: dict[str, Any]) -> str:
    rows = [table["headings"], *([_cell(one) for one in row] for row in table["rows"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [table["title"]]
    for row in rows:
        first, *rest = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        rest = [cell.strip().rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        is_prose = len(widths) == 2
        lines.append("  " + "  ".join([first, row[1]] if is_prose else [first, *rest]).rstrip())
    return "\n".join(text for text in lines if text.strip())
