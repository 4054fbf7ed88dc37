# SPDX-License-Identifier: Apache-2.0
"""From what was measured to figures, ratios, JSON and tables. Pure.

1 GB is 1e9 bytes. Figures are medians over the rounds. Percentiles are of calls: where a round has
at least 100 of them the median over rounds of the round's percentile, otherwise of all together.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

__all__ = ["CaseResult", "Figures", "Sample", "VariantRun", "as_json", "figures", "percentile"]

PERCENTILE_CALLS_MIN: Final = 100

State = Literal["ok", "absent", "failed"]


@dataclass(frozen=True)
class Sample:
    """One round of one variant."""

    elapsed_ns: int
    ops_ns: Sequence[int]
    submit_ns: Sequence[int]
    late_ns: Sequence[int]
    #: Processor time of both processes.
    cpu_s: float
    wrong_blocks: int
    stray_slots: int


@dataclass
class VariantRun:
    """All rounds of one variant, or why there are none."""

    name: str
    #: What it stands for in the results; empty when it is only shown.
    family: str
    state: State = "ok"
    #: Why it is absent or failed.
    reason: str | None = None
    version: str | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def wrong_blocks(self) -> int:
        """Over all rounds."""
        return sum(sample.wrong_blocks for sample in self.samples)

    @property
    def stray_slots(self) -> int:
        """Over all rounds."""
        return sum(sample.stray_slots for sample in self.samples)


@dataclass(frozen=True)
class Figures:
    """One variant in one case. Figures are None unless ``state`` is ``"ok"``."""

    name: str
    state: State
    reason: str | None = None
    version: str | None = None
    gb_per_s: float | None = None
    best_gb_per_s: float | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    #: Processor seconds of both processes for 1e9 bytes.
    cpu_s_per_gb: float | None = None
    #: Median until a call returned to its caller, where that is before its outcome.
    submit_us: float | None = None
    #: Median from the outcome until a thread that waited for it went on; not part of the others.
    late_us: float | None = None
    #: Every byte of every round was right, and nothing else changed; None without a round.
    verified: bool | None = None


@dataclass(frozen=True)
class CaseResult:
    """One shape in one setting: what ``--json`` prints as an object."""

    shape: str
    blocks: int
    nbytes: int
    threads: int
    sync: bool
    transport: str
    memory: str
    busy: bool
    rounds: int
    seed: int
    runs: Sequence[VariantRun]
    machine: dict[str, Any]

    @property
    def metric(self) -> Literal["gb_per_s", "p50_us"]:
        """What the ratios compare: latency where blocks go one at a time."""
        return "p50_us" if self.sync else "gb_per_s"

    def variants(self) -> dict[str, Figures]:
        """Figures of every variant."""
        return {run.name: figures(run, self.blocks * self.nbytes) for run in self.runs}

    def results(self) -> dict[str, Figures]:
        """The best variant of each family; verified only if all of its variants were."""
        variants = self.variants()
        return {
            family: _best(
                [variants[run.name] for run in self.runs if run.family == family], self.metric
            )
            for family in dict.fromkeys(run.family for run in self.runs if run.family)
        }

    def ratios(self, metric: str | None = None) -> dict[str, float | None]:
        """te's median over each family's: of ``metric``, by default what the case is about."""
        results = self.results()
        mine = getattr(results["te"], metric or self.metric) if "te" in results else None
        return {
            family: _ratio(mine, getattr(theirs, metric or self.metric))
            for family, theirs in results.items()
            if family != "te"
        }

    @property
    def ok(self) -> bool:
        """te ran, and nothing that ran left a wrong byte anywhere."""
        results = self.results()
        te_ran = "te" not in results or results["te"].state == "ok"
        return te_ran and all(result.verified is not False for result in self.variants().values())


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    if not values or not 0 < percent <= 100:
        raise ValueError(f"no percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def figures(run: VariantRun, nbytes: int) -> Figures:
    """Medians of a variant that moved ``nbytes`` bytes in every round."""
    # A contender that left a wrong byte before it failed has done that, too.
    verified = not (run.wrong_blocks or run.stray_slots) if run.samples else None
    if run.state != "ok" or not run.samples:
        return Figures(run.name, run.state, run.reason, run.version, verified=verified)
    rates = [nbytes / sample.elapsed_ns for sample in run.samples]  # bytes/ns are GB/s
    submits = [ns for sample in run.samples for ns in sample.submit_ns]
    lates = [ns for sample in run.samples for ns in sample.late_ns]
    return Figures(
        name=run.name,
        state=run.state,
        reason=_damage(run),
        version=run.version,
        gb_per_s=statistics.median(rates),
        best_gb_per_s=max(rates),
        p50_us=_over_rounds(run.samples, 50) / 1e3,
        p99_us=_over_rounds(run.samples, 99) / 1e3,
        cpu_s_per_gb=statistics.median(sample.cpu_s for sample in run.samples) / nbytes * 1e9,
        submit_us=statistics.median(submits) / 1e3 if submits else None,
        late_us=statistics.median(lates) / 1e3 if lates else None,
        verified=verified,
    )


def as_json(case: CaseResult) -> dict[str, Any]:
    """The object of a case."""
    return {
        "shape": case.shape,
        "blocks": case.blocks,
        "nbytes": case.nbytes,
        "threads": case.threads,
        "transport": case.transport,
        "memory": case.memory,
        "busy": case.busy,
        "rounds": case.rounds,
        "seed": case.seed,
        "results": {family: asdict(result) for family, result in case.results().items()},
        "ratio_of": case.metric,
        "ratios": case.ratios(),
        "p99_ratios": case.ratios("p99_us"),
        "cpu_ratios": case.ratios("cpu_s_per_gb"),
        "variants": {name: asdict(result) for name, result in case.variants().items()},
        "machine": case.machine,
    }


def _over_rounds(samples: Sequence[Sample], percent: float) -> float:
    if min(len(sample.ops_ns) for sample in samples) >= PERCENTILE_CALLS_MIN:
        return statistics.median(percentile(sample.ops_ns, percent) for sample in samples)
    return percentile([ns for sample in samples for ns in sample.ops_ns], percent)


def _damage(run: VariantRun) -> str | None:
    if not (run.wrong_blocks or run.stray_slots):
        return None
    return f"{run.wrong_blocks} wrong blocks, {run.stray_slots} slots written by mistake"


def _best(variants: Sequence[Figures], metric: str) -> Figures:
    ran = [variant for variant in variants if variant.state == "ok"]
    if not ran:
        return variants[0]
    best = (
        min(ran, key=lambda variant: variant.p50_us or 0.0)
        if metric == "p50_us"
        else max(ran, key=lambda variant: variant.gb_per_s or 0.0)
    )
    damaged = [variant for variant in variants if variant.verified is False]
    return damaged[0] if damaged else best


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return mine / theirs if mine is not None and theirs else None
