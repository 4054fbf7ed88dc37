# SPDX-License-Identifier: Apache-2.0
"""Whether servers that nothing disturbs stay as they are: memory and latency over time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from chaos_run.traffic import Outcome

__all__ = ["Sample", "Third", "grows", "thirds"]

#: Pools of requests, of pages of prompts and of the allocator are filled meanwhile.
MEMORY_GROWS_MAX = 1.05
#: A p99 of thousands of requests on a machine that others use, too.
P99_GROWS_MAX = 1.5
ANSWERS_MIN = 100


@dataclass(frozen=True)
class Sample:
    """at_s: `time.monotonic`. nbytes: resident memory of each server's processes, by server."""

    at_s: float
    nbytes: dict[str, int]


@dataclass(frozen=True)
class Third:
    """Of a run: resident bytes by server (median), answers, and their p50 and p99 in seconds."""

    nbytes: dict[str, float]
    answers: int
    p50_s: float
    p99_s: float


def thirds(
    began_s: float, ended_s: float, samples: Sequence[Sample], outcomes: Sequence[Outcome]
) -> list[Third]:
    """Empty when there is too little to tell."""
    length_s = (ended_s - began_s) / 3
    found = []
    for number in range(3):
        begin_s, end_s = began_s + number * length_s, began_s + (number + 1) * length_s
        memory = [one.nbytes for one in samples if begin_s <= one.at_s < end_s]
        times = [
            one.ended_s - one.began_s
            for one in outcomes
            if one.end == "equal" and begin_s <= one.ended_s < end_s
        ]
        if not memory or len(times) < ANSWERS_MIN:
            return []
        nbytes = {name: median(one[name] for one in memory) for name in memory[0]}
        found.append(Third(nbytes, len(times), median(times), quantiles(times, n=100)[-1]))
    return found


def grows(found: Sequence[Third]) -> list[str]:
    """Sentences on what is more in the last third than in the first, or that nobody can tell."""
    if not found:
        why = f"a third of the run has fewer than {ANSWERS_MIN} answers, or no sample of memory"
        return [f"too little to tell whether anything grows: {why}"]
    first, last = found[0], found[-1]
    bad = [
        f"{name}: {first.nbytes[name] / 2**20:.0f} MiB of memory in the first third of the run, "
        f"{nbytes / 2**20:.0f} in the last"
        for name, nbytes in last.nbytes.items()
        if nbytes > first.nbytes[name] * MEMORY_GROWS_MAX
    ]
    if last.p99_s > first.p99_s * P99_GROWS_MAX:
        bad.append(
            f"p99 of answers {first.p99_s:.2f} s in the first third, {last.p99_s:.2f} s in the last"
        )
    return bad
