# SPDX-License-Identifier: Apache-2.0
"""The demo's command line. A bad argument is answered with one sentence and exit status 2."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from cpu_serving.model import ARCHITECTURES, HEADS, MAX_POSITIONS
from cpu_serving.traffic import NEW_TOKENS

__all__ = ["DemoOptions", "parse"]


@dataclass(frozen=True)
class DemoOptions:
    requests: int
    concurrency: int
    prefill_tp: int
    decode_tp: int
    dp_attention: bool
    page_size: int
    chunked_prefill_size: int | None
    model: str
    max_prompt_tokens: int
    seed: int
    keep: bool
    json: bool

    @property
    def layout(self) -> str:
        dp = " with DP attention" if self.dp_attention else ""
        chunks = f", chunks of {self.chunked_prefill_size}" if self.chunked_prefill_size else ""
        return (
            f"{self.model}: prefill tp{self.prefill_tp} -> decode tp{self.decode_tp}{dp}, "
            f"page size {self.page_size}{chunks}"
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: {message} (--help lists the options)\n")


def parse(argv: Sequence[str]) -> DemoOptions:
    parser = _build_parser()
    args = parser.parse_args(argv)
    default_tp = 2 if args.dp_attention else 1
    options = DemoOptions(
        requests=args.requests,
        concurrency=args.concurrency,
        prefill_tp=args.prefill_tp or default_tp,
        decode_tp=args.decode_tp or default_tp,
        dp_attention=args.dp_attention,
        page_size=args.page_size,
        chunked_prefill_size=args.chunked_prefill_size,
        model=args.model or ("qwen3" if args.dp_attention else "llama"),
        max_prompt_tokens=args.max_prompt_tokens,
        seed=args.seed,
        keep=args.keep,
        json=args.json,
    )
    problem = _problem(options)
    if problem:
        parser.error(problem)
    return options


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scripts/demo",
        description="One ordinary SGLang server against prefill + decode + router through this "
        "project, all on the CPU with a tiny model: are the tokens equal?",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--requests", type=_positive, default=50, metavar="N", help="how many (50)")
    add("--concurrency", type=_positive, default=16, metavar="C", help="how many at a time (16)")
    add("--prefill-tp", type=_positive, metavar="T", help="ranks of the prefill server (1)")
    add("--decode-tp", type=_positive, metavar="T", help="ranks of the decode server (1)")
    add("--dp-attention", action="store_true", help="DP attention over the ranks of both (2 each)")
    add("--page-size", type=_positive, default=1, metavar="P", help="tokens per KV page (1)")
    add("--chunked-prefill-size", type=_positive, metavar="N", help="prefill in chunks of N tokens")
    add(
        "--model", choices=sorted(ARCHITECTURES), help="tiny model (llama; qwen3 with DP attention)"
    )
    add(
        "--max-prompt-tokens",
        type=_positive,
        default=1500,
        metavar="N",
        help="longest prompt (1500)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add("--keep", action="store_true", help="leave the servers up until Ctrl-C")
    add("--json", action="store_true", help="last line of stdout is one JSON object")
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _problem(options: DemoOptions) -> str | None:
    for flag, tp in (("--prefill-tp", options.prefill_tp), ("--decode-tp", options.decode_tp)):
        if HEADS % tp:
            return f"{flag} {tp}: the tiny models have {HEADS} heads, which {tp} ranks cannot share"
    if options.dp_attention and options.model == "llama":
        return "--dp-attention: SGLang has it for qwen3 and deepseek, not for llama"
    if options.dp_attention and min(options.prefill_tp, options.decode_tp) < 2:
        return "--dp-attention needs at least 2 ranks on each server (--prefill-tp, --decode-tp)"
    longest = MAX_POSITIONS - NEW_TOKENS
    if options.max_prompt_tokens > longest:
        return f"--max-prompt-tokens {options.max_prompt_tokens}: the tiny models hold {longest}"
    if options.chunked_prefill_size and options.chunked_prefill_size % options.page_size:
        return (
            f"--chunked-prefill-size {options.chunked_prefill_size} is no multiple of "
            f"--page-size {options.page_size}"
        )
    if options.seed < 0:
        return f"--seed {options.seed} is negative"
    return None
