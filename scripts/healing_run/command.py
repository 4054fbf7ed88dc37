# SPDX-License-Identifier: Apache-2.0
"""`scripts/healing`: from arguments to a table."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict

from cpu_serving.namespaces import NoNetwork
from cpu_serving.progress import Step

from healing_run.figures import Figures, figures, header, late, line
from healing_run.options import HealingOptions, parse
from healing_run.places import Place, place
from healing_run.rows import ROWS
from healing_run.trial import TrialError, trial
from te.version import version

__all__ = ["main"]

EXIT_LATE = 1
EXIT_UNUSABLE = 2
EXIT_BROKEN = 3


def main(argv: Sequence[str]) -> int:
    """0: every bar was reached. 1: one was not. 2: not possible here. 3: a side failed."""
    options = parse(argv)
    try:
        where = place(options.rdma)
    except NoNetwork as error:
        print(f"healing: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    print("\n".join([_about(options), "", *header()]), flush=True)
    found = {}
    try:
        for name in _names(options, where):
            found[name] = _repeated(options, where, name)
            print(line(name, found[name]), flush=True)
    except TrialError as error:
        print(f"healing: {error}", file=sys.stderr)
        return EXIT_BROKEN
    if options.json:
        rows = {name: [asdict(one) for one in runs] for name, runs in found.items()}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    bad = [f"{name}: {said}" for name, runs in found.items() for said in late(ROWS[name], runs)]
    print("\n" + "\n".join(bad or ["every bar was reached"]))
    return EXIT_LATE if bad else 0


def _names(options: HealingOptions, where: Place) -> list[str]:
    """Rows that the place can have."""
    return [name for name in options.names if ROWS[name].rails == 1 or where.has_rails]


def _repeated(options: HealingOptions, where: Place, name: str) -> list[Figures]:
    runs = []
    with Step(name) as step:
        for nth in range(options.repeat):
            step.tick(f"{nth + 1} of {options.repeat}")
            runs.append(figures(ROWS[name], *trial(where, ROWS[name])))
    return runs


def _about(options: HealingOptions) -> str:
    over = "soft RDMA devices" if options.rdma else "TCP"
    return f"te {version()} over {over}, Linux {platform.release()}, {options.repeat} times each"
