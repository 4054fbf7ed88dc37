# SPDX-License-Identifier: Apache-2.0
"""The registry's metrics. Pure, but for `process_lines`.

They are counts alone, without a name of an instance, a rank or a host, because whoever reaches the
registry may read them.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bootstrap_server.prometheus_text import family

__all__ = ["METRICS", "PREFIX", "Counts", "process_lines", "text"]

PREFIX: Final = "sglang_mooncake_registry_"
#: What can happen to a rank (`Board`); each counts from 0, so that `increase` sees the first one.
EVENTS: Final = ("connection lost", "lease lapsed", "registered", "replaced", "shut down")


class _Metric(NamedTuple):
    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: Final = {
    "requests_total": _Metric(
        "counter",
        "Requests, by route, method and status of the answer.",
        ("route", "method", "status"),
    ),
    "request_seconds_total": _Metric(
        "counter",
        "Time from a request's head to its answer, by route, with what it waited for.",
        ("route",),
    ),
    "ranks": _Metric("gauge", "Prefill ranks that are registered."),
    "ranks_expected": _Metric("gauge", "Prefill ranks that the known instances consist of."),
    "decode_ranks": _Metric(
        "gauge", "Decode ranks that are registered: those of servers that name this registry."
    ),
    "decode_ranks_expected": _Metric(
        "gauge", "Decode ranks that the known decode servers consist of."
    ),
    "ranks_gone": _Metric(
        "gauge",
        "Ranks of both roles whose leases lapsed in the last 10 minutes, and that are not back.",
    ),
    "instances": _Metric("gauge", "Prefill instances of which at least one rank is registered."),
    "instances_ready": _Metric("gauge", "Prefill instances of which every rank is registered."),
    "rank_events_total": _Metric(
        "counter",
        "What happened to ranks: registered, shut down, connection lost, lease lapsed, …",
        ("event",),
    ),
    "connections": _Metric("gauge", "Open connections."),
}


class Counts:
    """What has been counted since the start. The registry's thread alone uses it."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.seconds: dict[str, float] = {}

    def answered(self, route: str, method: str, status: int, took_s: float) -> None:
        """`route`: as it is written in the application, or "other"."""
        self.requests[route, method, status] += 1
        self.seconds[route] = self.seconds.get(route, 0.0) + took_s


def text(
    counts: Counts,
    instances: Iterable[tuple[int, int]],
    decode_servers: Iterable[tuple[int, int]],
    gone: int,
    events: Mapping[str, int],
    connections: int,
    process: Iterable[str],
) -> str:
    """The answer to `GET /metrics`. `instances`, `decode_servers`: of each, how many ranks are
    registered, and how many there should be. `gone`: ranks whose leases have lapsed lately.
    `events`: how often what happened to ranks."""
    known = [(here, expected) for here, expected in instances if here]
    decode = [(here, expected) for here, expected in decode_servers if here]
    values: dict[str, Mapping[tuple[str, ...], float]] = {
        "requests_total": {
            (route, method, str(status)): count
            for (route, method, status), count in sorted(counts.requests.items())
        },
        "request_seconds_total": {
            (route,): spent_s for route, spent_s in sorted(counts.seconds.items())
        },
        "ranks": {(): sum(here for here, _ in known)},
        "ranks_expected": {(): sum(expected for _, expected in known)},
        "decode_ranks": {(): sum(here for here, _ in decode)},
        "decode_ranks_expected": {(): sum(expected for _, expected in decode)},
        "ranks_gone": {(): gone},
        "instances": {(): len(known)},
        "instances_ready": {(): sum(here == expected for here, expected in known)},
        "rank_events_total": {
            (what,): count for what, count in sorted({**dict.fromkeys(EVENTS, 0), **events}.items())
        },
        "connections": {(): connections},
    }
    lines = [
        line
        for name, metric in METRICS.items()
        for line in family(PREFIX + name, metric.kind, metric.help, metric.labels, values[name])
    ]
    return "\n".join([*lines, *process, ""])


def process_lines() -> list[str]:
    """The process that the registry runs in, by the names that Prometheus' own clients have."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    figures = (
        ("cpu_seconds_total", "counter", "CPU time.", usage.ru_utime + usage.ru_stime),
        ("resident_memory_bytes", "gauge", "Resident memory.", pages * resource.getpagesize()),
        (
            "open_fds",
            "gauge",
            "Open file descriptors.",
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
        ),
    )
    return [
        line
        for name, kind, what, value in figures
        for line in family(f"process_{name}", kind, what, (), {(): value})
    ]
