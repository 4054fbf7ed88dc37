# SPDX-License-Identifier: Apache-2.0
"""`scripts/soak`: from arguments to a table."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cpu_serving.namespaces import NoNetwork
from cpu_serving.nursery import Nursery
from cpu_serving.processes import ServingError
from cpu_serving.servers import Fleet, base_environment

from soak_run.bench import Bench
from soak_run.options import SoakOptions, parse
from soak_run.results import Row, as_json, table
from soak_run.scenarios import RUNNERS

__all__ = ["main"]

EXIT_BAD = 1
EXIT_UNUSABLE = 2
EXIT_BROKEN = 3
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """0: nothing that must not be. 1: something. 2: not possible here. 3: a server did not come up,
    or ended."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    run_dir = Path(tempfile.mkdtemp(prefix="kvsoak"))
    rows: list[Row] = []
    code = EXIT_BROKEN
    try:
        _run(options, run_dir, rows)
        code = EXIT_BAD if any(row.bad() for row in rows) else 0
    except ServingError as error:
        print(f"soak: {error}", file=sys.stderr)
    except NoNetwork as error:
        print(f"soak: {error}", file=sys.stderr)
        code = EXIT_UNUSABLE
    except KeyboardInterrupt:
        print("soak: interrupted, all servers are stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if rows:
        print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([as_json(row) for row in rows], indent=1) + "\n")
    if code in (EXIT_BAD, EXIT_BROKEN):
        print(f"soak: the logs are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: SoakOptions, run_dir: Path, rows: list[Row]) -> None:
    """All scenarios; what they have shown is added to ``rows``. Raises ServingError, NoNetwork."""
    with (
        Nursery(base_environment(), run_dir / "nursery.log") as nursery,
        Fleet(run_dir, nursery) as fleet,
    ):
        bench = Bench(fleet, run_dir, options.clients, options.deadline_s, options.seed)
        # What came before one that fails is kept.
        rows.extend(RUNNERS[name](bench, options.minutes * 60) for name in options.scenarios)
