# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/route-bench`. A bad argument is answered with one sentence and
status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from command_line import Parser, count, made, positive, some_of

__all__ = ["WAYS", "BenchOptions", "Way", "parse"]

Way: TypeAlias = Literal["mini-lb", "cache_aware", "ours", "ours+store"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)


@dataclass(frozen=True)
class BenchOptions:
    #: Each is a load; none: those that this repository has.
    traces: tuple[Path, ...]
    ways: tuple[Way, ...]
    requests: int
    rounds: int
    #: What prompts would keep busy if nothing were cached, in times the processors.
    load: float
    #: Tokens that stand for a block of the trace, and the longest prompt.
    block_tokens: int
    prompt_max: int
    prefill: int
    decode: int
    #: Prompts of each load whose tokens are compared with those of one ordinary server.
    compared: int
    layers: int
    hidden: int
    seed: int
    json: Path | None


def parse(argv: Sequence[str]) -> BenchOptions:
    parser = _build_parser()
    args = parser.parse_args(argv)
    for path in args.traces:
        if not path.is_file():
            parser.error(f"{path} is no file: give traces as of the FAST'25 paper on Mooncake")
    if args.block_tokens % 16:
        parser.error(f"--block-tokens {args.block_tokens} is no multiple of a page (16)")
    if args.hidden % 64:
        parser.error(f"--hidden {args.hidden} is no multiple of 64, the size of a head")
    return made(BenchOptions, args, traces=tuple(args.traces))


def _build_parser() -> Parser:
    parser = Parser(
        "scripts/route-bench",
        "Times to first token and cache hits of real SGLang servers on the CPU, several for "
        "prefill and one or more for decode, behind SGLang's mini-lb, its router in Rust "
        "(cache_aware), and this project's router without and with the store: the same load, one "
        "way after the other, in rounds. Loads are requests of recorded traces, made smaller and "
        "faster.",
    )
    add = parser.add_argument
    add(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="JSON lines as of the FAST'25 paper. Without one both that tests/kvstore/data has: "
        "conversation_trace has many turns, synthetic_trace shared documents",
    )
    add(
        "--ways",
        type=some_of(WAYS),
        default=",".join(WAYS),
        metavar="W,…",
        help=f"which of {', '.join(WAYS)} (all)",
    )
    whole: list[tuple[str, int, str]] = [
        ("--requests", 120, "of each load and round"),
        ("--rounds", 2, "in which each way has its turn"),
        ("--block-tokens", 32, "tokens for a block of 512 of the trace"),
        ("--prompt-max", 3072, "tokens of the longest prompt; longer ones are cut"),
        ("--prefill", 3, "prefill servers"),
        ("--decode", 1, "decode servers"),
        ("--compared", 16, "prompts that one ordinary server computes, too, for each load"),
        ("--layers", 8, "of the model"),
        ("--hidden", 256, "of the model"),
        ("--seed", 1, "of the prompts and of the choice among the trace's requests"),
    ]
    for name, default, text in whole:
        add(name, type=count, default=default, metavar="N", help=f"{text} ({default})")
    add(
        "--load",
        type=positive,
        default=0.8,
        metavar="X",
        help="computing that the prompts would ask for without a cache, in times the processors"
        " (0.8)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything, every request included")
    return parser


if __name__ == "__main__":
    parse(sys.argv[1:])
