# SPDX-License-Identifier: Apache-2.0
"""The command ``te bench``: arguments in, cases run, results out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from te.errors import Error, UsageError
from te_bench import machine, null_post, plot, tables
from te_bench.bars import BAR_CASES
from te_bench.contenders import VARIANTS, floor
from te_bench.contenders.te_engine import engine_memory_offered
from te_bench.memory import MEMORIES
from te_bench.progress import ProgressBar
from te_bench.report import CaseResult, as_json
from te_bench.runner import Case, run_case
from te_bench.shapes import SHAPES, Shape

__all__ = ["add_arguments", "run"]

TRANSPORTS = ("auto", "tcp", "samehost", "rdma")
ROUNDS_MAX = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``te bench`` takes."""
    what = parser.add_argument_group("what is moved")
    what.add_argument(
        "--shape", help=f"names with commas between, or all: {', '.join(SHAPES)} (default: kv)"
    )
    what.add_argument("--blocks", type=int, metavar="N", help="a shape by hand: so many blocks")
    what.add_argument("--nbytes", type=int, metavar="B", help="of so many bytes each")
    what.add_argument("--threads", type=int, default=1, help="submitting threads (by hand)")
    what.add_argument("--sync", action="store_true", help="one block at a time (by hand)")
    what.add_argument("--count-scale", type=float, default=1.0, metavar="F", help="fewer blocks")
    what.add_argument("--bars", action="store_true", help="every case that a bar is about")

    how = parser.add_argument_group("how")
    how.add_argument("--transport", default="auto", help=f"{', '.join(TRANSPORTS)} (default: auto)")
    how.add_argument(
        "--memory",
        default="any",
        help="any; engine: what te.allocate gives; cuda: of the first GPU, on both sides, or on"
        " one as in cuda-host and host-cuda",
    )
    how.add_argument("--busy", action="store_true", help="a pure-Python loop in every process")
    how.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    how.add_argument("--seed", type=int, default=1, help="of slots and contents (default: 1)")
    how.add_argument(
        "--deadline", type=float, default=120.0, metavar="S", help="of a step, seconds"
    )

    how.add_argument(
        "--null-post",
        action="store_true",
        help="with --transport rdma: no devices, what te itself costs a block (needs none)",
    )

    beside = parser.add_argument_group("beside whom")
    beside.add_argument(
        "--peers",
        default="",
        help="of mooncake, nixl, floor, te-staged, te-host, device-copy, MODULE:CLASS",
    )
    beside.add_argument("--floors", default="fit", help="fit, all, or names such as vm_writev-2")
    beside.add_argument(
        "--peers-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that has the peers installed, of this Python version (default: this one)",
    )

    out = parser.add_argument_group("results")
    form = out.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object per case")
    form.add_argument("--markdown", action="store_true", help="as in docs/benchmarks.md")
    out.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0, or 1 if te failed or anybody left a wrong byte."""
    if arguments.null_post:
        return _run_null_post(arguments)
    cases = _cases(arguments)
    if arguments.plot is not None and not plot.available():
        raise UsageError("--plot needs matplotlib, which is not installed here")
    results: list[CaseResult] = []
    for case in cases:
        bar = ProgressBar(sys.stderr, _name(case))
        try:
            result = run_case(case, bar)
        finally:
            bar.done()
        results.append(result)
        sys.stdout.write(_output(arguments, result) + "\n")
        sys.stdout.flush()
    if not arguments.json:
        sys.stdout.write(_footer(results))
    if arguments.plot is not None:
        plot.draw(results, arguments.plot)
    return 0 if all(result.ok for result in results) else 1


def _run_null_post(arguments: argparse.Namespace) -> int:
    """``run`` with devices that move nothing."""
    _check_null_post(arguments)
    try:
        shapes = [shape.scaled(arguments.count_scale) for shape in _shapes(arguments)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    for shape in shapes:
        bar = ProgressBar(sys.stderr, f"{shape.name} null post")
        try:
            result = null_post.measure(shape, arguments.rounds, arguments.seed, bar)
        except (null_post.NullPostError, Error) as error:
            bar.done()
            sys.stderr.write(f"te bench: {error}\n")
            return 1
        bar.done()
        out = json.dumps(result.as_json()) if arguments.json else null_post.text(result)
        sys.stdout.write(out.rstrip("\n") + "\n")
    if not arguments.json:
        about = machine.describe()
        sys.stdout.write(f"{_where(about)}; load {about['load_1min']}\n")
    return 0


def _output(arguments: argparse.Namespace, result: CaseResult) -> str:
    if arguments.json:
        return json.dumps(as_json(result), ensure_ascii=False)
    return tables.markdown(result) if arguments.markdown else tables.text(result)


def _footer(results: Sequence[CaseResult]) -> str:
    about = results[0].machine
    loads = [result.machine["load_1min_after"] for result in results]
    return (
        f"{_where(about)};"
        f" load {about['load_1min']} before, {min(loads)} to {max(loads)} after each case;"
        f" {tables.versions(results)}\n"
    )


def _where(about: Mapping[str, Any]) -> str:
    return (
        f"{about['date']}; {about['cpus']} CPUs {about['cpu']}, {about['memory_gib']} GiB,"
        f" Linux {about['kernel']}, Python {about['python']}"
    )


def _name(case: Case) -> str:
    return f"{case.shape.name} {case.transport} {case.memory}{' busy' if case.busy else ''}"


def _cases(arguments: argparse.Namespace) -> list[Case]:
    _check(arguments)
    case = Case(
        shape=SHAPES["kv"],
        transport=arguments.transport,
        memory=arguments.memory,
        busy=arguments.busy,
        rounds=arguments.rounds,
        seed=arguments.seed,
        peers=tuple(dict.fromkeys(peer for peer in arguments.peers.split(",") if peer)),
        floors=arguments.floors,
        python=sys.executable,
        peers_python=arguments.peers_python,
        deadline_s=arguments.deadline,
    )
    try:
        if arguments.bars:
            return [
                replace(
                    case,
                    shape=SHAPES[bar.shape].scaled(arguments.count_scale),
                    transport=bar.transport,
                    memory=bar.memory,
                    busy=bar.busy,
                )
                for bar in BAR_CASES
            ]
        shapes = [shape.scaled(arguments.count_scale) for shape in _shapes(arguments)]
    except ValueError as error:
        raise UsageError(str(error)) from error
    return [replace(case, shape=shape) for shape in shapes]


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    by_hand = arguments.blocks is not None or arguments.nbytes is not None
    if by_hand:
        if arguments.shape is not None:
            raise UsageError("give either --shape, or --blocks and --nbytes")
        if arguments.blocks is None or arguments.nbytes is None:
            raise UsageError("a shape by hand needs both --blocks and --nbytes")
        name = f"{arguments.blocks}x{arguments.nbytes}"
        return [Shape(name, arguments.blocks, arguments.nbytes, arguments.threads, arguments.sync)]
    if arguments.threads != 1 or arguments.sync:
        raise UsageError("--threads and --sync go with --blocks and --nbytes")
    names = list(SHAPES) if arguments.shape == "all" else (arguments.shape or "kv").split(",")
    for name in names:
        if name not in SHAPES:
            raise UsageError(f"no shape {name!r}; there are {', '.join(SHAPES)}, or all")
    return [SHAPES[name] for name in names]


def _check_null_post(arguments: argparse.Namespace) -> None:
    _check(arguments)
    if arguments.transport != "rdma":
        raise UsageError("--null-post goes with --transport rdma")
    for name in ("peers", "busy", "bars", "plot", "sync", "markdown"):
        if getattr(arguments, name):
            raise UsageError(f"--null-post measures te alone: leave out --{name}")


def _check(arguments: argparse.Namespace) -> None:
    """Raises ``UsageError`` for the first argument that is out of range."""
    if arguments.transport not in TRANSPORTS:
        raise UsageError(
            f"no transport {arguments.transport!r} to measure; there are {', '.join(TRANSPORTS)}"
        )
    if arguments.memory not in MEMORIES:
        raise UsageError(f"--memory is one of {', '.join(MEMORIES)}, not {arguments.memory!r}")
    if arguments.memory == "engine" and not engine_memory_offered():
        raise UsageError("--memory engine needs te.allocate, which this te does not have")
    if not 1 <= arguments.rounds <= ROUNDS_MAX:
        raise UsageError(f"--rounds {arguments.rounds} must be between 1 and {ROUNDS_MAX}")
    if not 0 <= arguments.seed < 1 << 32:
        raise UsageError(f"--seed {arguments.seed} must be between 0 and {(1 << 32) - 1}")
    if not 0 < arguments.deadline <= 3600:
        raise UsageError(f"--deadline {arguments.deadline:g} must be above 0 and at most 3600 s")
    if arguments.bars and (arguments.shape or arguments.blocks or arguments.busy):
        raise UsageError("--bars brings its own shapes and settings")
    is_cuda = "cuda" in arguments.memory
    for peer in filter(None, arguments.peers.split(",")):
        if is_cuda and peer in ("floor", "te-staged"):
            raise UsageError(
                f"--peers {peer} is of host memory, not of --memory {arguments.memory}"
            )
        if peer == "device-copy" and arguments.memory != "cuda":
            raise UsageError("--peers device-copy goes with --memory cuda")
        if peer == "te" or (peer not in (*VARIANTS, "floor") and ":" not in peer):
            raise UsageError(
                f"no peer {peer!r}; there are mooncake, nixl, floor, te-staged, te-host,"
                " device-copy, or a contender MODULE:CLASS"
            )
    if arguments.floors not in ("fit", "all"):
        for name in arguments.floors.split(","):
            try:
                floor.parse(name)
            except ValueError as error:
                raise UsageError(str(error)) from error
