# SPDX-License-Identifier: Apache-2.0
"""``scripts/test``, once its environment is there."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testrun.lanes import Step, run_lanes
from testrun.plan import Options, before_lanes, fast_step, lanes, static_steps


def main(arguments: Sequence[str]) -> int:
    """The exit status of the first command that failed, else 0."""
    with tempfile.TemporaryDirectory(prefix="sglang-mooncake-test.") as name:
        options = _parse(arguments, Path(name))
        steps = [*static_steps(options)]
        steps += [fast_step(options)] if options.fast else before_lanes()
        code = _in_turn(steps)
        return code if code or options.fast else run_lanes(lanes(options), Path(name))


def _parse(arguments: Sequence[str], scratch: Path) -> Options:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="scripts/test", allow_abbrev=False)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args(arguments[:at])
    if asked.fast and asked.all:
        parser.error("--fast and --all together: give one")
    return Options(
        bin=Path(sys.executable).parent,
        scratch=scratch,
        fast=asked.fast,
        all_layouts=asked.all,
        pytest_args=tuple(arguments[at + 1 :]),
    )


def _in_turn(steps: Sequence[Step]) -> int:
    for step in steps:
        code = subprocess.run(step.argv, check=False).returncode
        if code not in step.good:
            print(f"test: {step.name} failed with exit status {code}", file=sys.stderr)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
