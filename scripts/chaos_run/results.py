# SPDX-License-Identifier: Apache-2.0
"""What a run has shown. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos_run.again import Again, again
from chaos_run.backends import Backend
from chaos_run.rates import Spared, Window, kept, spared
from chaos_run.schedule import SERVERS, Fault
from chaos_run.soak import Third, grows
from chaos_run.traffic import Outcome, Way

__all__ = ["Happened", "Result", "unexplained"]

#: After a fault was undone its victim may still fail requests that came while it lasted.
AFTERMATH_S = 20.0
#: Of its undisturbed rate, what the pair without the victim has to keep.
KEPT_MIN = 0.9
_NUMBERS = re.compile(r"\b[0-9a-f]{16,}\b|0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Happened:
    """A fault as it was. Times are `time.monotonic`.

    ended_s: when its end began; of a killed server, when it answered again.
    recovered_s: after that, until a request over each way with its victim was answered.
    quiet: of a fault that was alone, the times before and after it.
    let_in: of somebody who was not invited, what he got.
    lost: why its victim has not served again, which ends the run; empty when it has.
    crashed: in a comparison, servers that had ended by themselves behind it.
    """

    fault: Fault
    began_s: float
    ended_s: float
    recovered_s: float
    quiet: tuple[Window, ...] = ()
    let_in: tuple[str, ...] = ()
    lost: str = ""
    crashed: tuple[str, ...] = ()

    @property
    def during(self) -> Window:
        return Window(self.began_s, self.ended_s + self.recovered_s)


@dataclass(frozen=True)
class Result:
    """All of a run.

    leaked_pages, held: by server; what is there at the end and was not before.
    thirds: of a run that is to have no faults, empty when there is too little to tell; else None.
    backend, versions: of a comparison.
    """

    seed: int
    began_s: float
    ended_s: float
    ways: tuple[Way, ...]
    outcomes: tuple[Outcome, ...]
    happened: tuple[Happened, ...]
    leaked_pages: dict[str, int] = field(default_factory=dict)
    held: dict[str, list[str]] = field(default_factory=dict)
    thirds: tuple[Third, ...] | None = None
    backend: Backend | None = None
    versions: str = ""

    def ends(self) -> Counter[str]:
        return Counter(outcome.end for outcome in self.outcomes)

    def causes(self) -> Counter[str]:
        """Of failed requests, numbers left out."""
        errors = (one.error for one in self.outcomes if one.end == "failed")
        return Counter(_NUMBERS.sub("N", error)[:300] for error in errors)

    def spared(self) -> list[Spared]:
        """Beside each fault that was alone, what the other pair did."""
        return [
            spared(one.fault.kind, one.fault.victim, one.during, one.quiet, self.outcomes)
            for one in self.happened
            if one.quiet
        ]

    def again(self) -> list[Again]:
        """After each fault of a kind that is over as soon as it is undone."""
        found = (
            again(one.fault, one.ended_s, self.outcomes, self.ways)
            for one in self.happened
            if not one.lost
        )
        return [one for one in found if one is not None]

    def faults_found(self) -> list[str]:
        """What must not be, in sentences; empty after a good run."""
        ends = self.ends()
        bad = []
        if not ends["equal"]:
            bad.append("no request was answered")
        for end, meaning in (
            ("wrong", "answered with wrong tokens"),
            ("late", "past its deadline"),
        ):
            if ends[end]:
                bad.append(f"{ends[end]} requests {meaning}")
        strange = unexplained(self.outcomes, self.happened, self.ways)
        bad += [
            f"a request over {one.way} failed, which no fault explains: {one.error}"
            for one in strange
        ]
        bad += [
            f"a request over {one.way} failed without a cause"
            for one in self.outcomes
            if one.end == "failed" and not one.error.strip()
        ]
        bad += [f"{one.fault}: {got}" for one in self.happened for got in one.let_in]
        bad += [f"{one.fault}: {one.lost}" for one in self.happened if one.lost]
        bad += [sentence for one in self.again() for sentence in one.late()]
        share = kept(self.spared())
        if share is not None and share < KEPT_MIN:
            bad.append(f"beside a fault the other pair kept {share:.2f} of its undisturbed rate")
        bad += [f"{name}: {n} pages leaked" for name, n in self.leaked_pages.items() if n]
        bad += [] if self.thirds is None else grows(self.thirds)
        bad += [f"{name}: {said}" for name, sentences in self.held.items() for said in sentences]
        return bad


def unexplained(
    outcomes: Sequence[Outcome], happened: Sequence[Happened], ways: Sequence[Way]
) -> list[Outcome]:
    """Failed requests during whose life nothing was wrong with the servers that they need. A
    registry's host explains none: who knows an instance goes on without it."""
    needs = {way.name: way.servers for way in ways}
    return [
        one
        for one in outcomes
        if one.end == "failed"
        and not any(
            fault.began_s <= one.ended_s
            and one.began_s <= fault.ended_s + AFTERMATH_S
            and fault.fault.victim in (needs[one.way] or SERVERS)
            for fault in happened
        )
    ]
