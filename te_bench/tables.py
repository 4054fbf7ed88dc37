# SPDX-License-Identifier: Apache-2.0
"""Cases as tables for a terminal and for docs/benchmarks.md. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from te_bench.bars import BARS, CUDA_BARS, judge
from te_bench.report import CaseResult, Figures

__all__ = ["markdown", "text", "title", "versions"]

HEADINGS = ("", "GB/s", "best", "p50 µs", "p99 µs", "CPU-s/GB", "te / it", "every byte right")
ALIGNMENTS = ("---", *("--:" for _ in HEADINGS[1:]))


def text(case: CaseResult) -> str:
    """A table with one row for every variant, and the bars it bears on."""
    rows = [_headings(case), *_rows(case)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [title(case)]
    for row in rows:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    lines += [f"  {line}" for line in _remarks(case)]
    return "\n".join(lines) + "\n"


def markdown(case: CaseResult) -> str:
    """The case's table for a document."""
    lines = [f"### {title(case)}", "", _pipes(_headings(case)), _pipes(ALIGNMENTS)]
    lines += [_pipes(row) for row in _rows(case)]
    lines += ["", *(f"- {line}" for line in _remarks(case))]
    return "\n".join(lines).rstrip() + "\n"


def title(case: CaseResult) -> str:
    """The case in one line."""
    how = f"{case.blocks} × {case.nbytes:,} B" + (", one at a time" if case.sync else "")
    threads = f" from {case.threads} threads" if case.threads > 1 else ""
    busy = ", beside busy interpreters" if case.busy else ""
    return (
        f"{case.shape}, {case.transport}, memory {case.memory}{busy}:"
        f" {how}{threads}; {case.rounds} rounds"
    )


def versions(cases: Sequence[CaseResult]) -> str:
    """The version of every contender that ran."""
    found = {
        run.family: run.version for case in cases for run in case.runs if run.version and run.family
    }
    return ", ".join(f"{family}: {version}" for family, version in found.items())


def _headings(case: CaseResult) -> list[str]:
    what = "p50" if case.sync else "GB/s"
    return [f"{name} ({what})" if name == "te / it" else name for name in HEADINGS]


def _rows(case: CaseResult) -> list[list[str]]:
    mine = case.results().get("te")
    best = {result.name for result in case.results().values()}
    rows = []
    for run in case.runs:
        result = case.variants()[run.name]
        if result.state == "ok":
            rows.append(_row(case, result, mine, best=result.name in best))
        else:
            rows.append([result.name, result.state, *[""] * 6])
    return rows


def _row(case: CaseResult, result: Figures, mine: Figures | None, *, best: bool) -> list[str]:
    my_value = getattr(mine, case.metric) if mine is not None else None
    value = getattr(result, case.metric)
    ratio = f"{my_value / value:.2f}" if my_value and value and result is not mine else ""
    return [
        # Marked: the variant that stands for its family in the ratios.
        f"{result.name} *" if best and result.name not in ("te", "nixl") else result.name,
        _number(result.gb_per_s),
        _number(result.best_gb_per_s),
        _number(result.p50_us),
        _number(result.p99_us),
        _number(result.cpu_s_per_gb),
        "" if result.name == "te" else ratio,
        {True: "yes", False: "NO", None: ""}[result.verified],
    ]


def _remarks(case: CaseResult) -> list[str]:
    lines = [
        f"{result.name}: {result.reason}"
        for result in case.variants().values()
        if result.reason is not None
    ]
    lines += [
        f"{result.name}: a call returned after {result.submit_us:.0f} µs (median)"
        for result in case.results().values()
        if result.submit_us is not None and not case.sync
    ]
    lines += [
        f"{result.name}: a thread that waits for it goes on {result.late_us:.0f} µs later (median)"
        for result in case.results().values()
        if result.late_us is not None
    ]
    return lines + [judge(bar, case) for bar in (*BARS, *CUDA_BARS) if bar.concerns(case)]


def _number(value: float | None) -> str:
    """Three digits that matter: 0.0086, 1.38, 224, 4002."""
    if value is None:
        return "–"
    for limit, digits in ((0.1, 4), (1.0, 3), (10.0, 2), (100.0, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
