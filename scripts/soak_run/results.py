# SPDX-License-Identifier: Apache-2.0
"""What a scenario has shown, and the table of several. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from cpu_serving.store_figures import Figures
from cpu_serving.traffic import Answer

__all__ = [
    "LATE_MAX_S",
    "TOLD_S",
    "Asked",
    "End",
    "Known",
    "Probed",
    "Row",
    "Span",
    "as_json",
    "causes",
    "end_of_waiting",
    "ends",
    "table",
]

End: TypeAlias = Literal["equal", "wrong", "cut off", "503", "failed", "hangs"]
"""cut off: failed, as it had to. Its prefill server was killed, and the client was told so in time.
"""

LATE_MAX_S: Final = 0.1
"""What a put or a get may take beyond its deadline, and a request to fail whose server is dead."""
TOLD_S: Final = 3.0
"""A request fails so soon after the server is dead that it waits for."""
_UNAVAILABLE: Final = "HTTP 503"
_NO_CAUSE: Final = re.compile(
    r"(Client|Server)\w*Error\b|(Timeout|Value)Error\b|HTTP \d+: \W*$|aborted$|\s*$"
)
"""What says that a request has failed, and not why: among others what the client itself raised."""
_CAUSE: Final = re.compile(r"KVTransferError\(.*?\): ([^'\"]+)")
"""As SGLang passes it on, with much around it."""
_NUMBER: Final = re.compile(r"\b[0-9a-f]{16,}\b|\d+")

Known: TypeAlias = Mapping[str, tuple[int, ...]]
"""The tokens that a request's answer must have, by what the server had when it was asked: the name
of its weights, say."""


@dataclass(frozen=True)
class Asked:
    """A request that has ended. Times are `time.monotonic`.

    number: of the prompt. answer: None if the client has given up.
    """

    number: int
    began_s: float
    ended_s: float
    answer: Answer | None


@dataclass(frozen=True)
class Span:
    """When a server may have answered with something: from the begin of the change to it until the
    end of the change to the next."""

    name: str
    begin_s: float
    end_s: float = float("inf")

    def meets(self, one: Asked) -> bool:
        return one.began_s <= self.end_s and self.begin_s <= one.ended_s


def ends(
    asked: Sequence[Asked],
    known: Sequence[Known],
    spans: Collection[Span],
) -> list[End]:
    """How requests have ended. An answer that came while something changed may be of before or of
    after."""
    return [_end(one, known[one.number], spans) for one in asked]


def _end(one: Asked, known: Known, spans: Collection[Span]) -> End:
    if one.answer is None:
        return "hangs"
    if one.answer.error is not None and one.answer.error.startswith(_UNAVAILABLE):
        return "503"
    if one.answer.error is not None:
        return "failed"
    right = {known[span.name] for span in spans if span.meets(one)}
    return "equal" if one.answer.output_ids in right else "wrong"


def end_of_waiting(answer: Answer | None) -> End:
    """How a request has ended of which nobody could know the answer: its prefill server is dead."""
    if answer is None:
        return "hangs"
    if answer.error is None:
        return "wrong"
    return "failed" if _NO_CAUSE.match(answer.error) else "cut off"


def causes(answers: Iterable[Answer]) -> list[str]:
    """Why they failed, the most frequent cause first, without the numbers in it."""
    errors = [one.error for one in answers if one.error is not None]
    found = Counter(
        _NUMBER.sub("N", cause[1] if (cause := _CAUSE.search(error)) else error) for error in errors
    )
    return [cause for cause, _ in found.most_common()]


@dataclass(frozen=True)
class Probed:
    """What a client of the store beside the servers has seen; seconds beyond deadlines."""

    puts: int = 0
    gets: int = 0
    #: Objects that came with other bytes than were stored.
    wrong: int = 0
    put_late_s: float = 0.0
    get_late_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """A scenario's. figures: of all ranks of its servers. errors: sentences of failed requests."""

    scenario: str
    seconds: float
    ends: Sequence[End]
    figures: Figures
    probed: Probed = Probed()
    errors: Collection[str] = ()
    #: What else is worth knowing.
    notes: Sequence[str] = field(default=())
    #: What must not be, and the scenario itself has found.
    faults: Collection[str] = ()
    #: The last request to fail whose server was dead, beyond `TOLD_S`.
    told_late_s: float = 0.0

    @property
    def counts(self) -> Counter[End]:
        return Counter(self.ends)

    @property
    def put_late_s(self) -> float:
        return max(self.figures.offload_late_s, self.probed.put_late_s, 0.0)

    @property
    def get_late_s(self) -> float:
        return max(self.figures.load_late_s, self.probed.get_late_s, 0.0)

    def bad(self, late_max_s: float = LATE_MAX_S) -> list[str]:
        """Sentences about what must not be."""
        return list(self._bad(late_max_s))

    def _bad(self, late_max_s: float) -> Iterator[str]:
        counts = self.counts
        for end, what in _MUST_NOT_BE.items():
            if counts[end]:
                yield f"{self.scenario}: {counts[end]} of {len(self.ends)} requests {what}"
        for error, count in Counter(self.errors).most_common(3):
            yield f"{self.scenario}: {count} × {error}"
        if not counts["equal"]:
            yield f"{self.scenario}: no request was answered"
        if self.probed.wrong:
            yield f"{self.scenario}: {self.probed.wrong} objects of the store have wrong bytes"
        for late_s, what in ((self.put_late_s, "put"), (self.get_late_s, "get")):
            if late_s > late_max_s:
                yield f"{self.scenario}: a {what} took {late_s:.2f} s beyond its deadline"
        if self.told_late_s > late_max_s:
            late_s = TOLD_S + self.told_late_s
            yield f"{self.scenario}: a request failed {late_s:.2f} s after its server was killed"
        yield from (f"{self.scenario}: {fault}" for fault in self.faults)


