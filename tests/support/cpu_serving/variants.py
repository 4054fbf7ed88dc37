# SPDX-License-Identifier: Apache-2.0
"""The command lines of what `scripts/demo` shows besides: `--store`, `--store-hits` and `--vllm`.
Standard library alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from command_line import Parser

from cpu_serving.architectures import HEADS

__all__ = ["VARIANTS", "parse_hits", "parse_store", "parse_vllm"]


def parse_store(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "scripts/demo --store",
        "Two SGLang servers that share their prefix caches through the store, on the "
        "CPU with a small model: are the tokens equal, and how long does the first one take?",
    )
    add = parser.add_argument
    add("--requests", type=int, default=8, metavar="N", help="how many, one at a time (8)")
    add("--prompt", type=int, default=1500, metavar="N", help="tokens of each prompt (1500)")
    add("--layers", type=int, default=8, metavar="N", help="of the model (8)")
    add("--hidden", type=int, default=512, metavar="N", help="its width (512)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add("--json", action="store_true", help="last line of stdout is one JSON array")
    return parser.parse_args(argv)


def parse_hits(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "scripts/demo --store-hits",
        "Many requests at once, on the CPU with a small model: computed in a first "
        "round, from the store in a second one, in several pairs of rounds. The defaults are an "
        "eighth of the published experiment's lengths.",
    )
    add = parser.add_argument
    add("--requests", type=int, default=50, metavar="N", help="of a round, all at once (50)")
    add("--prompt", type=int, default=1216, metavar="N", help="tokens of each prompt (1216)")
    add("--new-tokens", type=int, default=8, metavar="N", help="that each request makes (8)")
    add("--rounds", type=int, default=3, metavar="N", help="pairs of rounds (3)")
    add("--layers", type=int, default=4, metavar="N", help="of the model (4)")
    add("--hidden", type=int, default=512, metavar="N", help="its width (512)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add("--json", action="store_true", help="last line of stdout is one JSON object")
    return parser.parse_args(argv)


def parse_vllm(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "scripts/demo --vllm",
        "Two vLLM servers that share their prefix caches through the store, and a"
        " prefill and a decode server behind a proxy, on the CPU with a tiny model: are the tokens"
        " those of an ordinary server, and does the KV cache come from the store, or from the"
        " prefill server?",
    )
    add = parser.add_argument
    add("--requests", type=int, default=8, metavar="N", help="how many, all at once (8)")
    add("--prompt", type=int, default=700, metavar="N", help="tokens of the longest prompt (700)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts (0)")
    add("--prefill-tp", type=int, default=1, metavar="T", help="TP ranks of the prefill server (1)")
    add("--decode-tp", type=int, default=1, metavar="T", help="TP ranks of the decode server (1)")
    add(
        "--store-tp", type=int, default=1, metavar="T", help="those of the servers on the store (1)"
    )
    add("--only", choices=("store", "pair"), help="show the store, or prefill and decode, alone")
    add(
        "--connector",
        choices=("pd", "nixl", "nixl-push"),
        default="pd",
        help="between prefill and decode: this package's, or one of vLLM's of NIXL, over te (pd)",
    )
    add(
        "--release-at",
        type=Path,
        metavar="FOLDER",
        help="where another release of vLLM lies, without what it needs (pip install --no-deps"
        " --target); scripts/vllm-releases makes such folders",
    )
    add("--json", action="store_true", help="last line of stdout is one JSON array")
    options = parser.parse_args(argv)
    for flag in ("--prefill-tp", "--decode-tp", "--store-tp"):
        ranks = vars(options)[flag[2:].replace("-", "_")]
        if ranks < 1 or HEADS % ranks:
            parser.error(f"{flag} {ranks}: the tiny model has {HEADS} heads to be shared equally")
    return options


VARIANTS: Final[Mapping[str, Callable[[Sequence[str]], argparse.Namespace]]] = {
    "--store": parse_store,
    "--store-hits": parse_hits,
    "--vllm": parse_vllm,
}
