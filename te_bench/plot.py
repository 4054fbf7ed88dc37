# SPDX-License-Identifier: Apache-2.0
"""Cases as a picture, if matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from te_bench.report import CaseResult

__all__ = ["available", "draw"]


def available() -> bool:
    """Whether ``draw`` can work here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(cases: Sequence[CaseResult], path: Path) -> None:
    """One panel for every case: GB/s, or µs where blocks go one at a time; best round as a mark."""
    # By name: it is no dependency of this package, not even of its type check.
    module: Any = importlib.import_module("matplotlib.figure")
    figure = module.Figure(figsize=(3.4 * len(cases) + 1, 3.8), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for panel, case in zip(panels, cases, strict=True):
        results = {
            family: result for family, result in case.results().items() if result.state == "ok"
        }
        heights = [getattr(result, case.metric) for result in results.values()]
        bars = panel.bar(list(results), heights, color="#4c78a8")
        panel.bar_label(bars, fmt="%.3g")
        if not case.sync:
            marks = [result.best_gb_per_s for result in results.values()]
            panel.plot(list(results), marks, "k_", markersize=14)
        busy = ", busy" if case.busy else ""
        panel.set_title(f"{case.shape}, {case.transport}, {case.memory}{busy}", fontsize=9)
        panel.set_ylabel("p50 µs" if case.sync else "GB/s")
        panel.set_yscale("log" if heights and max(heights) > 20 * min(heights) else "linear")
    figure.savefig(path, dpi=120)
