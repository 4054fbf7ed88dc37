# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/ttft`. A bad argument is answered with one sentence and status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import Parser, count, made, natural, some_of
from cpu_serving.architectures import NEW_TOKENS, LlamaSize

from ttft_bench.rates import Rate, parse_rate
from ttft_bench.results import KINDS, Kind

__all__ = ["TtftOptions", "parse"]

DEFAULT_PROMPTS = (1024, 4096)
DEFAULT_RATES = ("200mbit", "1:1", "unlimited")
MIN_PROMPT, MAX_PROMPT = 16, 32_768
# One thread of a processor of 2022 computes 0.9 to 1.2 ms a token with it, for 32 KiB of KV: about
# 1:1 at 250 Mbit/s.
DEFAULT_MODEL = {"layers": 16, "hidden": 256, "intermediate": 1024, "heads": 8}


@dataclass(frozen=True)
class TtftOptions:
    prompts: tuple[int, ...]
    rates: tuple[Rate, ...]
    kinds: tuple[Kind, ...]
    rounds: int
    seed: int
    model: LlamaSize
    page_size: int
    chunked_prefill_size: int | None
    #: Before each round, for others to leave the processors.
    wait_for_quiet_s: float
    json: Path | None
    plot: Path | None


def parse(argv: Sequence[str]) -> TtftOptions:
    parser = _build_parser()
    args = parser.parse_args(argv)
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is no multiple of --heads {args.heads}")
    if (args.hidden // args.heads) % 2:
        parser.error(f"--hidden {args.hidden} / --heads {args.heads} is odd: rotary needs pairs")
    chunk = args.chunked_prefill_size
    if chunk is not None and chunk % args.page_size:
        parser.error(f"--chunked-prefill-size {chunk} is no multiple of --page-size")
    size = LlamaSize(
        layers=args.layers,
        hidden=args.hidden,
        intermediate=args.intermediate,
        heads=args.heads,
        head_dim=args.hidden // args.heads,
        positions=max(args.prompts) + NEW_TOKENS,
    )
    return made(TtftOptions, args, model=size)


def _build_parser() -> Parser:
    parser = Parser(
        "scripts/ttft",
        "Time to first token of one ordinary SGLang server, of PD, and of PD whose KV "
        "leaves layer by layer, in one run and alternated, over a network with a limited rate. All "
        "on the CPU, in network namespaces of its own. Needs root.",
    )
    add = parser.add_argument
    prompts, rates = ",".join(map(str, DEFAULT_PROMPTS)), ",".join(DEFAULT_RATES)
    add(
        "--prompt",
        dest="prompts",
        type=_prompts,
        default=prompts,
        metavar="N,…",
        help=f"tokens ({prompts})",
    )
    add(
        "--rate",
        dest="rates",
        type=_rates,
        default=rates,
        metavar="R,…",
        help="what prefill may send: 50mbit, 1gbit, unlimited, or 1:1, which is for each prompt the"
        f" rate at which its KV takes as long as its prefill ({rates})",
    )
    add(
        "--kinds",
        type=some_of(KINDS),
        default=",".join(KINDS),
        metavar="K,…",
        help=f"which of {', '.join(KINDS)}: one server, PD, PD by layers (all)",
    )
    add("--rounds", type=count, default=5, metavar="N", help="requests of each kind (5)")
    add("--seed", type=natural, default=0, metavar="N", help="of the prompts (0)")
    for name, default in DEFAULT_MODEL.items():
        add(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"model ({default})",
        )
    add("--page-size", type=count, default=16, metavar="P", help="tokens per KV page (16)")
    add(
        "--chunked-prefill-size",
        type=count,
        metavar="N",
        help="prefill in chunks of N tokens (each prompt at once)",
    )
    add(
        "--wait-for-quiet",
        dest="wait_for_quiet_s",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to S seconds before each round while others use the processors (0)",
    )
    add("--json", type=Path, metavar="FILE", help="write everything, every request included")
    add("--plot", type=Path, metavar="FILE.svg", help="draw it")
    return parser


def _prompts(text: str) -> tuple[int, ...]:
    lengths = tuple(count(part) for part in text.split(","))
    for length in lengths:
        if not MIN_PROMPT <= length <= MAX_PROMPT:
            raise argparse.ArgumentTypeError(f"{length} is not from {MIN_PROMPT} to {MAX_PROMPT}")
    return tuple(sorted(set(lengths)))


def _rates(text: str) -> tuple[Rate, ...]:
    try:
        return tuple(dict.fromkeys(parse_rate(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    parse(sys.argv[1:])
