# SPDX-License-Identifier: Apache-2.0
"""The command: arguments in, steps run, results out."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from command_line import Parser

from gpu_check import needs
from gpu_check.build import BuildError, build
from gpu_check.report import Result, as_json, exit_status, line, tables
from gpu_check.runner import Settings, run_step
from gpu_check.steps import DRIVER, STEPS, Step, chosen

__all__ = ["main"]

ROOT = Path(__file__).parents[2]
PEERS = ("mooncake", "nixl")


def main(
    argv: Sequence[str],
    *,
    python: str = sys.executable,
    caveat: str = "",
    steps: Sequence[Step] = STEPS,
) -> int:
    """The exit status: 0 when every correctness step passed, 1 if not, 2 without a GPU.

    `python`: the interpreter of all processes with a GPU. `caveat`: why the figures mean nothing,
    if it is not a real one.
    """
    arguments = _arguments(argv)
    if arguments.list:
        for one in steps:
            print(f"{one.name:26}  {one.kind:12}  at most {one.deadline_s:.0f} s")
        return 0
    # Who asks for the object on standard output wants nothing else there.
    out = sys.stderr if arguments.json == "-" else sys.stdout
    try:
        wanted = chosen(steps, arguments.only)
        _check(arguments)
        if problem := needs.gpu_problem(python):
            print(f"gpu-check: {problem}; nothing was checked", file=sys.stderr)
            results = [Result(DRIVER, "no-gpu", problem)]
        else:
            settings = _settings(arguments, python, out)
            results = _run(wanted, settings, arguments.minutes * 60, out)
            print("\n" + tables(results, caveat), file=out)
    except (ValueError, BuildError, OSError) as exc:
        print(f"gpu-check: {exc}", file=sys.stderr)
        return 1
    _write(arguments.json, as_json(results, caveat, _about()))
    return exit_status(results)


def _run(steps: Sequence[Step], settings: Settings, time_s: float, out: TextIO) -> list[Result]:
    """The driver's first, whatever is wanted: it says what GPU that was."""
    until_s = time.monotonic() + time_s
    results: list[Result] = []
    for step in (DRIVER, *(one for one in steps if one is not DRIVER)):
        left_s = until_s - time.monotonic()
        if left_s < 1:
            result = Result(step, "left-out", "the time of --minutes is over")
        else:
            result = run_step(step, settings, left_s)
        results.append(result)
        print(line(result), file=out, flush=True)
    return results


def _check(arguments: argparse.Namespace) -> None:
    """`ValueError` for the first argument that is out of range."""
    for peer in filter(None, arguments.peers.split(",")):
        if peer not in PEERS:
            raise ValueError(f"no peer {peer!r}; there are {', '.join(PEERS)}")
    if arguments.minutes <= 0 or not 0 < arguments.scale <= 1:
        raise ValueError("--minutes must be above 0, --scale above 0 and at most 1")


def _settings(arguments: argparse.Namespace, python: str, out: TextIO) -> Settings:
    """Builds te, if that is to be."""
    lacks = needs.missing(python, is_built=arguments.te is not None)
    if lacks:
        raise ValueError("\n  ".join(["this machine lacks", *lacks]))
    folder = arguments.te
    if folder is None:
        print(f"gpu-check: building te in {arguments.build}", file=out, flush=True)
        folder = build(ROOT, arguments.build, python)
    return Settings(
        python=python,
        te=folder.resolve(),
        scale=arguments.scale,
        peers=arguments.peers,
        peers_python=arguments.peers_python or python,
    )


def _about() -> dict[str, Any]:
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    except OSError:  # The sources may have been brought without git.
        commit = ""
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _write(place: str | None, found: dict[str, Any]) -> None:
    if place == "-":
        print(json.dumps(found, indent=1))
    elif place is not None:
        Path(place).write_text(json.dumps(found, indent=1) + "\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "scripts/gpu-check",
        "Builds te, checks it with the first GPU of this machine, and measures it."
        " Needs CUDA's driver, Python 3.11 with Cython, setuptools, numpy and msgspec, and a C"
        " compiler; no network. Exit status: 0 when every correctness step passed, 1 if not, 2"
        " without a GPU.",
    )
    add = parser.add_argument
    add("--json", nargs="?", const="-", metavar="FILE", help="all results (default: to stdout)")
    add("--only", default="*", metavar="PATTERNS", help="steps: bytes-*,kinds, or speed (a kind)")
    add("--list", action="store_true", help="the steps, and no more")
    add("--minutes", type=float, default=20.0, metavar="M", help="for everything (default: 20)")
    add("--peers", default="", help="measured beside te: mooncake, nixl, or both")
    add("--peers-python", metavar="PATH", help="interpreter that has them, with CUDA")
    add("--te", type=Path, metavar="FOLDER", help="where te is, compiled, instead of building it")
    build_folder = ROOT / "build" / "gpu-check"
    add("--build", type=Path, default=build_folder, metavar="FOLDER", help="where it is built")
    add("--scale", type=float, default=1.0, metavar="F", help="less of everything (default: 1)")
    return parser.parse_args(argv)
