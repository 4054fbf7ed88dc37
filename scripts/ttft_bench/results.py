# SPDX-License-Identifier: Apache-2.0
"""What a run measured, and what follows from it: bounds, overlap, bars. Pure.

Times are in seconds, rates in bytes per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

__all__ = [
    "KINDS",
    "Bar",
    "Carried",
    "Kind",
    "Point",
    "Sample",
    "differences",
    "forward_ratio",
    "judge",
]

#: One ordinary server; PD; PD whose KV leaves layer by layer.
Kind = Literal["one", "pd", "layers"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The bars.
TTFT_LIMIT = 1.10
EVEN_GAIN = 0.35
FORWARD_LIMIT = 1.01
# Transfer and compute that differ by no more count as 1:1.
EVEN_TOLERANCE = 0.15


@dataclass(frozen=True)
class Sample:
    """One request.

    forward_s: as SGLang's scheduler of the server that prefills says it: from the batch being
        made until its result is there.
    cpu_s, decode_cpu_s: processor time of the server that prefills and of the decode server, until
        the whole answer was there.
    """

    kind: Kind
    round: int
    ttft_s: float
    forward_s: float
    output_ids: tuple[int, ...]
    cpu_s: float = 0.0
    decode_cpu_s: float = 0.0


@dataclass(frozen=True)
class Carried:
    """What a prefill server handed over for a point, by its own figures.

    nbytes, early_nbytes: of one request; early is what was written before `send()`.
    handover_s: from `send()`, which follows the forward, until all has landed; median.
    hooks_s: in hooks, per forward; median, 0.0 without any.
    fallbacks: why requests went as a whole, and how many.
    """

    nbytes: float
    early_nbytes: float
    handover_s: float
    hooks_s: float
    fallbacks: dict[str, int]


@dataclass(frozen=True)
class Point:
    """One length of prompt at one rate.

    bits_per_s: the limit that was set; None without one.
    bytes_per_s: what a plain TCP connection carried at this limit.
    layers: of the model.
    """

    rate: str
    bits_per_s: float | None
    bytes_per_s: float
    prompt_tokens: int
    layers: int
    samples: tuple[Sample, ...]
    carried: dict[Kind, Carried]

    def of(self, kind: Kind) -> list[Sample]:
        return [sample for sample in self.samples if sample.kind == kind]

    def ttft_s(self, kind: Kind) -> float:
        """The median."""
        return median(sample.ttft_s for sample in self.of(kind))

    def forward_s(self, kind: Kind) -> float:
        """The median."""
        return median(sample.forward_s for sample in self.of(kind))

    def cpu_s(self, kind: Kind) -> tuple[float, float]:
        """Processor time of the server that prefills, and of the decode server; medians."""
        samples = self.of(kind)
        return median(one.cpu_s for one in samples), median(one.decode_cpu_s for one in samples)

    def spread_s(self, kind: Kind) -> tuple[float, float]:
        """The fastest and the slowest time to first token."""
        times = [sample.ttft_s for sample in self.of(kind)]
        return min(times), max(times)

    @property
    def compute_s(self) -> float:
        """Time to first token of the ordinary server, which does all but the hand-over."""
        return self.ttft_s("one")

    @property
    def transfer_s(self) -> float:
        """Of all bytes of a request, at the rate that the network had."""
        return self.carried["pd"].nbytes / self.bytes_per_s

    @property
    def bound_s(self) -> float:
        """No overlap can be better."""
        return max(self.compute_s, self.transfer_s)

    @property
    def sum_s(self) -> float:
        """One after the other."""
        return self.compute_s + self.transfer_s

    @property
    def last_group_s(self) -> float:
        """Of the bytes that cannot leave before the forward ends, at the rate that the network had:
        those of the last layer, or all that left with `send()` if that is more."""
        carried = self.carried["layers"]
        late_nbytes = carried.nbytes - carried.early_nbytes
        return max(late_nbytes, carried.nbytes / self.layers) / self.bytes_per_s

    @property
    def hidden(self) -> float:
        """Of what the overlap can hide, the part that it has: 1.0 at the bound, 0.0 at the sum."""
        return (self.sum_s - self.ttft_s("layers")) / (self.sum_s - self.bound_s)

    @property
    def gain(self) -> float:
        """By how much PD layer by layer is faster than PD, 0.35 for 35 %."""
        return 1 - self.ttft_s("layers") / self.ttft_s("pd")

    @property
    def is_even(self) -> bool:
        """Whether transfer and compute take about as long as each other."""
        return abs(self.transfer_s / self.compute_s - 1) <= EVEN_TOLERANCE


@dataclass(frozen=True)
class Bar:
    """text: what is asked, and what was found. met: None where the run says nothing about it."""

    text: str
    met: bool | None

    def __str__(self) -> str:
        verdict = {True: "met", False: "MISSED", None: "not judged"}[self.met]
        return f"{verdict}: {self.text}"


def differences(points: Iterable[Point]) -> list[str]:
    """A sentence for each request whose tokens differ between kinds."""
    found = []
    for point in points:
        rounds: dict[int, dict[Kind, tuple[int, ...]]] = {}
        for sample in point.samples:
            rounds.setdefault(sample.round, {})[sample.kind] = sample.output_ids
        for number, ids in rounds.items():
            if len(set(ids.values())) > 1:
                said = ", ".join(f"{kind} {list(tokens)}" for kind, tokens in ids.items())
                found.append(
                    f"tokens differ at {point.prompt_tokens} tokens, {point.rate}, round {number}:"
                    f" {said}"
                )
    return found


def forward_ratio(points: Iterable[Point]) -> float | None:
    """Forward time layer by layer against that of PD without, for requests of one round each;
    the median. None without a round of both."""
    ratios = []
    for point in points:
        plain = {sample.round: sample.forward_s for sample in point.of("pd")}
        ratios += [
            sample.forward_s / plain[sample.round]
            for sample in point.of("layers")
            if sample.round in plain
        ]
    return median(ratios) if ratios else None


def judge(points: Sequence[Point], kinds: Sequence[Kind]) -> list[Bar]:
    """All bars, for each point that they are about."""
    if set(kinds) != set(KINDS):
        return [Bar("the bars compare all three kinds, and some were left out (--kinds)", None)]
    bars = [_bounded(point) for point in points if point.transfer_s <= point.compute_s]
    bars += [_faster(point) for point in points if point.is_even]
    if not any(point.is_even for point in points):
        bars.append(Bar("at a ratio of 1:1 …: no point of this run has it (--rate 1:1)", None))
    ratio = forward_ratio(points)
    if ratio is not None:
        text = f"forward with hooks ≤ {FORWARD_LIMIT} × without: {ratio:.3f}"
        bars.append(Bar(text, ratio <= FORWARD_LIMIT))
    return bars


def _bounded(point: Point) -> Bar:
    limit_s = TTFT_LIMIT * point.bound_s + point.last_group_s
    found_s = point.ttft_s("layers")
    text = (
        f"{_where(point)}: TTFT layer by layer ≤ {TTFT_LIMIT:.2f} × max({_ms(point.compute_s)},"
        f" {_ms(point.transfer_s)}) + {_ms(point.last_group_s)} = {_ms(limit_s)} ms:"
        f" {_ms(found_s)} ms ({found_s / point.bound_s:.2f} × the maximum)"
    )
    return Bar(text, found_s <= limit_s)


def _faster(point: Point) -> Bar:
    text = (
        f"{_where(point)}, transfer / compute {point.transfer_s / point.compute_s:.2f}: TTFT at"
        f" least {EVEN_GAIN:.0%} below PD without: {_ms(point.ttft_s('layers'))} against"
        f" {_ms(point.ttft_s('pd'))} ms, {point.gain:.1%}"
    )
    return Bar(text, point.gain >= EVEN_GAIN)


def _where(point: Point) -> str:
    return f"{point.prompt_tokens} tokens at {point.rate}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
