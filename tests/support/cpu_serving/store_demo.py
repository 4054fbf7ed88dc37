# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo --store`: how long the first token takes when a prompt's KV cache is computed, and
when it comes from the store."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cpu_serving.model import FIRST_PLAIN_TOKEN, VOCAB_SIZE, LlamaSize, make_llama
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_store
from cpu_serving.traffic import Answer, Request, compare, send_all
from cpu_serving.variants import parse_store

__all__ = ["main"]

EXIT_DIFFERENT = 1
EXIT_BROKEN = 3


@dataclass(frozen=True)
class Way:
    """How the prompts' KV caches came to be."""

    name: str
    #: Median over the requests, in seconds.
    first_token_s: float
    #: Tokens that were not computed, of all prompts.
    cached_tokens: int
    prompt_tokens: int
    #: Whether the tokens are those of a server without a store.
    equal: bool


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    options = parse_store(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-store-"))
    try:
        ways = _run(options, run_dir)
    except ServingError as error:
        print(f"demo: {error}\ndemo: the logs are in {run_dir}", file=sys.stderr)
        return EXIT_BROKEN
    shutil.rmtree(run_dir)
    print(_table(ways))
    if options.json:
        print(json.dumps([asdict(one) for one in ways]))
    hits = all(one.cached_tokens for one in ways[2:])
    return 0 if hits and all(one.equal for one in ways) else EXIT_DIFFERENT


def _run(options: argparse.Namespace, run_dir: Path) -> list[Way]:
    size = LlamaSize(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=4 * options.hidden,
        heads=options.hidden // 64,
        head_dim=64,
        positions=options.prompt + 16,
    )
    model = make_llama(size)
    rng = np.random.default_rng(options.seed)
    prompts = rng.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, (options.requests, options.prompt))
    requests = [Request(tuple(row.tolist()), new_tokens=1) for row in prompts]
    plain = ServerOptions(model, page_size=16)
    memory = f"{options.requests * options.prompt * size.kv_bytes_per_token // 700_000 + 64}MiB"
    with tempfile.TemporaryDirectory(prefix="kv") as directory, Fleet(run_dir) as fleet:
        # One process for the host owns the memory: a server that is started again finds it.
        stored = with_store(ServerOptions(model), Path(directory), memory, linger_s=1)
        alone = _ready(fleet, plain, "alone")
        expected = _ask(alone, requests, "requests to a server without a store")
        alone.stop()
        first = _ready(fleet, stored, "first")
        cold = _ask(first, requests, "requests to the first server")
        flush(first)
        again = _ask(first, requests, "the same, after its own cache was emptied")
        second = _ready(fleet, stored, "second")
        other = _ask(second, requests, "the same to the second server")
        own = _ask(second, requests, "the same, which it has on its device now")
        first.stop()
        first = _ready(fleet, stored, "first, started again")
        restarted = _ask(first, requests, "the same to the first server, which was started again")
    return [
        _way("computed, without a store", expected, expected, requests),
        _way("computed, and stored", expected, cold, requests),
        _way("from the store, same server", expected, again, requests),
        _way("from the store, other server", expected, other, requests),
        _way("on the device already", expected, own, requests),
        _way("from the store, started again", expected, restarted, requests),
    ]


def _ready(fleet: Fleet, options: ServerOptions, name: str) -> Server:
    server = fleet.server("single", options, name=name)
    with Step(f"starting the server {name!r}") as step:
        wait_ready([server], tick=step.tick)
    # The first request of a process pays for what is imported and allocated late.
    warm = Request(tuple(range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 40)), new_tokens=1)
    _answered(server, [warm])
    return server


def _ask(server: Server, requests: Sequence[Request], title: str) -> list[Answer]:
    with Step(title):
        return _answered(server, requests)


def _answered(server: Server, requests: Sequence[Request]) -> list[Answer]:
    answers = send_all(server.url, requests, concurrency=1)
    errors = [one.error for one in answers if one.error]
    if errors:
        raise ServingError(f"{len(errors)} requests failed: {errors[0]}")
    return answers


def _way(
    name: str, expected: Sequence[Answer], got: Sequence[Answer], requests: Sequence[Request]
) -> Way:
    return Way(
        name,
        statistics.median(one.elapsed_s for one in got),
        sum(one.cached_tokens for one in got),
        sum(len(one.input_ids) for one in requests),
        not compare(expected, got),
    )


def _table(ways: Sequence[Way]) -> str:
    head = f"{'KV cache':30} {'first token':>12} {'ratio':>6} {'cached':>8}  tokens equal"
    lines = [
        f"{one.name:30} {one.first_token_s * 1e3:9.0f} ms "
        f"{one.first_token_s / ways[0].first_token_s:6.2f} "
        f"{one.cached_tokens / one.prompt_tokens:8.1%}  {'yes' if one.equal else 'NO'}"
        for one in ways
    ]
    return "\n".join([head, *lines])
