# SPDX-License-Identifier: Apache-2.0
"""`kvstore replay --ttft`: clusters that are simulated one beside the other."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore_tools.decoding import Decoding
from kvstore_tools.simulation import IN_TIME, Cluster, Limits, Outcome, Rates, capacity, simulate
from kvstore_tools.traces import BLOCK_TOKENS, Request, read_trace

__all__ = ["Row", "add_arguments", "rows", "run", "table", "ways"]


def ways(limit_s: float) -> dict[str, Mapping[str, Any]]:
    """Name → what differs from the cluster of the options. ``limit_s``: of the routers that refuse
    what would be late."""
    limited = {"routing": "router", "limit_s": limit_s}
    return {
        "no cache": {"blocks_each": 0},
        "own caches, random": {"routing": "random"},
        "own caches, balanced": {},
        "own caches, SGLang's router": {"routing": "sglang"},
        "own caches, cache-aware": {"routing": "aware"},
        "own caches, our router": {"routing": "router"},
        "own caches, our router with a limit": limited,
        "pool, balanced": {"pooled": True},
        "pool, cache-aware": {"pooled": True, "routing": "aware"},
        "pool, our router": {"pooled": True, "routing": "router"},
        "pool, our router with a limit": {"pooled": True, **limited},
    }


@dataclass(frozen=True)
class Row:
    """One cluster."""

    name: str
    hit_ratio: float
    #: Seconds for which instances computed, and the same in times what it is without a cache.
    compute_s: float
    compute_ratio: float
    mean_s: float
    p50_s: float
    p90_s: float
    #: Between tokens.
    gap_p90_s: float
    #: Median error of the expected times to the first token; None: nothing is expected.
    error: float | None
    #: Part of the requests.
    refused: float
    #: Arrival rate at which the limit is still kept, in times the trace's; None: not asked for.
    capacity: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the subcommand."""
    cluster, rates, decoding = Cluster(), Rates(), Decoding()
    group = parser.add_argument_group("simulation of times to the first token")
    add = group.add_argument
    add("--ttft", action="store_true", help="simulate instances instead of one cache")
    add("--instances", type=int, default=cluster.instances, help="how many compute prompts (10)")
    add(
        "--blocks-each",
        type=int,
        default=cluster.blocks_each,
        help=f"blocks of {BLOCK_TOKENS} tokens that each has memory for (5859: 3 million tokens)",
    )
    add("--token-us", type=float, default=rates.token_s * 1e6, help="computing a token (112)")
    add(
        "--pair-ns",
        type=float,
        default=rates.pair_s * 1e9,
        help="attention of a token to one before it (2.1)",
    )
    add(
        "--kv-bytes",
        type=int,
        default=rates.kv_bytes_per_token,
        help="of a token's KV cache (327680)",
    )
    add("--gbit", type=float, default=200.0, help="network into each instance, Gbit/s (200)")
    add(
        "--jitter",
        type=float,
        default=cluster.jitter,
        help="by what part computing takes longer or shorter than calculated, by chance (0)",
    )
    add(
        "--limit-s",
        type=float,
        default=30.0,
        help="for the first token: of --capacity-at-limit, and of routers that refuse what would be"
        " late (30)",
    )
    add("--decoders", type=int, default=decoding.instances, help="how many make tokens (10)")
    add(
        "--tbt-limit-ms",
        type=float,
        default=100.0,
        help="of --capacity-at-limit: for the time between the tokens of a request (100)",
    )
    add(
        "--capacity-at-limit",
        action="store_true",
        help=f"also look for the arrival rate at which {100 * IN_TIME:.0f} of 100 requests keep"
        " both limits (takes three minutes)",
    )


def run(options: argparse.Namespace) -> int:
    """The exit status; ``ValueError``, ``OSError``."""
    cluster = _cluster(options)
    requests = read_trace(options.trace)
    limits = Limits(options.limit_s, options.tbt_limit_ms / 1e3)
    found = rows(requests, cluster, limits, capacities=options.capacity_at_limit)
    if options.json:
        print(json.dumps([_jsonable(one) for one in found]))  # noqa: T201
    else:
        print(table(found))  # noqa: T201
    return 0


def rows(
    requests: Sequence[Request], cluster: Cluster, limits: Limits, *, capacities: bool = False
) -> list[Row]:
    """All of ``ways``; with ``capacities`` also how much each bears within the limits."""
    found: list[Row] = []
    least: float | None = None
    for name, differs in ways(limits.first_s).items():
        one = replace(cluster, **differs)
        outcome = simulate(requests, one)
        least = outcome.compute_s if least is None else least
        holds = capacity(requests, one, limits) if capacities else None
        found.append(_row(name, outcome, least, holds))
    return found


def table(found: Sequence[Row]) -> str:
    """A line for each cluster."""
    head = (
        f"{'':36}{'hits':>7}{'computing':>13}{'ratio':>7}{'TTFT mean':>11}{'p50':>9}{'p90':>9}"
        f"{'TBT p90':>10}{'error':>8}{'refused':>9}"
    )
    lines = [head + ("" if found[0].capacity is None else f"{'capacity':>10}")]
    for one in found:
        error = "-" if one.error is None else f"{one.error:.1%}"
        line = (
            f"{one.name:36}{one.hit_ratio:7.1%}{one.compute_s:11.0f} s{one.compute_ratio:7.2f}"
            f"{one.mean_s:9.2f} s{one.p50_s:7.2f} s{one.p90_s:7.2f} s"
            f"{one.gap_p90_s * 1e3:7.1f} ms{error:>8}{one.refused:9.1%}"
        )
        lines.append(line + ("" if one.capacity is None else f"{one.capacity:9.2f}x"))
    return "\n".join(lines)


def _row(name: str, outcome: Outcome, without_s: float, holds: float | None) -> Row:
    return Row(
        name,
        outcome.hit_ratio,
        outcome.compute_s,
        outcome.compute_s / without_s if without_s else 0.0,
        outcome.mean_s,
        outcome.percentile_s(0.5),
        outcome.percentile_s(0.9),
        outcome.gap_s(0.9),
        outcome.error,
        outcome.refused / len(outcome.ttft_s),
        holds,
    )


_POSITIVE: Final = (
    "instances",
    "blocks_each",
    "kv_bytes",
    "gbit",
    "limit_s",
    "tbt_limit_ms",
    "decoders",
)


def _cluster(options: argparse.Namespace) -> Cluster:
    """``ValueError`` names the option that is out of range."""
    for name in _POSITIVE:
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a positive number")
    for name in ("token_us", "pair_ns", "jitter"):
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number, 0 or more")
    rates = Rates(
        options.token_us / 1e6, options.pair_ns / 1e9, options.kv_bytes, options.gbit * 1e9 / 8
    )
    policies = options.policy.split(",")
    policy = policies[0] if len(policies) == 1 else Cluster().policy
    return Cluster(
        options.instances,
        options.blocks_each,
        policy=policy,
        jitter=options.jitter,
        rates=rates,
        decoding=Decoding(options.decoders),
    )


def _jsonable(one: Row) -> dict[str, Any]:
    """JSON has no infinity: a capacity that no rate of those looked at has exceeded is null."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in vars(one).items()
    }
