# SPDX-License-Identifier: Apache-2.0
"""Times to first token as an SVG: a panel per length of prompt, a column per rate. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from ttft_bench.results import Kind, Point
from ttft_bench.tables import NAMES

__all__ = ["svg"]

PANEL_WIDTH, PANEL_HEIGHT = 520, 260
LEFT, TOP, RIGHT, BOTTOM = 64, 44, 16, 40
COLOURS: dict[Kind, str] = {"one": "#888888", "pd": "#c0392b", "layers": "#1f77b4"}
BOUND_COLOUR = "#2c8c3c"
TICKS = 5
WHISKER, DOT = 4, 4


def svg(points: Sequence[Point], kinds: Sequence[Kind]) -> str:
    """Medians, joined; bars from the fastest to the slowest; dashes where the bound is."""
    prompts = list(dict.fromkeys(point.prompt_tokens for point in points))
    width, height = PANEL_WIDTH, PANEL_HEIGHT * len(prompts)
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}'
    head += ' font-family="sans-serif" font-size="11">'
    parts = [head, f'<rect {size} fill="white"/>']
    for index, prompt in enumerate(prompts):
        chosen = [point for point in points if point.prompt_tokens == prompt]
        parts.append(f'<g transform="translate(0 {index * PANEL_HEIGHT})">')
        parts += _panel(chosen, kinds)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(points: Sequence[Point], kinds: Sequence[Kind]) -> Iterator[str]:
    highest_s = max(point.spread_s(kind)[1] for point in points for kind in kinds)
    step_s = _round_up(highest_s / TICKS)
    top_s = step_s * math.ceil(highest_s / step_s)
    inner_width, inner_height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def x_of(column: int) -> float:
        return LEFT + inner_width * (column + 0.5) / len(points)

    def y_of(seconds: float) -> float:
        return TOP + inner_height * (1 - seconds / top_s)

    yield _text(LEFT, 16, f"TTFT, prompts of {points[0].prompt_tokens:,} tokens (ms)", "start")
    yield from _legend(kinds)
    for tick in range(round(top_s / step_s) + 1):
        y = y_of(tick * step_s)
        yield _line(LEFT, y, PANEL_WIDTH - RIGHT, y, "#dddddd")
        yield _text(LEFT - 6, y + 4, f"{tick * step_s * 1000:.0f}", "end")
    for column, point in enumerate(points):
        yield _text(x_of(column), PANEL_HEIGHT - BOTTOM + 18, point.rate, "middle")
        if {"one", "pd"} <= set(kinds):
            x, y, half = x_of(column), y_of(point.bound_s), inner_width / len(points) / 3
            yield _line(x - half, y, x + half, y, BOUND_COLOUR, 'stroke-dasharray="4 3"')
    for kind in kinds:
        yield from _series(points, kind, x_of, y_of)


def _series(
    points: Sequence[Point],
    kind: Kind,
    x_of: Callable[[int], float],
    y_of: Callable[[float], float],
) -> Iterator[str]:
    colour = COLOURS[kind]
    places = [(x_of(i), y_of(point.ttft_s(kind))) for i, point in enumerate(points)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.5"/>'
    for (x, y), point in zip(places, points, strict=True):
        low, high = (y_of(seconds) for seconds in point.spread_s(kind))
        yield _line(x, low, x, high, colour)
        for end in (low, high):
            yield _line(x - WHISKER, end, x + WHISKER, end, colour)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{DOT}" fill="{colour}"/>'


def _legend(kinds: Sequence[Kind]) -> Iterator[str]:
    entries = [(NAMES[kind], COLOURS[kind]) for kind in kinds]
    if {"one", "pd"} <= set(kinds):
        entries.append(("max(compute, transfer)", BOUND_COLOUR))
    x = float(LEFT)
    for name, colour in entries:
        yield _line(x, 30, x + 14, 30, colour, 'stroke-width="3"')
        yield _text(x + 18, 34, name, "start")
        x += 34 + 6.2 * len(name)


def _round_up(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