_MUST_NOT_BE: Final[Mapping[End, str]] = {
    "wrong": "were answered with wrong tokens",
    "503": "were answered with HTTP 503",
    "failed": "failed",
    "hangs": "had not ended by their deadline",
}
_ENDS: Final[Sequence[End]] = get_args(End)
_HEADS: Final = (
    "scenario",
    "minutes",
    "requests",
    *_ENDS,
    "pages loaded",
    "put late",
    "get late",
)


def table(rows: Sequence[Row]) -> str:
    """For people. "late" is the worst beyond a deadline, of the servers and of the client beside
    them; "cut off" see ``End``."""
    cells = [_HEADS, *map(_cells, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADS))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))]
        ).rstrip()
        for row in cells
    ]
    notes = [f"{row.scenario}: {note}" for row in rows for note in row.notes]
    bad = [sentence for row in rows for sentence in row.bad()]
    return "\n".join([*lines, "", *notes, *(bad or ["nothing that must not be"])])


def _cells(row: Row) -> tuple[str, ...]:
    counts = row.counts
    return (
        row.scenario,
        f"{row.seconds / 60:.1f}",
        str(len(row.ends)),
        *(str(counts[end]) for end in _ENDS),
        str(row.figures.pages),
        f"{row.put_late_s * 1e3:.0f} ms",
        f"{row.get_late_s * 1e3:.0f} ms",
    )


def as_json(row: Row) -> dict[str, Any]:
    """For programs."""
    return {
        "scenario": row.scenario,
        "seconds": row.seconds,
        "requests": len(row.ends),
        **{end: row.counts[end] for end in _ENDS},
        "servers": msgspec.to_builtins(row.figures),
        "client": msgspec.to_builtins(row.probed),
        "told_late_s": row.told_late_s,
        "put_late_s": row.put_late_s,
        "get_late_s": row.get_late_s,
        "notes": list(row.notes),
        "bad": row.bad(),
    }
