# SPDX-License-Identifier: Apache-2.0
"""Timelines as one SVG file, one below the other: a lane for each rank, the writes of prefill
ranks below their stages. Pure. Nothing outside the file is used.

Colours are those of Okabe and Ito, which people with any kind of colour blindness tell apart; wide
stages carry their name as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from xml.sax import saxutils

from sglang_mooncake.explain.text import size_text, time_text
from sglang_mooncake.explain.timeline import ARRIVAL, Lane, Timeline, longest
from te.printable import printable

__all__ = ["as_svg"]

WIDTH: Final = 1100
LEFT, RIGHT, TOP = 20, 20, 44
#: Of a request: its title above the first lane, and its axis with the room below it.
TITLE, AXIS = 30, 56
BAR, WRITE, GAP, LABEL = 26, 8, 20, 20
WRITE_ROWS: Final = 4
CHAR: Final = 7.2

COLOURS: Final = {
    ARRIVAL: "#bbbbbb",
    "bootstrap": "#56b4e9",
    "queued": "#f0e442",
    "planned": "#cc79a7",
    "posted": "#e69f00",
    "landed": "#0072b2",
    "acknowledged": "#009e73",
}
_ON_DARK: Final = {"landed", "acknowledged"}
_WRITE_COLOUR, _FAILED_COLOUR = "#555555", "#d55e00"


def as_svg(lines: Sequence[Timeline]) -> str:
    """The file's text; the requests in the order in which they are given."""
    body: list[str] = []
    y = TOP
    for line in lines:
        parts, height = _request(line, y)
        body += parts
        y += height
    title = "; ".join(map(_title, lines))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"'
        f' width="{WIDTH}" height="{y}" role="img" aria-label={saxutils.quoteattr(title)}'
        ' font-family="system-ui, sans-serif" font-size="13" fill="#1a1a1a">'
    )
    background = f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>'
    return "\n".join([head, background, *_legend(), *body, "</svg>", ""])


def _escaped(text: str) -> str:
    """No file in XML may hold control characters, in whatever form."""
    return saxutils.escape(printable(text))


def _request(line: Timeline, top: int) -> tuple[list[str], int]:
    title = _escaped(_title(line))
    parts = [f'<text x="{LEFT}" y="{top + 16}" font-size="17" font-weight="600">{title}</text>']
    y = top + TITLE
    for lane in line.lanes:
        of_lane, height = _lane(line, lane, y)
        parts += of_lane
        y += height + GAP
    parts += _axis(line, y)
    return parts, y + AXIS - top


def _title(line: Timeline) -> str:
    return f"Room {line.room}: {time_text(line.duration_s)} on {len(line.lanes)} ranks"


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for name, colour in [*COLOURS.items(), ("write", _WRITE_COLOUR)]:
        yield f'<rect x="{x:.1f}" y="14" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17:.1f}" y="25">{name}</text>'
        x += 17 + CHAR * len(name) + 22


def _x(line: Timeline, at_s: float) -> float:
    share = at_s / line.duration_s if line.duration_s > 0 else 0.0
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _lane(line: Timeline, lane: Lane, y: int) -> tuple[list[str], int]:
    story = lane.story
    stage, spent_s = longest(lane)
    label = (
        f"{lane.rank}: {story.end} after {time_text(story.duration_s)},"
        f" {size_text(story.nbytes)}; longest: {stage}, {time_text(spent_s)}"
    )
    parts = [f'<text x="{LEFT}" y="{y + 13}">{_escaped(label)}</text>']
    top = y + LABEL
    for name, began_s, length_s in lane.spans:
        parts += _stage(line, name, began_s, length_s, top)
    rows = min(len(story.writes), WRITE_ROWS)
    for i, write in enumerate(story.writes):
        x, end = (_x(line, at_s + lane.offset_s) for at_s in (write.began_s, write.ended_s))
        colour = _FAILED_COLOUR if write.failed else _WRITE_COLOUR
        tip = f"{size_text(write.nbytes)} to {write.peer} over {write.transport}"
        parts.append(
            f'<rect x="{x:.1f}" y="{top + BAR + 3 + i % WRITE_ROWS * WRITE}"'
            f' width="{max(end - x, 1.5):.1f}" height="{WRITE - 2}" fill="{colour}">'
            f"<title>{_escaped(tip)}</title></rect>"
        )
    return parts, LABEL + BAR + (3 + rows * WRITE if rows else 0)


def _stage(line: Timeline, name: str, began_s: float, length_s: float, y: int) -> Iterator[str]:
    x, width = _x(line, began_s), _x(line, began_s + length_s) - _x(line, began_s)
    tip = f"{name}: {time_text(length_s)}, from {time_text(began_s)} on"
    yield (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.8):.1f}" height="{BAR}"'
        f' fill="{COLOURS[name]}"><title>{_escaped(tip)}</title></rect>'
    )
    text = f"{name} {time_text(length_s)}"
    if width > CHAR * len(text) + 8:
        ink = "#ffffff" if name in _ON_DARK else "#1a1a1a"
        yield f'<text x="{x + 5:.1f}" y="{y + 17}" fill="{ink}">{_escaped(text)}</text>'


def _axis(line: Timeline, y: int) -> Iterator[str]:
    yield f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#888888"/>'
    for i in range(5):
        at_s = line.duration_s * i / 4
        x = _x(line, at_s)
        anchor = ("start", "middle", "middle", "middle", "end")[i]
        yield f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#888888"/>'
        yield f'<text x="{x:.1f}" y="{y + 20}" text-anchor="{anchor}">{time_text(at_s)}</text>'
