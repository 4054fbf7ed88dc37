# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/chaos`. A bad argument is answered with a sentence and status 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import Parser, made, natural, positive, some_of

from chaos_run.backends import BACKENDS, Backend
from chaos_run.schedule import KINDS, SHARED, Kind

__all__ = ["ChaosOptions", "parse"]


@dataclass(frozen=True)
class ChaosOptions:
    minutes: float
    seed: int
    kinds: tuple[Kind, ...]
    #: Of each fault, in place of what the seed says.
    lasts_s: float | None
    clients: int
    #: Of requests, the share whose client leaves before the answer is whole.
    abort_share: float
    #: Until then each request has ended, whatever happens.
    deadline_s: float
    layerwise: bool
    #: A secret is made for all servers.
    secret: bool
    #: None: our own, with all that can happen to it. Else one of a comparison.
    backend: Backend | None
    json: Path | None
    plot: Path | None


def parse(argv: Sequence[str]) -> ChaosOptions:
    parser = Parser(
        "scripts/chaos",
        "Two prefill and two decode SGLang servers, each a host of its own in a "
        "network namespace, and SGLang's mini-lb. Clients ask what has known answers, some leave "
        "early, and faults come one after another. All on the CPU. Needs root.",
    )
    add = parser.add_argument
    add("--minutes", type=positive, default=3.0, metavar="M", help="of traffic with faults (3)")
    add("--seed", type=natural, default=0, metavar="N", help="of prompts, aborts and faults (0)")
    add(
        "--kinds",
        type=_kinds,
        metavar="K,…",
        help=f"which faults, of {', '.join(KINDS)} (all; intruder with --secret alone); or none,"
        " to see whether anything grows",
    )
    add(
        "--lasts",
        dest="lasts_s",
        type=positive,
        metavar="S",
        help="how long each fault lasts (as the seed says)",
    )
    add("--clients", type=int, default=10, metavar="N", help="requests under way at a time (10)")
    add(
        "--aborts",
        dest="abort_share",
        type=_share,
        default=0.2,
        metavar="F",
        help="share of clients that leave (0.2)",
    )
    add(
        "--deadline",
        dest="deadline_s",
        type=positive,
        default=60.0,
        metavar="S",
        help="of each request (60)",
    )
    add(
        "--backend",
        choices=BACKENDS,
        metavar="B",
        help=f"whose hand-over, for a comparison: {', '.join(BACKENDS)}. Faults are those that mean"
        f" the same for each ({', '.join(SHARED)}): one seed is one schedule. A fleet that a fault"
        " leaves dead is started again, and counted",
    )
    add("--layerwise", action="store_true", help="KV leaves layer by layer")
    add("--secret", action="store_true", help="the servers have a secret in common")
    add("--json", type=Path, metavar="FILE", help="write everything, every request included")
    add("--plot", type=Path, metavar="FILE.svg", help="draw requests and faults over time")
    args = parser.parse_args(argv)
    if not 1 <= args.clients <= 64:
        parser.error(f"--clients {args.clients} is not from 1 to 64")
    if args.kinds is not None and "intruder" in args.kinds and not args.secret:
        parser.error("--kinds intruder is somebody with another secret: give --secret")
    if args.backend is not None:
        _check_comparison(parser, args)
    if args.kinds is None:
        args.kinds = _default_kinds(args)
    return made(ChaosOptions, args)


def _check_comparison(parser: Parser, args: argparse.Namespace) -> None:
    others = sorted(set(args.kinds or SHARED) - set(SHARED))
    if args.kinds == () or others:
        parser.error(
            f"--backend compares what each backend can meet: --kinds of {', '.join(SHARED)}, not"
            f" {others[0] if others else 'none'}"
        )
    if args.backend != "ours" and (args.secret or args.layerwise):
        parser.error(f"--backend {args.backend} knows neither --secret nor --layerwise")


def _default_kinds(args: argparse.Namespace) -> tuple[Kind, ...]:
    if args.backend is not None:
        return SHARED
    return tuple(kind for kind in KINDS if kind != "intruder" or args.secret)


def _kinds(text: str) -> tuple[Kind, ...]:
    return () if text == "none" else some_of(KINDS)(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to less than 1")
    return value


if __name__ == "__main__":
    parse(sys.argv[1:])
