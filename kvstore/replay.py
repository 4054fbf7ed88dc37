# SPDX-License-Identifier: Apache-2.0
"""How many blocks of recorded requests a cache would have had: ``kvstore replay``.

Traces are those of the FAST'25 paper on Mooncake (JSON lines with ``timestamp`` in ms,
``input_length``, ``output_length`` and ``hash_ids``: a number for each block of 512 tokens, which
stands for the block and all before it).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvstore.policies import POLICIES, Policy

__all__ = [
    "DESCRIPTION",
    "Hits",
    "Request",
    "add_arguments",
    "read_trace",
    "replay",
    "run",
    "table",
]

DESCRIPTION: Final = (
    "Replays a trace against one cache for all requests, with each policy and capacity. A block is"
    " hit if it and all blocks before it in its request are cached. What is not cached is stored,"
    " and the policy says what goes for it."
)
BLOCK_TOKENS: Final = 512
CAPACITIES: Final = (1_000, 3_000, 5_859, 10_000, 20_000, 50_000, 97_656)
"""0.5 to 50 million tokens."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True):
    """A line of a trace."""

    #: Of its arrival, in ms since the trace's begin.
    timestamp: Count
    input_length: Count
    output_length: Count
    hash_ids: list[Count]


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


def read_trace(path: Path) -> list[Request]:
    """``ValueError`` names the line that is none; ``OSError``."""
    decoder = msgspec.json.Decoder(Request)
    requests: list[Request] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                requests.append(decoder.decode(line))
            except msgspec.DecodeError as exc:
                raise ValueError(f"{path}, line {number}: {exc}") from exc
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


def replay(requests: Sequence[Request], policy: str, capacity: int) -> Hits:
    """One cache of ``capacity`` blocks, empty at the begin."""
    chosen = POLICIES[policy]()
    stored: set[int] = set()
    blocks = hit_blocks = 0
    for request in requests:
        is_run = True
        for block in request.hash_ids:
            blocks += 1
            if block in stored:
                hit_blocks += is_run
                chosen.touch(_key(block))
            else:
                is_run = False
                if len(stored) >= capacity:
                    _evict(chosen, stored)
                chosen.add(_key(block))
                stored.add(block)
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


def run(options: argparse.Namespace) -> int:
    """The exit status; ``ValueError``, ``OSError``."""
    policies = options.policy.split(",")
    unknown = sorted(set(policies) - set(POLICIES))
    if unknown:
        raise ValueError(f"--policy: {unknown} are none of {', '.join(sorted(POLICIES))}")
    capacities = [int(one) if one.isdecimal() else 0 for one in options.capacity.split(",")]
    if min(capacities) < 1:
        raise ValueError(f"--capacity {options.capacity}: give positive whole numbers of blocks")
    requests = read_trace(options.trace)
    found = [replay(requests, policy, one) for policy in policies for one in capacities]
    if options.json:
        text = json.dumps([asdict(one) | {"ratio": one.ratio} for one in found])
    else:
        ideal = replay(requests, policies[0], 1 << 62)
        text = f"{table(found)}\nwithout a limit: {ideal.ratio:.4f} of {ideal.blocks} blocks"
    print(text)  # noqa: T201
    return 0


def _key(block: int) -> bytes:
    return block.to_bytes(8, "little")


def _evict(policy: Policy, stored: set[int]) -> None:
    victim = policy.evict()
    if victim is not None:
        stored.discard(int.from_bytes(victim, "little"))
