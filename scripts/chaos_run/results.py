# SPDX-License-Identifier: Apache-2.0
"""What a run has shown. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos_run.schedule import Fault
from chaos_run.traffic import Outcome, Way

__all__ = ["Happened", "Result", "unexplained"]

#: After a fault was undone its victim may still fail requests that came while it lasted.
AFTERMATH_S = 20.0
_NUMBERS = re.compile(r"\b[0-9a-f]{16,}\b|0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Happened:
    """A fault as it was. Times are `time.monotonic`.

    ended_s: when it was undone; of a killed server, when it answered again.
    recovered_s: after that, until a request over each way with its victim was answered.
    """

    fault: Fault
    began_s: float
    ended_s: float
    recovered_s: float


@dataclass(frozen=True)
class Result:
    """All of a run.

    undisturbed: requests per second and way without faults; `disturbed`: of ways without the
    victim, while a fault was under way.
    leaked_pages, held: by server; what is there at the end and was not before.
    """

    seed: int
    began_s: float
    ended_s: float
    ways: tuple[Way, ...]
    outcomes: tuple[Outcome, ...]
    happened: tuple[Happened, ...]
    leaked_pages: dict[str, int] = field(default_factory=dict)
    held: dict[str, list[str]] = field(default_factory=dict)

    def ends(self) -> Counter[str]:
        return Counter(outcome.end for outcome in self.outcomes)

    def causes(self) -> Counter[str]:
        """Of failed requests, numbers left out."""
        errors = (one.error for one in self.outcomes if one.end == "failed")
        return Counter(_NUMBERS.sub("N", error)[:300] for error in errors)

    def rates(self) -> tuple[float, float]:
        """Equal answers per second and way: while nothing is disturbed, and while something is,
        over the ways that do not need it."""
        good = [one for one in self.outcomes if one.end == "equal"]
        quiet_s, quiet = self.ended_s - self.began_s, 0
        other_s, other = 0.0, 0
        pairs = [way for way in self.ways if way.servers]
        for one in self.happened:
            whole_s = one.ended_s + one.recovered_s - one.began_s
            quiet_s -= whole_s
            spared = {way.name for way in pairs if one.fault.victim not in way.servers}
            other_s += whole_s * len(spared)
            other += sum(
                one.began_s <= answer.ended_s < one.began_s + whole_s and answer.way in spared
                for answer in good
            )
        names = {way.name for way in pairs}
        quiet = sum(answer.way in names and not self._disturbed(answer.ended_s) for answer in good)
        return (
            quiet / quiet_s / len(pairs) if quiet_s > 0 else 0.0,
            other / other_s if other_s > 0 else 0.0,
        )

    def _disturbed(self, at_s: float) -> bool:
        return any(one.began_s <= at_s < one.ended_s + one.recovered_s for one in self.happened)

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
        bad += [f"{name}: {n} pages leaked" for name, n in self.leaked_pages.items() if n]
        bad += [f"{name}: {said}" for name, sentences in self.held.items() for said in sentences]
        return bad


def unexplained(
    outcomes: Sequence[Outcome], happened: Sequence[Happened], ways: Sequence[Way]
) -> list[Outcome]:
    """Failed requests during whose life nothing was wrong with the servers that they need."""
    needs = {way.name: way.servers for way in ways}
    return [
        one
        for one in outcomes
        if one.end == "failed"
        and not any(
            fault.began_s <= one.ended_s
            and one.began_s <= fault.ended_s + AFTERMATH_S
            and (fault.fault.victim in needs[one.way] or not needs[one.way])
            for fault in happened
        )
    ]
