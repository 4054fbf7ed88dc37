# SPDX-License-Identifier: Apache-2.0
"""The table, the JSON and the picture of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from statistics import median
from typing import Any

from chaos_run.backends import STOCK
from chaos_run.compare import header, markdown, row
from chaos_run.rates import kept
from chaos_run.results import Result
from chaos_run.schedule import KINDS, SHARED

__all__ = ["as_json", "svg", "text"]

_COLOURS = {
    "equal": "#4a9",
    "left": "#bbb",
    "failed": "#e80",
    "wrong": "#d00",
    "late": "#a0f",
}
_WIDTH, _LEFT, _LANE, _TOP = 1300, 170, 26, 120
#: Names of faults rise to the right, so that those of short ones stay apart.
_SLOPE = -50
#: Of what must not be: a dead fleet fails thousands of requests.
_SENTENCES_MAX = 20


def text(result: Result) -> str:
    """For people: faults, how requests ended, and what must not be."""
    ends = result.ends()
    lines = [f"seed {result.seed}, {result.ended_s - result.began_s:.0f} s", *_about(result)]
    lines += ["", "faults"]
    for one in result.happened:
        at_s, lasted_s = one.began_s - result.began_s, one.ended_s - one.began_s
        what = f"{one.fault.kind:13} {one.fault.victim:10}"
        served = (
            "has not served again" if one.lost else f"served again {one.recovered_s:.2f} s later"
        )
        ended = f"; ended by itself: {', '.join(one.crashed)}" if one.crashed else ""
        lines.append(f"  {at_s:6.1f} s  {what} {lasted_s:5.1f} s, {served}{ended}")
    lines += ["", "requests"]
    for end in _COLOURS:
        took = [o.ended_s - o.began_s for o in result.outcomes if o.end == end]
        times = f", median {median(took):.2f} s, longest {max(took):.2f} s" if took else ""
        lines.append(f"  {ends[end]:6} {_MEANINGS[end]}{times}")
    lines += ["", "what the failed ones were told"]
    lines += [f"  {count:6} {cause}" for cause, count in result.causes().most_common()]
    lines += _again(result)
    lines += _kept(result)
    lines += _thirds(result)
    if result.backend is not None:
        lines += ["", *header(), markdown(row(result))]
    bad = result.faults_found()
    lines += ["", *(bad[:_SENTENCES_MAX] or ["nothing that must not be"])]
    if len(bad) > _SENTENCES_MAX:
        lines.append(f"and {len(bad) - _SENTENCES_MAX} more")
    return "\n".join(lines)


def _about(result: Result) -> list[str]:
    """Of a comparison: who it is, and what he was spared."""
    if result.backend is None:
        return []
    lines = [f"backend {result.backend}: {result.versions}"]
    if (stock := STOCK.get(result.backend)) is not None:
        settings = " ".join(f"{name}={value}" for name, value in stock.settings.items())
        lines += [f"settings: {settings}", *filter(None, [stock.remark])]
    left_out = ", ".join(kind for kind in KINDS if kind not in SHARED)
    lines.append(f"left out, as they do not mean the same for every backend: {left_out}")
    return lines


def _kept(result: Result) -> list[str]:
    """What faults cost the pair that they did not concern."""
    found = result.spared()
    share = kept(found)
    if share is None:
        return []
    whole = (
        f"{share:.2f} of its undisturbed rate, over {sum(one.answered for one in found)} answers"
    )
    lines = ["", f"the pair without the victim kept {whole}"]
    return lines + [
        f"  {one.kind:13} {one.answered:4} answers, {one.expected:6.1f} undisturbed"
        for one in found
    ]


def _again(result: Result) -> list[str]:
    """How soon after faults of some kinds requests were answered."""
    found = result.again()
    lines = ["", "asked after the fault and answered"] if found else []
    for one in found:
        ways = ", ".join(f"{name} after {took_s:.2f} s" for name, took_s in one.took_s.items())
        lines.append(f"  {one.fault.kind:13} {one.fault.victim:10} {ways}")
    return lines


def _thirds(result: Result) -> list[str]:
    """Of a run without faults."""
    lines = [""] if result.thirds else []
    for name, one in zip(("first", "second", "last"), result.thirds or (), strict=False):
        memory = ", ".join(f"{of} {n / 2**20:.0f} MiB" for of, n in one.nbytes.items())
        lines.append(
            f"{name + ' third:':13} {one.answers} answers, p50 {one.p50_s:.3f} s, "
            f"p99 {one.p99_s:.3f} s; {memory}"
        )
    return lines


_MEANINGS = {
    "equal": "answered, tokens equal",
    "left": "left by their clients",
    "failed": "failed with a cause",
    "wrong": "answered, wrong tokens",
    "late": "not ended by their deadline",
}


def as_json(result: Result) -> dict[str, Any]:
    """Everything; times in seconds since the traffic began."""
    began_s = result.began_s
    return {
        "seed": result.seed,
        "backend": result.backend,
        "versions": result.versions,
        "seconds": result.ended_s - began_s,
        "ends": dict(result.ends()),
        "causes": dict(result.causes()),
        "other_pair_kept": kept(result.spared()),
        "other_pair": [asdict(one) for one in result.spared()],
        "again": [asdict(one) for one in result.again()],
        "leaked_pages": result.leaked_pages,
        "held_more": result.held,
        "thirds": [asdict(one) for one in result.thirds or ()],
        "bad": result.faults_found(),
        "faults": [
            {
                **asdict(one.fault),
                "began_s": one.began_s - began_s,
                "ended_s": one.ended_s - began_s,
                "recovered_s": one.recovered_s,
                "let_in": one.let_in,
                "lost": one.lost,
                "crashed": one.crashed,
            }
            for one in result.happened
        ],
        "requests": [
            [one.way, one.began_s - began_s, one.ended_s - began_s, one.end, one.error]
            for one in result.outcomes
        ],
    }


def svg(result: Result) -> str:
    """A lane for each way, a bar for each request, a band for each fault."""
    height = _TOP + _LANE * len(result.ways) + 60
    parts = (_bands(result, height), _lanes(result), _times(result, height), _legend(height))
    body = "\n".join(line for lines in parts for line in lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n{body}\n</svg>\n'
    )


def _at(result: Result, time_s: float) -> float:
    whole_s = max(result.ended_s - result.began_s, 1e-9)
    share = (time_s - result.began_s) / whole_s
    return _LEFT + min(max(share, 0.0), 1.0) * (_WIDTH - _LEFT - 110)


def _bands(result: Result, height: int) -> Iterator[str]:
    for one in result.happened:
        left, right = _at(result, one.began_s), _at(result, one.ended_s)
        served = _at(result, one.ended_s + one.recovered_s)
        for begin, end, colour in ((left, right, "#f6c9c0"), (right, served, "#fdebc8")):
            yield (
                f'<rect x="{begin:.1f}" y="{_TOP - 4}" width="{max(end - begin, 0.5):.1f}" '
                f'height="{height - _TOP - 50}" fill="{colour}"/>'
            )
        label = f"{one.fault.kind} {one.fault.victim}"
        x, y = f"{(left + right) / 2:.1f}", _TOP - 8
        yield f'<text x="{x}" y="{y}" transform="rotate({_SLOPE} {x} {y})">{escape(label)}</text>'


def _lanes(result: Result) -> Iterator[str]:
    for nth, way in enumerate(result.ways):
        y = _TOP + nth * _LANE
        yield f'<text x="4" y="{y + 14}">{escape(way.name)}</text>'
        for one in result.outcomes:
            if one.way != way.name:
                continue
            left, right = _at(result, one.began_s), _at(result, one.ended_s)
            big = one.end not in ("equal", "left")
            top, tall = (y, 20) if big else (y + 6, 8)
            yield (
                f'<rect x="{left:.1f}" y="{top}" width="{max(right - left, 0.8):.1f}" '
                f'height="{tall}" fill="{_COLOURS[one.end]}" fill-opacity="0.6">'
                f"<title>{escape(one.end)} {escape(one.error[:200])}</title></rect>"
            )


def _times(result: Result, height: int) -> Iterator[str]:
    top = height - 54
    for minute in range(int((result.ended_s - result.began_s) / 60) + 1):
        x = f"{_at(result, result.began_s + 60 * minute):.1f}"
        yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + 5}" stroke="#888"/>'
        yield f'<text x="{x}" y="{top + 16}" text-anchor="middle">{minute} min</text>'


def _legend(height: int) -> Iterator[str]:
    for nth, (end, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + nth * 190
        yield f'<rect x="{x}" y="{height - 30}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="{height - 20}">{_MEANINGS[end]}</text>'
