# SPDX-License-Identifier: Apache-2.0
"""``python -m release_trial``: from releases to tables. Exit status 1 if anything failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from release_trial.options import parse
from release_trial.table import table
from release_trial.trial import Trial

PIP_TIMEOUT_S = 300.0
_PIPS_NEWEST = re.compile(r"^sglang \((.+)\)", re.MULTILINE)


class Unusable(Exception):
    """What is asked for cannot be done; the sentence says why."""


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="sglang-releases-"))
    try:
        releases = options.releases or (newest_of_pip(),)
    except Unusable as error:
        print(f"sglang-releases: {error}", file=sys.stderr)
        return 1
    tables, failed = [], False
    for release in releases:
        trial = Trial(release, folder / f"{release}.log")
        began_s, used_s = time.monotonic(), _cpu_s()
        rows = trial.rows(options.chaos_minutes)
        wall_s, cpu_s = time.monotonic() - began_s, _cpu_s() - used_s
        tables.append(f"{table(release, rows, wall_s, cpu_s)}; log: {trial.log}")
        failed = failed or any(row.is_good is False for row in rows)
        print(f"\n{tables[-1]}\n", flush=True)
    if len(tables) > 1:
        print("\n\n".join(["All of them:", *tables]))
    return int(failed)


def newest_of_pip() -> str:
    """Pre-releases included; Unusable."""
    argv = [sys.executable, "-m", "pip", "index", "versions", "--pre", "sglang"]
    asked = subprocess.run(argv, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    found = _PIPS_NEWEST.search(asked.stdout)
    if found is None:
        raise Unusable(f"pip finds no release of SGLang: {asked.stderr.strip()[-500:]}")
    return found[1]


def _cpu_s() -> float:
    """Of all that was waited for."""
    used = os.times()
    return used.children_user + used.children_system


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
