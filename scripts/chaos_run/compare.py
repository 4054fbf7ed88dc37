# SPDX-License-Identifier: Apache-2.0
"""What a run says of a backend beside others: a row of a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from chaos_run.results import Result
from chaos_run.schedule import SHARED, Kind
from chaos_run.traffic import Outcome

__all__ = ["HUNG_S", "Row", "header", "is_cause", "markdown", "row"]

#: A request that takes longer has hung for its client, whatever becomes of it.
HUNG_S: Final = 10.0
#: How a client is told that something failed, without a word on what.
_NO_CAUSE: Final = ("", "aborted", "Aborted", "Internal Server Error")


@dataclass(frozen=True)
class Row:
    """One backend under one schedule.

    served_again_s: by kind, of each fault that hit a server, seconds from its end until requests
        over both ways with the victim were answered; infinite where that took a new start of all
        servers.
    crashed: how often a server ended by itself. leaked_pages, stuck: at the end, and servers that
        still had requests then.
    """

    backend: str
    faults: int
    requests: int
    answered: int
    wrong: int
    hung: int
    with_cause: int
    without_cause: int
    served_again_s: dict[Kind, list[float]]
    crashed: int
    leaked_pages: int
    stuck: int


def row(result: Result) -> Row:
    ends = result.ends()
    failed = [one for one in result.outcomes if one.end == "failed"]
    with_cause = sum(is_cause(one.error) for one in failed)
    served: dict[Kind, list[float]] = {}
    for one in result.happened:
        again_s = math.inf if one.lost else one.recovered_s
        served.setdefault(one.fault.kind, []).append(again_s)
    return Row(
        backend=result.backend or "ours",
        faults=len(result.happened),
        requests=len(result.outcomes) - ends["left"],
        answered=ends["equal"],
        wrong=ends["wrong"],
        hung=sum(_hung(one) for one in result.outcomes),
        with_cause=with_cause,
        without_cause=len(failed) - with_cause + ends["late"],
        served_again_s=served,
        crashed=sum(len(one.crashed) for one in result.happened),
        leaked_pages=sum(result.leaked_pages.values()),
        stuck=sum(map(len, result.held.values())),
    )


def is_cause(error: str) -> bool:
    """Whether a client learns from that what went wrong."""
    words = error.partition(": ")[2] if error.startswith("HTTP ") else error
    return words.strip(" .'\"") not in _NO_CAUSE


def header() -> list[str]:
    """Of a table in Markdown."""
    names = [
        "backend",
        "requests",
        "wrong tokens",
        f"took > {HUNG_S:.0f} s",
        "failed with a cause",
        "failed without",
        *(f"`{kind}`" for kind in SHARED),
        "servers that crashed",
        "pages leaked",
    ]
    return [_line(names), _line(["---"] * len(names))]


def markdown(one: Row) -> str:
    """The row; of each kind the median and the worst of its seconds."""
    cells = [
        one.backend,
        one.requests,
        one.wrong,
        one.hung,
        one.with_cause,
        one.without_cause,
        *(_seconds(one.served_again_s.get(kind, [])) for kind in SHARED),
        one.crashed,
        f"{one.leaked_pages}{f', {one.stuck} not idle' if one.stuck else ''}",
    ]
    return _line(cells)


def _hung(one: Outcome) -> bool:
    return one.end != "left" and one.ended_s - one.began_s > HUNG_S


def _seconds(found: Sequence[float]) -> str:
    if not found:
        return "–"
    never = sum(math.isinf(one) for one in found)
    finite = [one for one in found if not math.isinf(one)]
    words = f"{median(finite):.1f}" if finite else ""
    if len(finite) > 1:
        words += f" ({max(finite):.1f})"
    return ", ".join(filter(None, [words, f"never × {never}" if never else ""]))


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
