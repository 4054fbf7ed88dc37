# SPDX-License-Identifier: Apache-2.0
"""The rows as lines of text that fit a width and a height. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from te.printable import printable
from te.stats import EngineStatus, LinkStats
from te.top.rates import EngineRow, LinkRow, RailRow, Rate, busiest_links

__all__ = ["Kind", "Line", "crop", "lines", "size"]

COLUMNS: Final = (
    "state", "out/s", "in/s", "sent", "received", "in flight", "done", "failed",
)  # fmt: skip
#: What is left out, in this order, where the terminal is narrow. Rates stay.
LEFT_OUT: Final = (("sent", "received"), ("done",), ("in flight",), ("failed",), ("state",))
#: The first column is at least so wide before another one is left out.
NAME_LEAST: Final = 34
GAP: Final = "  "
NOTHING: Final = "–"
#: Of one link, where lines are left out.
LINK_LINES_MAX: Final = 10


class Kind(enum.Enum):
    """What a line tells of; screens colour by it."""

    HEAD = "head"
    ENGINE = "engine"
    LINK = "link"
    RAIL = "rail"
    #: A rail that does not work, or what has failed.
    BAD = "bad"
    NOTE = "note"


@dataclass(frozen=True)
class Line:
    """One line; ``cells`` by column, and none for a note, which takes the whole width."""

    kind: Kind
    text: str
    cells: dict[str, str] | None = None


def size(nbytes: float) -> str:
    """Bytes with three digits, and a unit of powers of ten, as rates of networks have."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            digits = 0 if unit == "B" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
            return f"{nbytes:.{digits}f} {unit}"
        nbytes /= 1000
    raise AssertionError


def lines(
    rows: Sequence[EngineRow],
    problems: Sequence[str],
    width: int | None,
    most: int | None = None,
) -> list[tuple[Kind, str]]:
    """The table, each line no longer than ``width``; None is as long as need be.

    Args:
        most: how many lines there may be, at least 10: the busiest engines and the busiest links
            are shown, and it is said how many are not. None: all are shown.
    """
    found = [Line(Kind.HEAD, "", {name: name for name in COLUMNS})]
    bad = [Line(Kind.BAD, one) for one in problems]
    if most is None:
        for engine in rows:
            found += [*_engine(engine), *(line for link in engine.links for line in _link(link))]
        return _set(found + bad, width)
    bad = _first(bad, most // 4, "problems")
    return _set(found + _busiest(rows, most - len(found) - len(bad)) + bad, width)


def crop(text: list[tuple[Kind, str]], height: int) -> list[tuple[Kind, str]]:
    """As many of the lines as there is room for; the last one says how many are left out."""
    if len(text) <= height:
        return text
    kept = text[: max(height - 1, 0)]
    return [*kept, (Kind.NOTE, f"… {len(text) - len(kept)} more lines")]


# -- what is shown where there is no room for all


def _busiest(rows: Sequence[EngineRow], most: int) -> list[Line]:
    """Every engine first, the busiest above; the lines that are left go to the busiest links."""
    heads = [_engine(one) for one in rows]
    room, count = most, 0
    for row, head in zip(rows, heads, strict=True):
        needed = len(head) + bool(row.links)  # A line says how many links are not shown.
        if room < needed + (count + 1 < len(rows)):  # And one how many engines are not.
            break
        room, count = room - needed, count + 1
    blocks: dict[int, list[Line]] = {}
    room -= count < len(rows)
    for link in busiest_links(rows[:count]):
        block = _first(_link(link), LINK_LINES_MAX, "lines of this link")
        if len(block) <= room:
            blocks[id(link)], room = block, room - len(block)
    found: list[Line] = []
    for row, head in zip(rows[:count], heads, strict=False):
        shown = [blocks[id(one)] for one in row.links if id(one) in blocks]
        found += [*head, *(line for block in shown for line in block)]
        if len(shown) < len(row.links):
            found.append(Line(Kind.NOTE, f"  … {_more(row.links, len(shown))} links"))
    if count < len(rows):
        found.append(Line(Kind.NOTE, f"… {_more(rows, count)} engines"))
    return found


def _more(of: Sequence[object], shown: int) -> str:
    """How many there are besides."""
    return f"{len(of) - shown} more" if shown else str(len(of))


def _first(found: list[Line], most: int, what: str) -> list[Line]:
    """At most so many; the last one says how many are not shown."""
    if len(found) <= most:
        return found
    kept = found[: most - 1]
    return [*kept, Line(Kind.NOTE, f"    … {len(found) - len(kept)} more {what}")]


# -- what each line tells


def _engine(row: EngineRow) -> list[Line]:
    """Without its links."""
    status = row.status
    stats = status.stats
    name = f"pid {status.pid}  {status.label or _program(status)}  engine {status.id[:8]}"
    cells = _rates(row.rate) | {
        "sent": size(stats.bytes_sent),
        "received": size(stats.bytes_received),
        "in flight": str(sum(one.stats.transfers_unfinished for one in row.links)),
        "done": str(stats.transfers_done),
        "failed": str(stats.transfers_failed),
    }
    return [Line(Kind.ENGINE, name, cells), Line(Kind.NOTE, f"  {_facts(status)}")]


def _program(status: EngineStatus) -> str:
    """The process in a few words: the name that it gave itself, or its script or module."""
    words = status.process.split()
    if not words:
        return "?"
    name = words[0].rpartition("/")[2]
    known = [i for i, word in enumerate(words) if i and (word in ("-m", "-c") or word[0] != "-")]
    if not name.startswith("python") or not known:
        return name
    first = known[0]
    match words[first]:
        case "-c":
            return f"{name} -c"
        case "-m":
            return " ".join([name, *words[first : first + 2]])
    return words[first].rpartition("/")[2]


def _facts(status: EngineStatus) -> str:
    stats = status.stats
    memory = ", ".join(f"{size(n)} of {kind}" for kind, n in stats.registered_bytes.items())
    facts = [
        f"{status.host}:{status.port}",
        f"offers {', '.join(stats.transports)}",
        f"memory: {memory or 'none registered'}",
    ]
    if stats.fences.confirmed or stats.fences.timed_out:
        facts.append(f"{stats.fences.confirmed} fences, {stats.fences.timed_out} late")
    lost = sum(one.rails_lost for one in stats.by_transport.values())
    remade = sum(one.rails_remade for one in stats.by_transport.values())
    if lost:
        facts.append(f"{lost} rails lost, {remade} made anew")
    return "; ".join(facts)


def _link(row: LinkRow) -> list[Line]:
    link = row.stats
    arrow = "←" if link.is_incoming else "→"
    encrypted = f", encrypted by {link.encrypted_by}" if link.encrypted_by else ""
    name = f"  {arrow} {link.peer[:8]} at {link.address}  {link.transport}{encrypted}"
    failed = link.outcomes.transfers_failed
    cells = _rates(row.rate) | {
        "sent": size(sum(one.flow.bytes_sent for one in link.rails)),
        "received": size(sum(one.flow.bytes_received for one in link.rails)),
        "in flight": str(link.transfers_unfinished),
        "done": str(link.outcomes.transfers_done),
        "failed": str(sum(failed.values())),
    }
    found = [Line(Kind.LINK, name, cells), *(_rail(one) for one in row.rails)]
    if link.transport_reason:
        found.append(Line(Kind.NOTE, f"    not by {link.transport_reason}"))
    if failed:
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(failed.items()))
        found.append(Line(Kind.BAD, f"    transfers failed: {reasons}"))
    return found + _errors(link)


