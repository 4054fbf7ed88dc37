# SPDX-License-Identifier: Apache-2.0
"""``scripts/test``: what it asks of its options, the lanes, and the table at the end."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from testrun.lanes import run_lanes
from testrun.plan import Options, fast_lanes, lanes
from testrun.table import read_times, summary
from testrun.turns import PARTS, Turn

ROOT = Path(__file__).parents[2]
DESCRIPTION = "Runs the tests, in lanes side by side, and prints where the time went."


def main(arguments: Sequence[str]) -> int:
    """The exit status of the first command that failed, else 0."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    # Below the working directory, which emulated machines share with this one.
    with tempfile.TemporaryDirectory(prefix="test-run.", dir=build) as name:
        options = _parse(arguments, Path(name))
        if not options.fast:
            which = "all of them (--all)" if options.turn is None else f"part {options.turn}"
            print(f"test: of the tests that take turns: {which}", flush=True)
        began_s = time.monotonic()
        results = run_lanes(fast_lanes(options) if options.fast else lanes(options), Path(name))
        times = []
        for one in results:
            file = options.times(one.step)
            if file.exists():
                times.append((one.step, read_times(file.read_text().splitlines())))
        print(f"\n{summary(results, times, time.monotonic() - began_s)}", flush=True)
        return next((one.code or 1 for one in results if not one.is_good), 0)


def _parse(arguments: Sequence[str], scratch: Path) -> Options:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="scripts/test",
        usage="scripts/test [--fast | --all | --turn K] [-- PYTEST ARGUMENTS]",
        description=DESCRIPTION,
        allow_abbrev=False,
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
    return Options(
        root=ROOT,
        scratch=scratch,
        fast=asked.fast,
        turn=None if asked.all else Turn(asked.turn) if asked.turn else _turn_of_checkout(),
        pytest_args=tuple(arguments[at + 1 :]),
    )


def _turn_of_checkout() -> Turn:
    """Of a tree without git: the first."""
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return Turn.of_commit(asked.stdout.strip()) if asked.returncode == 0 else Turn(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
