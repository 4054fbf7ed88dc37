# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/nixl-beside`. A bad argument gets a sentence and status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import Parser, count, made, positive, some_of

from nixl_beside.rows import CONTENDERS, ROWS

__all__ = ["BesideOptions", "parse"]


@dataclass(frozen=True)
class BesideOptions:
    rows: tuple[str, ...]
    contenders: tuple[str, ...]
    #: Of what is measured in turn.
    rounds: int
    #: After each severing.
    requests: int
    #: How long a transfer or an answer is waited for that may never come.
    patience_s: float
    connector: str
    json: Path | None


def parse(argv: Sequence[str]) -> BesideOptions:
    parser = Parser(
        "scripts/nixl-beside",
        "Programs written for NIXL on this package and on NVIDIA's NIXL, over TCP on this machine:"
        " agents in two processes, and a prefill and a decode server of vLLM on the CPU, that are"
        " stopped, killed and cut off from each other; and how fast both are, in turn.",
    )
    add = parser.add_argument
    for flag, names in (("--rows", ROWS), ("--contenders", CONTENDERS)):
        some = f"some of {', '.join(names)} (all)"
        add(flag, type=some_of(names), default=tuple(names), metavar="N,…", help=some)
    add("--rounds", type=count, default=10, metavar="N", help="of what is measured in turn (10)")
    add("--requests", type=count, default=20, metavar="N", help="after each severing (20)")
    add(
        "--patience",
        dest="patience_s",
        type=positive,
        default=30.0,
        metavar="S",
        help="wait S seconds for what may never come (30)",
    )
    add(
        "--connector",
        choices=("NixlConnector", "NixlPushConnector"),
        default="NixlConnector",
        help="of vLLM (NixlConnector)",
    )
    add("--json", type=Path, metavar="FILE", help="write every figure")
    return made(BesideOptions, parser.parse_args(argv))


if __name__ == "__main__":
    parse(sys.argv[1:])
