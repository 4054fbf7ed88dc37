# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo --store-hits`: many requests at once, computed in a first round and from the store
in a second one, as in what LMCache and Mooncake have published of Mooncake Store."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Final

import numpy as np

from cpu_serving.model import FIRST_PLAIN_TOKEN, VOCAB_SIZE, LlamaSize, make_llama
from cpu_serving.nursery import Nursery
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, Server, ServerOptions, base_environment, wait_ready
from cpu_serving.store import flush, with_store
from cpu_serving.streaming import Streamed, stream_all
from cpu_serving.traffic import Request
from cpu_serving.variants import parse_hits
from kvstore.client.status import QUESTION, status_of
from te import status

__all__ = ["Figures", "figures_of", "main", "medians", "table"]

EXIT_DIFFERENT = 1
EXIT_BROKEN = 3
PAGE = 16
WAIT_S = 60.0
STATUS_DIR = "te"
"""Of the run's directory: where te engines answer."""


@dataclass(frozen=True)
class Figures:
    """Of one round; times in seconds, throughputs by the second."""

    mean_ttft_s: float
    p50_ttft_s: float
    p90_ttft_s: float
    mean_tpot_s: float
    p50_tpot_s: float
    p90_tpot_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float


NAMES: Final = (
    "TTFT, mean",
    "TTFT, p50",
    "TTFT, p90",
    "time per token, mean",
    "time per token, p50",
    "time per token, p90",
    "requests / s",
    "output tokens / s",
    "all tokens / s",
)
PUBLISHED: Final = Figures(-0.691, -0.672, -0.709, -0.619, -0.633, -0.649, 1.910, 1.848, 1.905)
"""Changes from the first round to the second, as published: Qwen2.5 72B on 8 H800, 50 requests of
9,728 tokens that make 64 each, sent at once."""


