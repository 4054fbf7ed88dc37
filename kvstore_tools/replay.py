# SPDX-License-Identifier: Apache-2.0
"""How many blocks of recorded requests a cache would have had, and how long they would have waited
for their first token: ``kvstore replay``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvstore.memory.policies import POLICIES
from kvstore_tools import first_token
from kvstore_tools.traces import BLOCK_TOKENS, BlockCache, Request, read_trace

__all__ = [
    "DESCRIPTION",
    "Hits",
    "add_arguments",
    "replay",
    "run",
    "table",
]

DESCRIPTION: Final = (
    "Replays a trace against one cache for all requests, with each policy and capacity. A block is"
    " hit if it and all blocks before it in its request are cached. What is not cached is stored,"
    " and the policy says what goes for it. With --ttft: simulates prefill instances that compute"
    " what their caches, or a pool of all caches, do not have, and how long requests wait for their"
    " first token."
)
CAPACITIES: Final = (1_000, 3_000, 5_859, 10_000, 20_000, 50_000, 97_656)
"""0.5 to 50 million tokens."""


@dataclass(frozen=True)
class Hits:
    """What one policy has achieved with one capacity."""

    policy: str
    #: In blocks.
    capacity: int
    blocks: int
    hit_blocks: int

    @property
    def ratio(self) -> float:
        """Hit blocks of all."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


def replay(requests: Sequence[Request], policy: str, capacity: int) -> Hits:
    """One cache of ``capacity`` blocks, empty at the begin."""
    cache = BlockCache(policy, capacity)
    blocks = hit_blocks = 0
    for request in requests:
        blocks += len(request.hash_ids)
        hit_blocks += cache.run(request.hash_ids)
        cache.use(request.hash_ids)
    return Hits(policy, capacity, blocks, hit_blocks)


def table(found: Sequence[Hits]) -> str:
    """A row for each policy, a column for each capacity, and what no cache can exceed."""
    capacities = sorted({one.capacity for one in found})
    width = max(len(one.policy) for one in found)
    head = "Mtokens".ljust(max(width, 7)) + "".join(
        f"{one * BLOCK_TOKENS / 1e6:9.3g}" for one in capacities
    )
    lines = [head]
    for policy in dict.fromkeys(one.policy for one in found):
        ratios = {one.capacity: one.ratio for one in found if one.policy == policy}
        cells = "".join(f"{ratios[one]:9.4f}" for one in capacities)
        lines.append(policy.ljust(max(width, 7)) + cells)
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the subcommand."""
    parser.add_argument("trace", type=Path, help="JSON lines, as of the FAST'25 paper's traces")
    parser.add_argument(
        "--policy",
        default=",".join(sorted(POLICIES)),
        help="policies, separated by commas (default: all)",
    )
    parser.add_argument(
        "--capacity",
        default=",".join(map(str, CAPACITIES)),
        help=f"blocks of {BLOCK_TOKENS} tokens, separated by commas",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    first_token.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """The exit status; ``ValueError``, ``OSError``."""
    policies = options.policy.split(",")
    unknown = sorted(set(policies) - set(POLICIES))
    if unknown:
        raise ValueError(f"--policy: {unknown} are none of {', '.join(sorted(POLICIES))}")
    capacities = [int(one) if one.isdecimal() else 0 for one in options.capacity.split(",")]
    if min(capacities) < 1:
        raise ValueError(f"--capacity {options.capacity}: give positive whole numbers of blocks")
    if options.ttft:
        return first_token.run(options)
    requests = read_trace(options.trace)
    found = [replay(requests, policy, one) for policy in policies for one in capacities]
    if options.json:
        text = json.dumps([asdict(one) | {"ratio": one.ratio} for one in found])
    else:
        ideal = replay(requests, policies[0], 1 << 62)
        text = f"{table(found)}\nwithout a limit: {ideal.ratio:.4f} of {ideal.blocks} blocks"
    print(text)  # noqa: T201
    return 0
