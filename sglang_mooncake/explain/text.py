# SPDX-License-Identifier: Apache-2.0
"""A timeline as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from sglang_mooncake.explain.questions import RankStories
from sglang_mooncake.explain.timeline import Lane, Timeline, verdict
from sglang_mooncake.rooms.write_story import WriteStory
from te.printable import printable

__all__ = ["as_text", "refused_text", "size_text", "time_text"]

_BAR_CHARS: Final = 40
_WRITES_SHOWN: Final = 8
_ABSENT_SHOWN: Final = 4


def as_text(line: Timeline) -> str:
    """What `sglang-mooncake explain` prints of one request. What others have told may hold control
    characters, which do not come into it."""
    parts = [f"room {line.room}: {_outcome(line)}, {time_text(line.duration_s)} on {_ranks(line)}"]
    if not line.is_one_clock:
        parts.append(
            "The ranks run on several hosts. Their lanes are aligned by the hosts' wall clocks, and"
            " are as exact as those are synchronised."
        )
    if line.problem is not None:
        parts.append(f"It failed: {line.problem}")
    for lane in line.lanes:
        parts.append("")
        parts.extend(_lane(line, lane))
    lane, stage, spent_s, where_to_look = verdict(line)
    share = spent_s / line.duration_s if line.duration_s else 0.0
    parts += ["", f"Longest: {stage} on {lane.rank}, {time_text(spent_s)} ({share:.0%})."]
    parts.append(where_to_look)
    if line.absent:
        parts.append(_absent(line.absent))
    return "\n".join(map(printable, parts))


def refused_text(told: Iterable[RankStories]) -> str:
    """Which prefill servers serve none of the requests that lead to them, and why; empty if each
    rank is served. A sentence that several ranks have said stands once."""
    found: dict[str, float] = {}
    for one in told:
        for server in one.refused:
            name = f"{server.address} and {one.role} ranks serve no request together"
            said = f"{name} ({server.why.value}): {server.sentence}"
            since_s = max(one.wall_s - server.since_s, 0.0)
            found[said] = max(since_s, found.get(said, 0.0))
    lines = (f"Now, for {time_text(since_s)}: {said}" for said, since_s in found.items())
    return "\n".join(printable(line) for line in lines)


def _outcome(line: Timeline) -> str:
    ends = {lane.story.end for lane in line.lanes}
    return " and ".join(sorted(ends)) + (
        " (not over yet)" if any(lane.story.is_open for lane in line.lanes) else ""
    )


def _absent(ranks: Sequence[str]) -> str:
    more = f" and {len(ranks) - _ABSENT_SHOWN} more" if len(ranks) > _ABSENT_SHOWN else ""
    return (
        f"Not shown: {', '.join(ranks[:_ABSENT_SHOWN])}{more}. These ranks took part, and have not"
        " told: name commands that reach their hosts, as in --on 'ssh HOST'."
    )


def _ranks(line: Timeline) -> str:
    hosts = len({lane.host for lane in line.lanes})
    return f"{len(line.lanes)} rank{'s' * (len(line.lanes) > 1)} of {hosts} host{'s' * (hosts > 1)}"


def _lane(line: Timeline, lane: Lane) -> Iterator[str]:
    story = lane.story
    took = time_text(story.duration_s)
    yield f"{lane.rank}: {story.end} after {took}, {_amount(story.pages, story.nbytes)}"
    for stage, began_s, spent_s in lane.spans:
        bar = _bar(began_s, spent_s, line.duration_s)
        yield f"  {stage:<12} {time_text(began_s):>9} {time_text(spent_s):>9}  |{bar}|"
    shown = story.writes[-_WRITES_SHOWN:]
    if len(story.writes) > len(shown):
        yield f"  {len(story.writes) - len(shown)} earlier writes are not shown (--json has them)"
    for write in shown:
        yield f"  {_write(lane, write)}"


def _write(lane: Lane, write: WriteStory) -> str:
    spent_s = write.ended_s - write.began_s
    rate = f", {write.nbytes / spent_s / 1e9:.2f} GB/s" if spent_s > 0 else ""
    many = f"{write.count} writes" if write.count > 1 else "write"
    early = " during the forward" if write.early else ""
    failed = f", {write.failed} failed" if write.failed else ""
    return (
        f"{many} at {time_text(write.began_s + lane.offset_s)}{early} to {write.peer} over"
        f" {write.transport}: {_amount(write.pages, write.nbytes)} in {write.blocks:,} blocks,"
        f" {time_text(spent_s)}{rate}{failed}"
    )


def _bar(began_s: float, spent_s: float, duration_s: float) -> str:
    """The stage's part of the whole; a stage that took any time at all is seen."""
    if duration_s <= 0:
        return " " * _BAR_CHARS
    first = min(int(began_s / duration_s * _BAR_CHARS), _BAR_CHARS - 1)
    end = min(max(round((began_s + spent_s) / duration_s * _BAR_CHARS), first + 1), _BAR_CHARS)
    filled = "#" * (end - first) if spent_s > 0 else "." * (end - first)
    return " " * first + filled + " " * (_BAR_CHARS - end)


def _amount(pages: int, nbytes: int) -> str:
    return f"{pages:,} page{'s' * (pages != 1)}, {size_text(nbytes)}"


def size_text(nbytes: float) -> str:
    """In the largest unit of which there is one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{int(nbytes)} bytes"


def time_text(seconds: float) -> str:
    """With three digits or so."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.0f} µs"
