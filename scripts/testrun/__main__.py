# SPDX-License-Identifier: Apache-2.0
"""``scripts/test``: what it asks of its options, the lanes, and the table at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from command_line import Parser

from testrun.lanes import run_lanes
from testrun.plan import Options, fast_lanes, lanes, shared
from testrun.table import read_times, summary
from testrun.turns import PARTS, Turn, pick_of_commit

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
#: What scripts/setup did, and how long it took.
SET_UP = BUILD / "setup-times.tsv"
DESCRIPTION = "Runs the tests, in lanes side by side, and prints where the time went."


def main(arguments: Sequence[str]) -> int:
    """The exit status of the first command that failed, else 0."""
    asked = _parse(arguments)
    if not asked.fast:
        which = "all of them (--all)" if asked.turn is None else f"part {asked.turn}"
        print(f"test: of the tests that take turns: {which}", flush=True)
    BUILD.mkdir(exist_ok=True)
    SET_UP.unlink(missing_ok=True)
    # The tests start hundreds of interpreters: compiling the same files for each takes a tenth
    # longer.
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""
    # Below the working directory, which emulated machines share with this one.
    with tempfile.TemporaryDirectory(prefix="test-run.", dir=BUILD) as name:
        options = replace(asked, scratch=Path(name))
        began_s = time.monotonic()
        if options.fast:
            results = run_lanes(fast_lanes(options), Path(name))
        else:
            results = run_lanes(lanes(options), Path(name), shared(options))
        wall_s = time.monotonic() - began_s
        times = {one.step: read_times(_lines(options.times(one.step))) for one in results}
        print(f"\n{summary(results, wall_s, times, _lines(SET_UP))}", flush=True)
    return next((one.code or 1 for one in results if not one.is_good), 0)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _parse(arguments: Sequence[str]) -> Options:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser(
        "scripts/test",
        DESCRIPTION,
        usage="scripts/test [--fast | --all | --turn K] [-- PYTEST ARGUMENTS]",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--fast", action="store_true", help="what needs neither SGLang nor RDMA devices: a minute"
    )
    which.add_argument(
        "--all", action="store_true", help=f"all {PARTS} parts of the tests that take turns"
    )
    which.add_argument(
        "--turn",
        type=int,
        choices=range(1, PARTS + 1),
        help="which part of the tests that take turns (default: the commit's hash decides)",
    )
    asked = parser.parse_args(arguments[:at])
    turn, pick = _of_checkout()
    if asked.turn:
        turn, pick = Turn(asked.turn), asked.turn - 1
    return Options(
        root=ROOT,
        scratch=BUILD,
        fast=asked.fast,
        turn=None if asked.all else turn,
        pick=None if asked.all else pick,
        pytest_args=tuple(arguments[at + 1 :]),
    )


def _of_checkout() -> tuple[Turn, int]:
    """The turn and the pick. Of a tree without git: the first."""
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        return Turn(1), 0
    commit = asked.stdout.strip()
    return Turn.of_commit(commit), pick_of_commit(commit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
