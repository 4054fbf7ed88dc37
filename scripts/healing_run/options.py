# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/healing`. A bad argument gets a sentence and status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import Parser, some_of

from healing_run.rows import NAMES

__all__ = ["HealingOptions", "parse"]


@dataclass(frozen=True)
class HealingOptions:
    #: True inside scripts/rdma-testbed, on its devices; else TCP between network namespaces.
    rdma: bool
    #: Of rows.
    names: tuple[str, ...]
    repeat: int
    json: Path | None


def parse(argv: Sequence[str]) -> HealingOptions:
    parser = Parser(
        "scripts/healing",
        "Small transfers go from one process to another all the time, while the link between them"
        " is cut, a NIC dies or the peer is started again; a line for each says when bytes flowed"
        " again and what it cost transfers. Over TCP between two network namespaces (needs root),"
        " or with --rdma over soft RDMA devices in scripts/rdma-testbed.",
    )
    add = parser.add_argument
    add("--rdma", action="store_true", help="on soft RDMA devices, two rails from NIC to NIC")
    names = f"{', '.join(NAMES)} (all that the place can have)"
    add("--rows", type=some_of(NAMES), default=NAMES, metavar="R,…", help=names)
    add("--repeat", type=int, default=3, metavar="N", help="times each; medians and worst (3)")
    add("--json", type=Path, metavar="FILE", help="write every figure")
    args = parser.parse_args(argv)
    if not 1 <= args.repeat <= 100:
        parser.error(f"--repeat {args.repeat} is not from 1 to 100")
    return HealingOptions(args.rdma, args.rows, args.repeat, args.json)


if __name__ == "__main__":
    parse(sys.argv[1:])
