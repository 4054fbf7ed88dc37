# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/soak`. A bad argument is answered with a sentence and status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from command_line import Parser, positive, some_of

__all__ = ["SCENARIOS", "SoakOptions", "parse"]

#: By name, what happens meanwhile.
SCENARIOS: Final[Mapping[str, str]] = {
    "lora": "an adapter is trained again in place, and the server that has it started again",
    "update": "a running server's weights are updated from a disk, with a version and without",
    "slow-rank": "of two TP ranks one is slow, and drops what it has no time to store",
    "frozen": "the owner of the server's host stands still, and goes on",
    "frozen-tcp": "the same with six owners of other hosts, which are read over TCP",
    "owner-dies": "the owner that two servers of a host share is killed, each 20 s",
    "firewall": "of an owner's two ports a firewall lets one through, then the other one",
    "kills": "a prefill server is killed while 50 rooms wait for it, each 15 s, twice at least",
    "strangers": "many attack all ports of a prefill and a decode server, and of an owner",
    "strangers-secret": "the same, where the servers have a secret",
}


@dataclass(frozen=True)
class SoakOptions:
    scenarios: tuple[str, ...]
    #: Of load in each scenario, beside what its servers take to start.
    minutes: float
    #: Requests under way at a time.
    clients: int
    #: A request that has not ended by then hangs.
    deadline_s: float
    seed: int
    json: Path | None


def parse(argv: Sequence[str]) -> SoakOptions:
    parser = Parser(
        "scripts/soak",
        "SGLang servers on the CPU with a tiny model, most of them on the store, asked for what has"
        " known answers while what they share changes or fails, or somebody attacks them. Exit"
        " status 0: no wrong token, no request that hangs, or failed and need not, no put or get"
        " beyond its deadline, and nothing that is left behind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scenarios:\n" + "\n".join(f"  {n:16} {what}" for n, what in SCENARIOS.items()),
    )
    add = parser.add_argument
    add(
        "--scenario",
        type=some_of(SCENARIOS),
        metavar="S,…",
        help="which ones, of those below (all)",
    )
    add("--minutes", type=positive, default=5.0, metavar="M", help="of load in each (5)")
    add("--clients", type=int, default=4, metavar="N", help="requests under way at a time (4)")
    add("--deadline", type=positive, default=60.0, metavar="S", help="of each request (60)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add("--json", type=Path, metavar="FILE", help="write the table's figures")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed {args.seed} is negative")
    if not 1 <= args.clients <= 32:
        parser.error(f"--clients {args.clients} is not from 1 to 32")
    return SoakOptions(
        scenarios=args.scenario or tuple(SCENARIOS),
        minutes=args.minutes,
        clients=args.clients,
        deadline_s=args.deadline,
        seed=args.seed,
        json=args.json,
    )


if __name__ == "__main__":
    parse(sys.argv[1:])
