# SPDX-License-Identifier: Apache-2.0
"""What was measured, in tables and beside the bars. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Final

from route_bench.options import Way

__all__ = ["Bar", "Sample", "Turn", "bars", "differences", "table"]

TTFT_TO_MINI_LB: Final = 0.6
TTFT_TO_CACHE_AWARE: Final = 0.85
HITS_TO_ORACLE: Final = 0.97
MEDIAN_ERROR: Final = 0.2


@dataclass(frozen=True)
class Sample:
    """One request. ``refused``: with status 429 or 503; ``error``: any other failure."""

    ttft_s: float | None
    output_ids: tuple[int, ...] = ()
    refused: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Turn:
    """One way under one load, once. ``hit_tokens``: of all prompts, as the prefill servers tell;
    ``errors``: median errors of the router's expectations, of each prefill server, without the
    router's first hundred requests."""

    load: str
    way: Way
    round: int
    samples: tuple[Sample, ...]
    prompt_tokens: int
    hit_tokens: int
    oracle_tokens: int
    errors: tuple[float, ...] = ()
    #: Share of the processors that others had before.
    others_busy: float = 0.0


@dataclass(frozen=True)
class Bar:
    what: str
    value: float
    limit: float
    #: Whether ``value`` is to be at least ``limit``, instead of at most.
    is_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit

    def __str__(self) -> str:
        word = "at least" if self.is_least else "at most"
        verdict = "holds" if self.holds else "MISSED"
        return f"{verdict:7}{self.what}: {self.value:.3f} ({word} {self.limit:g})"


@dataclass(frozen=True)
class _Sum:
    """All rounds of one way under one load."""

    ttft_s: tuple[float, ...]
    hit_ratio: float
    to_oracle: float
    refused: int
    failed: int
    error: float | None

    @property
    def mean_s(self) -> float:
        return fmean(self.ttft_s) if self.ttft_s else float("nan")


def _sums(turns: Sequence[Turn]) -> dict[tuple[str, Way], _Sum]:
    grouped: dict[tuple[str, Way], list[Turn]] = {}
    for turn in turns:
        grouped.setdefault((turn.load, turn.way), []).append(turn)
    return {key: _sum(group) for key, group in grouped.items()}


def _sum(group: Sequence[Turn]) -> _Sum:
    samples = [sample for turn in group for sample in turn.samples]
    hits, prompts = sum(t.hit_tokens for t in group), sum(t.prompt_tokens for t in group)
    oracle, last = sum(t.oracle_tokens for t in group), group[-1].errors
    return _Sum(
        ttft_s=tuple(one.ttft_s for one in samples if one.ttft_s is not None),
        hit_ratio=hits / prompts if prompts else 0.0,
        to_oracle=hits / oracle if oracle else 1.0,
        refused=sum(one.refused for one in samples),
        failed=sum(one.error is not None for one in samples),
        error=fmean(last) if last else None,
    )


def table(turns: Sequence[Turn]) -> str:
    """A line for each way, by load."""
    head = f"{'load':24}{'way':14}{'mean':>9}{'p50':>9}{'p99':>9}{'hits':>8}{'oracle':>8}"
    lines = [f"{head}{'error':>8}{'refused':>9}{'failed':>8}"]
    for (load, way), one in _sums(turns).items():
        cut = (
            quantiles(one.ttft_s, n=100, method="inclusive") if len(one.ttft_s) > 1 else [0.0] * 99
        )
        error = "" if one.error is None else f"{one.error:.0%}"
        lines.append(
            f"{load:24}{way:14}{one.mean_s * 1e3:6.0f} ms{cut[49] * 1e3:6.0f} ms"
            f"{cut[98] * 1e3:6.0f} ms{one.hit_ratio:8.1%}{one.to_oracle:8.1%}{error:>8}"
            f"{one.refused:9}{one.failed:8}"
        )
    return "\n".join(lines)


def bars(turns: Sequence[Turn]) -> list[Bar]:
    """Those that follow from the ways that were measured."""
    sums = _sums(turns)
    return [bar for load in dict.fromkeys(turn.load for turn in turns) for bar in _bars(load, sums)]


def _bars(load: str, sums: Mapping[tuple[str, Way], _Sum]) -> Iterator[Bar]:
    others: tuple[tuple[Way, float], ...] = (
        ("mini-lb", TTFT_TO_MINI_LB),
        ("cache_aware", TTFT_TO_CACHE_AWARE),
    )
    ours: tuple[Way, ...] = ("ours", "ours+store")
    for way in ours:
        mine = sums.get((load, way))
        if mine is None:
            continue
        for other, limit in others:
            if (load, other) in sums:
                value = mine.mean_s / sums[load, other].mean_s
                yield Bar(f"{load}, mean TTFT, {way} in times {other}'s", value, limit)
        yield Bar(f"{load}, hits, {way} of the oracle's", mine.to_oracle, HITS_TO_ORACLE, True)
        if mine.error is not None:
            yield Bar(f"{load}, median error of {way}", mine.error, MEDIAN_ERROR)


def differences(
    turns: Sequence[Turn], expected: Mapping[str, Sequence[Sequence[int]]]
) -> list[str]:
    """A sentence for each answer that has other tokens than the same prompt's elsewhere.
    ``expected``: by load, of the first prompts of round 0, those of one ordinary server."""
    seen: dict[tuple[str, int, int], tuple[int, ...]] = {
        (load, 0, number): tuple(tokens)
        for load, answers in expected.items()
        for number, tokens in enumerate(answers)
    }
    found = []
    for turn in turns:
        for number, sample in enumerate(turn.samples):
            if sample.ttft_s is None:
                continue
            wanted = seen.setdefault((turn.load, turn.round, number), sample.output_ids)
            if wanted != sample.output_ids:
                found.append(
                    f"{turn.load}, round {turn.round}, request {number}, {turn.way}: tokens"
                    f" {sample.output_ids} instead of {wanted}"
                )
    return found
