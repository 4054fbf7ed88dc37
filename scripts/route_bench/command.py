# SPDX-License-Identifier: Apache-2.0
"""`scripts/route-bench`: from arguments to tables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Final

import published_traces
from cpu_serving.nursery import Nursery
from cpu_serving.processes import ServingError, leaves
from cpu_serving.servers import Fleet, base_environment

from kvstore_tools.traces import read_trace
from route_bench.bench import Bench
from route_bench.options import BenchOptions, parse
from route_bench.results import bars, table

__all__ = ["kept_traces", "main"]

EXIT_DIFFERENT: Final = 1
EXIT_UNUSABLE: Final = 2
EXIT_BROKEN: Final = 3
EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str]) -> int:
    """0: measured, tokens equal, whether or not the bars hold. 1: tokens differ. 2: a trace cannot
    be read. 3: a server failed."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-route-"))
    code = EXIT_BROKEN
    try:
        code = _run(options, run_dir)
    except* ServingError as errors:
        for failed in leaves(errors):
            print(f"route-bench: {failed}", file=sys.stderr)
    except* KeyboardInterrupt:
        print("route-bench: interrupted, all servers are stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if code in (EXIT_DIFFERENT, EXIT_BROKEN):
        print(f"route-bench: the logs are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def kept_traces(directory: Path) -> tuple[Path, ...]:
    """The traces that the repository has, written there as they are published."""
    paths = tuple(directory / f"{name}_trace.jsonl" for name in published_traces.NAMES)
    for name, path in zip(published_traces.NAMES, paths, strict=True):
        path.write_text(published_traces.lines(name))
    return paths


def _run(options: BenchOptions, run_dir: Path) -> int:
    try:
        traces = options.traces or kept_traces(run_dir)
        loads = {path.stem: read_trace(path) for path in traces}
    except (OSError, ValueError) as error:
        print(f"route-bench: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    with (
        tempfile.TemporaryDirectory(prefix="kv") as directory,  # Paths of sockets are short.
        Nursery(base_environment(), run_dir / "nursery.log") as nursery,
        Fleet(run_dir, nursery) as fleet,
    ):
        turns, different = Bench(options, fleet, Path(directory) / "s", loads).run()
    found = bars(turns)
    busy = [turn.others_busy for turn in turns]
    cores = len(os.sched_getaffinity(0))
    print(
        f"Llama of {options.layers} layers, hidden {options.hidden}; {options.prefill} prefill "
        f"servers, {options.decode} for decode; {options.requests} requests, "
        f"{options.rounds} rounds; {cores} processors, of which others had {median(busy):.0%} "
        f"before a turn (at most {max(busy):.0%})\n"
    )
    print(table(turns))
    print()
    print("\n".join(map(str, found)))
    if options.json:
        document = {
            "turns": [asdict(turn) for turn in turns],
            "bars": [asdict(bar) | {"holds": bar.holds} for bar in found],
            "options": json.loads(json.dumps(asdict(options), default=str)),
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    for sentence in different:
        print(f"route-bench: {sentence}", file=sys.stderr)
    if not different:
        print("all tokens are equal")
    return EXIT_DIFFERENT if different else 0
