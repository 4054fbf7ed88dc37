# SPDX-License-Identifier: Apache-2.0
"""The bars that te is held to on a machine of the project's kind, and the cases they need. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from te_bench.report import CaseResult
from te_bench.shapes import SHAPES

__all__ = ["BARS", "BAR_CASES", "CUDA_BARS", "Bar", "BarCase", "Verdict", "judge", "verdict"]


@dataclass(frozen=True)
class BarCase:
    """A setting that at least one bar is about."""

    shape: str
    transport: str
    memory: str = "any"
    busy: bool = False


@dataclass(frozen=True)
class Bar:
    """te's ``metric`` over that of ``against`` must be ``at`` least or most ``factor``."""

    case: BarCase
    metric: Literal["gb_per_s", "p50_us", "p99_us", "cpu_s_per_gb", "submit_us"]
    #: A family; None when ``factor`` is the value itself.
    against: str | None
    at: Literal["least", "most"]
    factor: float

    def concerns(self, result: CaseResult) -> bool:
        """Whether the result is of the case this bar is about and has its contender."""
        if SHAPES[self.case.shape].blocks != result.blocks:
            return False  # scaled down
        mine = BarCase(result.shape, result.transport, result.memory, result.busy)
        return mine == self.case and self.against in {None, *result.results()}


_KV: Final = BarCase("kv", "tcp")
_S256: Final = BarCase("s256", "tcp")
_S2K: Final = BarCase("s2k", "tcp")
_KV_ANY: Final = BarCase("kv", "samehost")
_KV_ENGINE: Final = BarCase("kv", "samehost", "engine")
_LAT: Final = BarCase("lat", "tcp")
_LAT_HOST: Final = BarCase("lat", "samehost")
_KV_CUDA: Final = BarCase("kv", "samehost", "cuda")
_KV_CUDA_TCP: Final = BarCase("kv", "tcp", "cuda")
_KV_BUSY: Final = BarCase("kv", "tcp", busy=True)
_S256_BUSY: Final = BarCase("s256", "tcp", busy=True)
_LAT_BUSY: Final = BarCase("lat", "tcp", busy=True)

BARS: Final = (
    Bar(_KV, "gb_per_s", "mooncake", "least", 3.5),
    Bar(_KV, "gb_per_s", "floor", "least", 0.95),
    Bar(_KV, "cpu_s_per_gb", "mooncake", "most", 0.35),
    Bar(_KV, "submit_us", None, "most", 200),
    Bar(_S256, "gb_per_s", "mooncake", "least", 100),
    Bar(_S256, "gb_per_s", "nixl", "least", 25),
    Bar(_S256, "gb_per_s", "floor", "least", 0.8),
    Bar(_S2K, "gb_per_s", "mooncake", "least", 35),
    Bar(_S2K, "gb_per_s", "nixl", "least", 10),
    Bar(_S2K, "gb_per_s", "floor", "least", 0.8),
    Bar(_KV_ANY, "gb_per_s", "nixl", "least", 2.2),
    Bar(_KV_ANY, "gb_per_s", "floor", "least", 0.9),
    Bar(_KV_ENGINE, "gb_per_s", "nixl", "least", 4),
    Bar(_KV_ENGINE, "gb_per_s", "floor", "least", 0.9),
    Bar(_LAT, "p50_us", "mooncake", "most", 0.6),
    Bar(_LAT_HOST, "p50_us", "nixl", "most", 1.0),
    Bar(_KV_BUSY, "gb_per_s", "floor", "least", 0.9),
    Bar(_S256_BUSY, "gb_per_s", "floor", "least", 0.9),
    Bar(_LAT_BUSY, "p50_us", "floor", "most", 3.0),
    Bar(_LAT_BUSY, "p99_us", "mooncake", "most", 0.5),
)

#: Of a machine with a GPU, whose two processes share it (scripts/gpu-check).
CUDA_BARS: Final = (
    Bar(_KV_CUDA, "gb_per_s", "device-copy", "least", 0.8),
    Bar(_KV_CUDA, "gb_per_s", "mooncake", "least", 1.2),
    Bar(_KV_CUDA, "gb_per_s", "nixl", "least", 1.2),
    Bar(_KV_CUDA_TCP, "gb_per_s", "te-host", "least", 0.9),
    Bar(_KV_CUDA_TCP, "gb_per_s", "mooncake", "least", 3.0),
)

BAR_CASES: Final = tuple(dict.fromkeys(bar.case for bar in BARS))


@dataclass(frozen=True)
class Verdict:
    """Where te stands."""

    #: ``"gb_per_s ≥ 0.8 × device-copy's"``.
    bar: str
    #: The ratio, or the metric itself; None if it could not be measured.
    value: float | None
    is_reached: bool | None


def verdict(bar: Bar, result: CaseResult) -> Verdict:
    """The verdict on a case that the bar concerns."""
    sign = "≥" if bar.at == "least" else "≤"
    if bar.against is None:
        what = f"{bar.metric} {sign} {bar.factor:g}"
        value = getattr(result.results()["te"], bar.metric)
    else:
        what = f"{bar.metric} {sign} {bar.factor:g} × {bar.against}'s"
        value = result.ratios(bar.metric)[bar.against]
    if value is None:
        return Verdict(what, None, None)
    return Verdict(what, value, value >= bar.factor if bar.at == "least" else value <= bar.factor)


def judge(bar: Bar, result: CaseResult) -> str:
    """The bar and where te stands, in one line."""
    found = verdict(bar, result)
    if found.value is None:
        return f"bar: {found.bar}: not measured"
    reached = "reached" if found.is_reached else "NOT reached"
    return f"bar: {found.bar}: {found.value:.2f}, {reached}"
