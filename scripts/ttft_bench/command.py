# SPDX-License-Identifier: Apache-2.0
"""`scripts/ttft`: from arguments to tables."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from cpu_serving.namespaces import NoNetwork
from cpu_serving.processes import ServingError, leaves
from cpu_serving.servers import Fleet

from ttft_bench.bench import Bench
from ttft_bench.network import Network
from ttft_bench.options import TtftOptions, parse
from ttft_bench.plot import svg
from ttft_bench.results import Point, differences, judge
from ttft_bench.tables import as_json, text

__all__ = ["main"]

EXIT_DIFFERENT = 1
EXIT_UNUSABLE = 2
EXIT_BROKEN = 3
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """0: measured, tokens equal. 1: tokens differ. 2: not possible here. 3: a server failed."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        network = Network()
    except NoNetwork as error:
        print(f"ttft: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-ttft-"))
    code = EXIT_BROKEN
    try:
        code = _run(options, network, run_dir)
    except* ServingError as errors:
        for failed in leaves(errors):
            print(f"ttft: {failed}", file=sys.stderr)
    except* KeyboardInterrupt:
        print("ttft: interrupted, all servers are stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    if code in (EXIT_DIFFERENT, EXIT_BROKEN):
        print(f"ttft: the logs are in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir)
    return code


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: TtftOptions, network: Network, run_dir: Path) -> int:
    with Fleet(run_dir) as fleet:
        bench = Bench(options, network, fleet)
        points = bench.points()
    bars = judge(points, options.kinds)
    print(_title(options, bench))
    print(text(points, options.kinds))
    print()
    print("\n".join([*_fallbacks(points), *map(str, bars)]))
    about = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _machine(),
        "others_busy": bench.others_busy,
        "options": _plain(options),
    }
    if options.json:
        document = as_json(points, options.kinds, bars, about)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(svg(points, options.kinds))
    different = differences(points)
    for sentence in different:
        print(f"ttft: {sentence}", file=sys.stderr)
    if not different and len(options.kinds) > 1:
        print("all tokens are equal")
    return EXIT_DIFFERENT if different else 0


def _title(options: TtftOptions, bench: Bench) -> str:
    model = options.model
    busy = bench.others_busy
    return (
        f"Llama of {model.layers} layers, hidden {model.hidden}, intermediate {model.intermediate},"
        f" {model.kv_bytes_per_token:,} B of KV a token; {options.rounds} rounds; "
        f"{os.cpu_count()} processors, of which others had {median(busy):.0%} before a round"
        f" (at most {max(busy):.0%})\n"
    )


def _fallbacks(points: Sequence[Point]) -> list[str]:
    return [
        f"{point.prompt_tokens} tokens at {point.rate}: {count} went as a whole: {reason}"
        for point in points
        if "layers" in point.carried
        for reason, count in point.carried["layers"].fallbacks.items()
    ]


def _machine() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _plain(options: TtftOptions) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(options), default=str))