def _errors(link: LinkStats) -> list[Line]:
    return [
        Line(Kind.BAD, f"    rail {i} went down: {rail.reason}")
        for i, rail in enumerate(link.rails)
        if rail.reason
    ]


def _rail(row: RailRow) -> Line:
    rail = row.stats
    cells = _rates(row.rate) | {
        "state": rail.state,
        "sent": size(rail.flow.bytes_sent),
        "received": size(rail.flow.bytes_received),
        "in flight": size(rail.bytes_in_flight) if rail.bytes_in_flight else "",
    }
    kind = Kind.RAIL if rail.state == "up" else Kind.BAD
    return Line(kind, f"    {row.number} {rail.name}".rstrip(), cells)


def _rates(rate: Rate | None) -> dict[str, str]:
    if rate is None:
        return {"out/s": NOTHING, "in/s": NOTHING}
    return {"out/s": size(rate.sent), "in/s": size(rate.received)}


# -- how they are set


def _set(found: list[Line], width: int | None) -> list[tuple[Kind, str]]:
    widths = {
        name: max(len((line.cells or {}).get(name, "")) for line in found) for name in COLUMNS
    }
    name_width = max((len(line.text) for line in found if line.cells is not None), default=0)
    shown = list(COLUMNS)
    if width is not None:
        for names in LEFT_OUT:
            if width - _span(shown, widths) >= min(name_width, NAME_LEAST):
                break
            shown = [name for name in shown if name not in names]
        name_width = max(min(name_width, width - _span(shown, widths)), 1)
    return [(line.kind, _text(line, shown, widths, name_width, width)) for line in found]


def _span(shown: Sequence[str], widths: dict[str, int]) -> int:
    return sum(widths[name] + len(GAP) for name in shown)


def _text(
    line: Line, shown: Sequence[str], widths: dict[str, int], name_width: int, width: int | None
) -> str:
    if line.cells is None:
        return _short(line.text, width)
    cells = [line.cells.get(name, "").rjust(widths[name]) for name in shown]
    whole = GAP.join([_short(line.text, name_width).ljust(name_width), *cells])
    return _short(whole.rstrip(), width)


def _short(text: str, width: int | None) -> str:
    """Control characters, which a process may have in its name, do not reach the terminal."""
    clean = printable(text)
    return clean if width is None or len(clean) <= width else f"{clean[: max(width - 1, 0)]}…"
