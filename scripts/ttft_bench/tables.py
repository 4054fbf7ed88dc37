# SPDX-License-Identifier: Apache-2.0
"""A run as tables for a terminal and as one JSON object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ttft_bench.results import KINDS, Bar, Kind, Point, forward_ratio

__all__ = ["NAMES", "as_json", "text"]

NAMES: dict[Kind, str] = {"one": "one server", "pd": "PD", "layers": "PD by layers"}
MB = 1e6
NONE = "–"

Row = tuple[str, ...]


def text(points: Sequence[Point], kinds: Sequence[Kind]) -> str:
    """Times to first token, where they come from, and what they cost."""
    return "\n\n".join([_times(points, kinds), _parts(points, kinds), _processors(points, kinds)])


def as_json(
    points: Sequence[Point], kinds: Sequence[Kind], bars: Sequence[Bar], about: dict[str, Any]
) -> dict[str, Any]:
    """Everything, every request included; `about` is what the caller knows of the run."""
    return {
        **about,
        "points": [asdict(point) | {"derived": _derived(point, kinds)} for point in points],
        "forward_ratio": forward_ratio(points),
        "bars": [asdict(bar) for bar in bars],
    }


def _times(points: Sequence[Point], kinds: Sequence[Kind]) -> str:
    rows = [("prompt", "rate", *(f"{NAMES[kind]} (min–max)" for kind in kinds))]
    for point in points:
        cells = [str(point.prompt_tokens), point.rate]
        for kind in kinds:
            low, high = point.spread_s(kind)
            cells.append(f"{_ms(point.ttft_s(kind))} ({_ms(low)}–{_ms(high)})")
        rows.append(tuple(cells))
    return "TTFT, ms\n" + _table(rows)


def _parts(points: Sequence[Point], kinds: Sequence[Kind]) -> str:
    rows: list[Row] = [
        (
            "prompt", "rate", "Mbit/s", "compute", "forward", "MB", "transfer", "measured",
            "early", "after send", "bound", "sum", "hidden", "gain", "hooks", "forward ×",
        )
    ]  # fmt: skip
    rows += [_part(point, kinds) for point in points]
    return "Where it goes, ms\n" + _table(rows)


def _part(point: Point, kinds: Sequence[Kind]) -> Row:
    has_one, has_pd, has_layers = (kind in kinds for kind in KINDS)
    ratio = forward_ratio([point])
    carried = point.carried
    both = has_one and has_pd
    all_of_them = both and has_layers
    early = carried["layers"].early_nbytes / carried["layers"].nbytes if has_layers else 0.0
    return (
        str(point.prompt_tokens),
        point.rate,
        f"{point.bytes_per_s * 8 / 1e6:.0f}",
        _ms(point.compute_s) if has_one else NONE,
        _ms(point.forward_s("pd" if has_pd else kinds[0])),
        f"{carried['pd'].nbytes / MB:.1f}" if has_pd else NONE,
        _ms(point.transfer_s) if has_pd else NONE,
        _ms(carried["pd"].handover_s) if has_pd else NONE,
        f"{early:.0%}" if has_layers else NONE,
        _ms(carried["layers"].handover_s) if has_layers else NONE,
        _ms(point.bound_s) if both else NONE,
        _ms(point.sum_s) if both else NONE,
        f"{point.hidden:.0%}" if all_of_them else NONE,
        f"{point.gain:.0%}" if has_pd and has_layers else NONE,
        f"{carried['layers'].hooks_s * 1000:.2f}" if has_layers else NONE,
        NONE if ratio is None else f"{ratio:.3f}",
    )


def _processors(points: Sequence[Point], kinds: Sequence[Kind]) -> str:
    titles = (
        NAMES[kind] if kind == "one" else f"{NAMES[kind]}: prefill + decode" for kind in kinds
    )
    rows = [("prompt", "rate", *titles)]
    for point in points:
        cells = [str(point.prompt_tokens), point.rate]
        for kind in kinds:
            own, decode = point.cpu_s(kind)
            cells.append(f"{own:.2f}" if kind == "one" else f"{own:.2f} + {decode:.2f}")
        rows.append(tuple(cells))
    return "Processor time of a request, its whole answer included, s\n" + _table(rows)


def _derived(point: Point, kinds: Sequence[Kind]) -> dict[str, float]:
    found = {f"ttft_{kind}_s": point.ttft_s(kind) for kind in kinds}
    found |= {f"forward_{kind}_s": point.forward_s(kind) for kind in kinds}
    names = {
        ("one", "pd"): ("compute_s", "transfer_s", "bound_s", "sum_s"),
        ("pd", "layers"): ("gain",),
        ("one", "pd", "layers"): ("hidden", "last_group_s"),
    }
    for needed, attributes in names.items():
        if set(needed) <= set(kinds):
            found |= {name: getattr(point, name) for name in attributes}
    return found


def _table(rows: Sequence[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
