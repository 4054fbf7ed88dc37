# SPDX-License-Identifier: Apache-2.0
"""Which rows there are, what they find, and how a table says it. Pure; standard library alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

__all__ = [
    "AGENTS",
    "CONTENDERS",
    "PAIRS",
    "ROWS",
    "SPEED",
    "Answers",
    "Ended",
    "Landed",
    "Lists",
    "Served",
    "Spent",
    "table",
]

#: By name: what a table calls them.
CONTENDERS: Final[Mapping[str, str]] = {"te": "this package", "nixl": "NVIDIA's NIXL"}

#: Of two processes with an agent each.
AGENTS: Final[Mapping[str, str]] = {
    "silent": "a read of 64 MiB from a process that stands still",
    "gone": "a read from a process that was killed",
    "read-released": "the same read, released; then the process goes on",
    "write-released": "a write of 64 MiB to it, released and its source used again; it goes on",
    "cut": "20 reads after all connections were severed",
}
#: Of a prefill and a decode server of vLLM, one row after another.
PAIRS: Final[Mapping[str, str]] = {
    "prefill-stopped": "the prefill server stands still after its answer",
    "decode-stopped": "the decode server stands still for 5 s under traffic",
    "prefill-killed": "the prefill server is killed under traffic, and started again",
    "decode-killed": "the decode server is killed under traffic, and started again",
    # The last one: nothing repairs what it does to NVIDIA's NIXL.
    "severed": "all connections between the two are severed, three times",
}
#: Both contenders in turn.
SPEED: Final[Mapping[str, str]] = {
    "lists": "a read of 32,768 blocks of 256 B by prepared lists",
    "post": "a post of 200,000 descriptors of 64 B",
    "ttft": "first token of a pair of vLLM's servers, 2,000 tokens of prompt",
}
ROWS: Final = {**AGENTS, **PAIRS, **SPEED}


@dataclass(frozen=True)
class Ended:
    """Of a transfer. state: the last one, or the error that was raised. after_s: from the post."""

    state: str
    after_s: float

    def __str__(self) -> str:
        if self.state == "PROC":
            return f"`PROC` for {self.after_s:.1f} s, and then it was looked at no more"
        return f"`{self.state}` after {self.after_s:.1f} s"


@dataclass(frozen=True)
class Landed:
    """nbytes: that landed after the release, of how many. released_s: until that succeeded; None if
    it did not."""

    nbytes: int
    of_nbytes: int
    released_s: float | None

    def __str__(self) -> str:
        if self.released_s is None:
            return "could not be released"
        landed = f"{self.nbytes:,} of {self.of_nbytes:,} B landed afterwards"
        return f"released after {self.released_s:.1f} s; {landed}"


@dataclass(frozen=True)
class Served:
    """One request. after_s: None if there was no answer as long as it was waited for. compute_s:
    what a server takes for it that gets nothing from another one."""

    after_s: float | None
    waited_s: float
    is_right: bool
    compute_s: float = 0.0

    @property
    def lost_s(self) -> float:
        """By the fault."""
        if self.after_s is None or not self.is_right:
            return math.inf
        return max(self.after_s - self.compute_s, 0.0)

    def __str__(self) -> str:
        if self.after_s is None:
            return f"no answer for {self.waited_s:.0f} s"
        return f"answered {'right' if self.is_right else 'WRONG'} after {self.after_s:.1f} s"


@dataclass(frozen=True)
class Answers:
    """Of a pair of servers. came: those whose prompts the prefill server handed over; None where
    it was not looked at. again_s: from the end of the fault until prompts were handed over again;
    None if they were not. meanwhile: what one server has answered while the other was gone."""

    asked: int
    right: int
    wrong: int
    failed: int
    slowest_s: float
    came: int | None = None
    again_s: float | None = None
    has_again: bool = False
    meanwhile: Served | None = None

    def __str__(self) -> str:
        said = f"{self.asked} asked: {self.right} right, {self.wrong} wrong, {self.failed} failed"
        if self.came is not None:
            said += f"; prompts handed over: {self.came} of {self.asked}"
        if self.meanwhile is not None:
            said += f"; the other server meanwhile: {self.meanwhile}"
        if self.has_again:
            again = "not again" if self.again_s is None else f"again after {self.again_s:.1f} s"
            said += f"; handed over {again}"
        return f"{said}; slowest {self.slowest_s:.1f} s"


@dataclass(frozen=True)
class Spent:
    """Times of several rounds, in seconds."""

    times_s: Sequence[float]

    @property
    def median_s(self) -> float:
        return median(self.times_s)

    def __str__(self) -> str:
        return f"{self.median_s * 1e3:.3g} ms (best {min(self.times_s) * 1e3:.3g} ms)"


@dataclass(frozen=True)
class Lists:
    """Of a transfer by prepared lists, each of several rounds. made: of its handle."""

    made: Spent
    posted: Spent
    done: Spent
    nbytes: int

    def __str__(self) -> str:
        rate = self.nbytes / self.done.median_s / 1e9
        return (
            f"made in {self.made}, posted in {self.posted}, done after {self.done}: {rate:.3g} GB/s"
        )


#: What the bars compare, in seconds, by row.
_MEASURED: Final[Mapping[str, Callable[[Any], float]]] = {
    "lists": lambda found: found.done.median_s,
    "post": lambda found: found.posted.median_s,
    "ttft": lambda found: found.median_s,
    "prefill-stopped": lambda found: found.lost_s,
    "prefill-killed": lambda found: found.meanwhile.lost_s,
}
#: Until te gives up a peer that stands still (SGLANG_MOONCAKE_STALL_TIMEOUT_S), and a second in
#: which that is noticed and the prompt begun.
_LOST_S: Final = 5.0 + 1.0
#: Row → a bar of this package's time over NIXL's, and one in seconds.
_BARS: Final[Mapping[str, tuple[float | None, float | None]]] = {
    "lists": (0.1, None),
    "post": (None, 0.060),
    "ttft": (0.8, None),
    "prefill-stopped": (None, _LOST_S),
    "prefill-killed": (None, _LOST_S),
}


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of what was found by row and contender, in Markdown; and where this package stands."""
    names = [one for one in CONTENDERS if any(one in cells for cells in found.values())]
    lines = [_line(["", *(CONTENDERS[one] for one in names)]), _line(["---"] * (len(names) + 1))]
    lines += [
        _line([ROWS[row], *(str(cells.get(one, "–")) for one in names)])
        for row, cells in found.items()
    ]
    return [*lines, *(said for row in found for said in _bars(row, found[row]))]


def _bars(row: str, cells: Mapping[str, Any]) -> list[str]:
    if row not in _BARS or "te" not in cells:
        return []
    share, limit_s = _BARS[row]
    ours_s = _MEASURED[row](cells["te"])
    said = []
    if limit_s is not None:
        said.append(_verdict(row, _time(ours_s), _time(limit_s), ours_s <= limit_s))
    if share is not None and "nixl" in cells:
        ratio = ours_s / _MEASURED[row](cells["nixl"])
        said.append(_verdict(row, f"{ratio:.3f} × NIXL's", f"{share:g} ×", ratio <= share))
    return said


def _time(seconds: float) -> str:
    if seconds == math.inf:
        return "no right answer"
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{seconds * 1e3:.3g} ms"


def _verdict(row: str, is_now: str, bar: str, is_reached: bool) -> str:
    return f"bar of `{row}`: {is_now}, at most {bar}: {'reached' if is_reached else 'NOT reached'}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