def main(argv: Sequence[str], nursery: Nursery | None = None) -> int:
    """The exit status. With a `nursery` the server is forked from it."""
    options = parse_hits(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-hits-"))
    try:
        cold, hit, problems = _run(options, run_dir, nursery)
    except ServingError as error:
        print(f"demo: {error}\ndemo: the logs are in {run_dir}", file=sys.stderr)
        return EXIT_BROKEN
    shutil.rmtree(run_dir)
    print(table(medians(cold), medians(hit)))
    if options.json:
        print(json.dumps({"cold": list(map(asdict, cold)), "hit": list(map(asdict, hit))}))
    for one in problems:
        print(f"demo: {one}", file=sys.stderr)
    return EXIT_DIFFERENT if problems else 0


def _run(
    options: argparse.Namespace, run_dir: Path, nursery: Nursery | None
) -> tuple[list[Figures], list[Figures], list[str]]:
    size = LlamaSize(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=4 * options.hidden,
        heads=options.hidden // 64,
        head_dim=64,
        positions=options.prompt + options.new_tokens + PAGE,
    )
    tokens = options.requests * (options.prompt + options.new_tokens + PAGE)
    lent = options.rounds * tokens * size.kv_bytes_per_token * 5 // 4 + (64 << 20)
    plain = ServerOptions(
        make_llama(size), max_total_tokens=2 * tokens, max_running_requests=options.requests
    )
    cold: list[Figures] = []
    hit: list[Figures] = []
    problems: list[str] = []
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory(prefix="kv") as path, Fleet(run_dir, nursery) as fleet:
        directory = Path(path)
        server = _start(fleet, plain, directory, lent, run_dir)
        for number in range(1, options.rounds + 1):
            rows = rng.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, (options.requests, options.prompt))
            requests = [Request(tuple(row.tolist()), options.new_tokens) for row in rows]
            computed = _ask(server, requests, f"round {number}: computed")
            # A flush drops what has not been stored yet.
            _wait_for_objects(directory, number * options.requests * (options.prompt // PAGE))
            loaded = _ask(server, requests, f"round {number}: from the store")
            cold.append(figures_of(computed, options.prompt))
            hit.append(figures_of(loaded, options.prompt))
            problems += _problems(number, computed, loaded, options.prompt)
    return cold, hit, problems


def _start(fleet: Fleet, plain: ServerOptions, directory: Path, lent: int, run_dir: Path) -> Server:
    """A process that lends memory, and a server that has none of its own."""
    stored = with_store(plain, directory / "s", "0")
    env = {"SGLANG_MOONCAKE_STATUS_DIR": str(directory / STATUS_DIR)}
    lender = ["kvstore", "serve", f"--memory={lent}", f"--directory={directory / 's'}"]
    own = base_environment() | {"XDG_RUNTIME_DIR": str(directory)}
    fleet.process("lender", lender, own, run_dir / "lender.log")
    server = fleet.server("single", replace(stored, extra_env=env))
    with Step("starting the server") as step:
        wait_ready([server], tick=step.tick)
        _wait_for_objects(directory, 0)
    # The first request of a process pays for what is imported and allocated late.
    stream_all(server.url, [Request(tuple(range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 40)), 2)])
    return server


def _wait_for_objects(directory: Path, count: int) -> None:
    """Until the server knows an owner, and that many objects or more that owners hold."""
    deadline_s = time.monotonic() + WAIT_S
    while (known := _objects_known(directory / STATUS_DIR)) is None or known < count:
        if time.monotonic() > deadline_s:
            stored = (
                "no owner was found" if known is None else f"{known} of {count} pages are stored"
            )
            raise ServingError(f"{stored} after {WAIT_S:g} s")
        time.sleep(0.05)


def _objects_known(status_dir: Path) -> int | None:
    """None while the server knows no owner."""
    for live in status.running(status_dir):
        try:
            found = status_of(status.ask(live.path, QUESTION))
        except status.StatusSocketError:
            continue  # Another engine, or one that starts.
        usable = [one for one in found.owners if one.usable]
        if usable:
            return sum(one.objects for one in usable)
    return None


def _ask(server: Server, requests: Sequence[Request], title: str) -> list[Streamed]:
    flush(server)
    with Step(title):
        return stream_all(server.url, requests)


def _problems(
    number: int, computed: Sequence[Streamed], loaded: Sequence[Streamed], prompt: int
) -> list[str]:
    """Why the round does not show what it should."""
    found = []
    if any(one.cached_tokens for one in computed):
        found.append(f"round {number}: some of what was to be computed was found")
    whole = (prompt - 1) // PAGE * PAGE
    fewer = sum(one.cached_tokens != whole for one in loaded)
    if fewer:
        found.append(f"round {number}: {fewer} of {len(loaded)} requests were not found whole")
    different = sum(
        one.output_ids != other.output_ids for one, other in zip(computed, loaded, strict=True)
    )
    if different:
        found.append(f"round {number}: {different} of {len(loaded)} requests have other tokens")
    return found


def figures_of(answers: Sequence[Streamed], prompt: int) -> Figures:
    """Of one round, from the first request to the last token."""
    ttft_s = sorted(one.first_token_s for one in answers)
    tpot_s = sorted(one.per_token_s for one in answers)
    took_s = max(one.last_s for one in answers) - min(one.sent_s for one in answers)
    outputs = sum(len(one.output_ids) for one in answers)
    return Figures(
        *_spread(ttft_s),
        *_spread(tpot_s),
        len(answers) / took_s,
        outputs / took_s,
        (outputs + prompt * len(answers)) / took_s,
    )


def _spread(ordered: Sequence[float]) -> tuple[float, float, float]:
    """Mean, p50 and p90."""
    p90 = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]
    return statistics.fmean(ordered), statistics.median(ordered), p90


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure."""
    return Figures(
        *(
            statistics.median(getattr(one, field.name) for one in rounds)
            for field in fields(Figures)
        )
    )


def table(cold: Figures, hit: Figures) -> str:
    """A line for each figure, with the published change beside ours."""
    lines = [f"{'':22}{'computed':>12}{'from store':>12}{'change':>9}{'published':>11}"]
    for name, field in zip(NAMES, fields(Figures), strict=True):
        before, after = getattr(cold, field.name), getattr(hit, field.name)
        cells = [_cell(field.name, one) for one in (before, after)]
        change, published = after / before - 1, getattr(PUBLISHED, field.name)
        lines.append(f"{name:22}{cells[0]:>12}{cells[1]:>12}{change:9.0%}{published:11.0%}")
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    return f"{value * 1e3:.0f} ms" if name.endswith(("ttft_s", "tpot_s")) else f"{value:.2f}"
