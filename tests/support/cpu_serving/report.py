# SPDX-License-Identifier: Apache-2.0
"""What a run showed, as a table for people and as one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from cpu_serving.cuda import CudaCounts
from cpu_serving.overlap import OverlapCounts
from cpu_serving.stats import Handover
from cpu_serving.traffic import Answer

__all__ = ["Drafts", "Report"]

MIB = 1 << 20


@dataclass(frozen=True)
class Drafts:
    """How often the decode server verified drafts, and how many were right."""

    verified: int
    right: int

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Drafts:
        pairs = [(answer.verified, answer.right_drafts) for answer in answers]
        return cls(sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))


@dataclass(frozen=True)
class Report:
    layout: str
    requests: int
    failed: int
    equal_requests: int
    tokens: int
    leaked_pages: int
    handover: Handover
    #: The transport that was asked for, if one was.
    transport: str | None
    #: Bytes that the RDMA devices say they sent, at most; None when they were not asked.
    carried_bytes: int | None
    #: What the stand-in for a GPU's streams counted on the prefill server, if there was one.
    overlap: OverlapCounts | None
    #: How much was to be compared by digests.
    verify: str
    #: Whether KV was to leave layer by layer.
    layerwise: bool
    #: What the driver without a GPU counted on each server, if there was one.
    cuda: tuple[CudaCounts, ...]
    #: Of speculative decoding, if the decode server has it.
    drafts: Drafts | None
    single_s: float
    disaggregated_s: float

    @property
    def equal(self) -> bool:
        return self.equal_requests == self.requests

    @property
    def good(self) -> bool:
        return (
            self.equal
            and self.failed == 0
            and self.leaked_pages == 0
            and self.transport in (None, self.handover.transport)
            and (self.carried_bytes is None or self.carried_bytes >= self.handover.bytes)
            and (self.overlap is None or self.overlap.taken)
            and self.digests_good
            and (not self.layerwise or self.handover.bytes_early > 0)
            and (self.drafts is None or self.drafts.right > 0)
            # What devices have carried, they took from the pools.
            and all(counts.good(is_staged=self.carried_bytes is None) for counts in self.cuda)
        )

    @property
    def digests_good(self) -> bool:
        """Nothing differs, and with `all` each request was compared on each decode rank."""
        digests = self.handover.digests
        compared = self.requests if self.verify == "all" else 0
        return not digests["different"] and digests["equal"] >= compared

    def table(self) -> str:
        handover = self.handover
        verdict = "all equal" if self.equal else "NOT EQUAL"
        rows = [
            ("layout", self.layout),
            ("requests", f"{self.requests} ({self.failed} failed)"),
            ("tokens compared", f"{self.tokens:,}"),
            ("equal to one server", f"{self.equal_requests} of {self.requests}: {verdict}"),
            ("bytes handed over", f"{handover.bytes:,} ({handover.bytes / MIB:.1f} MiB)"),
            ("hand-over time p50", _figure(handover.handover_p50_ms, "ms")),
            ("hand-over time p99", _figure(handover.handover_p99_ms, "ms")),
            ("rate while moving", f"{handover.gb_per_s:.3f} GB/s"),
            ("transport", f"{handover.transport}, {handover.rails} rail(s)"),
            *self._carried(),
            *self._digested(),
            *self._overlapped(),
            *self._by_layers(),
            *self._staged(),
            *self._drafted(),
            ("scheduler send() p99", _figure(handover.send_p99_us, "us")),
            ("scheduler poll() p99", _figure(handover.poll_p99_us, "us")),
            ("leaked pages", f"{self.leaked_pages}"),
            ("time, one server", f"{self.single_s:.1f} s"),
            ("time, prefill + decode", f"{self.disaggregated_s:.1f} s"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _carried(self) -> list[tuple[str, str]]:
        if self.carried_bytes is None:
            return []
        enough = "" if self.carried_bytes >= self.handover.bytes else ": NOT THE PATH TAKEN"
        return [("sent by RDMA devices", f"up to {self.carried_bytes:,} bytes{enough}")]

    def _digested(self) -> list[tuple[str, str]]:
        if self.verify == "off":
            return []
        digests = self.handover.digests
        verdict = "" if self.digests_good else ": WRONG"
        return [
            (
                "compared by digests",
                f"{digests['equal']:,.0f} equal, {digests['different']:,.0f} not{verdict}",
            ),
            ("cells digested", f"{digests['cells']:,.0f} ({digests['bytes'] / MIB:.1f} MiB)"),
        ]

    def _overlapped(self) -> list[tuple[str, str]]:
        if self.overlap is None:
            return []
        seen = "" if self.overlap.taken else ": NOT THE WAY TAKEN"
        return [
            ("early prefix sends", f"{self.overlap.early_prefixes}{seen}"),
            ("sends that waited", f"for {self.overlap.waits} events{seen}"),
        ]

    def _by_layers(self) -> list[tuple[str, str]]:
        if not self.layerwise:
            return []
        handover = self.handover
        share = handover.bytes_early / max(handover.bytes, 1)
        seen = "" if handover.bytes_early else ": NOT THE WAY TAKEN"
        reasons = sorted(handover.fallbacks.items(), key=lambda item: -item[1])
        return [
            ("bytes before send()", f"{handover.bytes_early:,} ({share:.0%}){seen}"),
            ("hooks per forward p50", _figure(handover.hooks_p50_us, "us")),
            *(("went as a whole", f"{count:,} times: {reason}") for reason, count in reasons),
        ]

    def _staged(self) -> list[tuple[str, str]]:
        if not self.cuda:
            return []

        def on_both(numbers: Iterable[int]) -> str:
            return " + ".join(f"{number:,}" for number in numbers)

        return [
            ("batches of CUDA copies", on_both(one.batches for one in self.cuda)),
            ("copies of pageable memory", on_both(one.pageable_copies for one in self.cuda)),
            ("scheduler's CUDA waits", on_both(one.synchronising_calls for one in self.cuda)),
        ]

    def _drafted(self) -> list[tuple[str, str]]:
        if self.drafts is None:
            return []
        return [("drafts", f"{self.drafts.right:,} right in {self.drafts.verified:,} times")]

    def json_line(self) -> str:
        handover = self.handover
        return json.dumps(
            {
                "equal": self.equal,
                "requests": self.requests,
                "failed": self.failed,
                "equal_requests": self.equal_requests,
                "tokens": self.tokens,
                "bytes": handover.bytes,
                "handover_ms": {"p50": handover.handover_p50_ms, "p99": handover.handover_p99_ms},
                "gb_per_s": handover.gb_per_s,
                "transport": handover.transport,
                "rails": handover.rails,
                "carried_bytes": self.carried_bytes,
                "overlap": asdict(self.overlap) if self.overlap else None,
                "digests": handover.digests,
                "bytes_early": handover.bytes_early,
                "fallbacks": handover.fallbacks,
                "cuda": [asdict(counts) for counts in self.cuda],
                "drafts": asdict(self.drafts) if self.drafts else None,
                "scheduler_call_us": {
                    "send_p99": handover.send_p99_us,
                    "poll_p99": handover.poll_p99_us,
                },
                "rooms": handover.rooms,
                "leaked_pages": self.leaked_pages,
                "layout": self.layout,
            }
        )


def _figure(value: float | None, unit: str) -> str:
    return "no samples" if value is None else f"{value:.2f} {unit}"
