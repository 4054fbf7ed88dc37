# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo --vllm`: vLLM's servers that share their prefix caches through the store, and a
prefill and a decode server, beside an ordinary one."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from cpu_serving.model import make_model
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.store_status import pages_read
from cpu_serving.traffic import Answer, Request, compare, make_requests
from cpu_serving.variants import parse_vllm
from cpu_serving.vllm_proxy import Proxy
from cpu_serving.vllm_servers import (
    BLOCK,
    VllmServer,
    ask,
    handed_over,
    imported_tokens,
    nixl_flags,
    pair_flags,
    reset,
    side_channel,
    start_vllm,
    store_flags,
)
from sglang_mooncake.sglang.running import environment_for

__all__ = ["main"]

EXIT_DIFFERENT = 1
EXIT_BROKEN = 3
_NIXLS = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}


@dataclass(frozen=True)
class Way:
    """How the prompts' KV caches came to be."""

    name: str
    #: Requests whose tokens are not those of the ordinary server.
    different: int
    #: Prompt tokens that were not computed.
    cached_tokens: int
    #: What was not computed, in `unit`: pages that the store has given, each with its checksum
    #: compared, bytes that the prefill server has sent, or tokens of the prompts that came.
    moved: int
    unit: str = f"pages of {BLOCK}"
    #: Whether KV caches come from elsewhere at all.
    is_loaded: bool = True


def main(argv: Sequence[str]) -> int:
    """The exit status: 0 if all tokens are equal, and KV caches came from the store, or from the
    prefill server, where they can."""
    options = parse_vllm(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="sglang-mooncake-vllm-"))
    try:
        ways = _run(options, run_dir)
    except ServingError as error:
        print(f"demo: {error}\ndemo: the logs are in {run_dir}", file=sys.stderr)
        return EXIT_BROKEN
    shutil.rmtree(run_dir)
    print(_table(ways, options.requests))
    if options.json:
        print(json.dumps([asdict(one) for one in ways]))
    loaded = all(one.moved > 0 and one.cached_tokens > 0 for one in ways if one.is_loaded)
    return 0 if loaded and not any(one.different for one in ways) else EXIT_DIFFERENT


def _run(options: argparse.Namespace, run_dir: Path) -> list[Way]:
    requests = make_requests(options.requests, options.prompt, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="kv") as directory, Fleet(run_dir) as fleet:
        starter = _Starter(fleet, make_model("llama"), Path(directory), options.release_at)
        alone = starter.start("alone")
        _wait("an ordinary server", [alone])
        expected = _ask(alone, requests)
        alone.stop()
        ways: list[Way] = []
        if options.only != "pair":
            ways += _on_the_store(starter, options.store_tp, expected, requests)
        if options.only != "store":
            sizes = options.prefill_tp, options.decode_tp
            connector = _NIXLS.get(options.connector)
            if connector is None:
                ways.append(_handed_over(starter, sizes, expected, requests))
            else:
                ways.append(_handed_over_by(connector, starter, sizes, expected, requests))
    return ways


@dataclass(frozen=True)
class _Starter:
    """``release``: where another release of vLLM is."""

    fleet: Fleet
    model: Path
    place: Path
    release: Path | None

    def start(
        self,
        name: str,
        flags: Sequence[str] = (),
        core: int = 0,
        tp: int = 1,
        more_env: Mapping[str, str] = MappingProxyType({}),
    ) -> VllmServer:
        return start_vllm(
            self.fleet, name, self.model, self.place, flags, core, tp, self.release, more_env
        )


def _on_the_store(
    starter: _Starter, tp: int, expected: Sequence[Answer], requests: Sequence[Request]
) -> list[Way]:
    place = starter.place
    first = starter.start("first", store_flags("64MiB", place, linger_s=1), 1, tp)
    _wait("a server with the store", [first])
    cold = _ask(first, requests)
    stored = Way(
        "computed, and stored", len(compare(expected, cold)), _cached(cold), 0, is_loaded=False
    )
    reset(first)
    own = _way("loaded, after a reset", expected, _ask(first, requests), place, first)
    second = starter.start("second", store_flags("0", place, linger_s=1), 0, tp)
    _wait("a second server", [second])
    other = _way("loaded by another server", expected, _ask(second, requests), place, second)
    first.stop()
    second.stop()
    return [stored, own, other]


def _handed_over(
    starter: _Starter,
    sizes: tuple[int, int],
    expected: Sequence[Answer],
    requests: Sequence[Request],
) -> Way:
    """``sizes``: TP ranks of the prefill and of the decode server."""
    settings = {"stats_dir": str(starter.place / "stats")}
    flags = pair_flags("kv_producer", registry_port=starter.fleet.port(), **settings)
    prefill = starter.start("prefill", flags, 0, sizes[0])
    decode = starter.start("decode", pair_flags("kv_consumer", **settings), 1, sizes[1])
    _wait("a prefill and a decode server", [prefill, decode])
    with Proxy(prefill.url, decode.url) as proxy, Step("requests to the proxy of both"):
        answers = ask(proxy, requests)
    came = imported_tokens(decode)
    nbytes = handed_over(starter.place / "stats", len(requests) * sizes[0])
    different = len(compare(expected, answers))
    name = f"prefill server, TP {sizes[0]} to {sizes[1]}"
    return Way(name, different, round(came), nbytes, "bytes")


def _handed_over_by(
    connector: str,
    starter: _Starter,
    sizes: tuple[int, int],
    expected: Sequence[Answer],
    requests: Sequence[Request],
) -> Way:
    """The same by one of vLLM's own connectors of NIXL, whose agents are this package's."""
    prefill, decode = (
        starter.start(
            name,
            nixl_flags(role, connector=connector),
            core,
            sizes[core],
            # As `sglang-mooncake run` makes it.
            {**environment_for({}), **side_channel(starter.fleet.port())},
        )
        for core, (name, role) in enumerate([("prefill", "kv_producer"), ("decode", "kv_consumer")])
    )
    _wait(f"a prefill and a decode server with {connector}", [prefill, decode])
    with Proxy(prefill.url, decode.url) as proxy, Step("requests to the proxy of both"):
        answers = ask(proxy, requests)
    came = round(imported_tokens(decode))
    name = f"{connector}, TP {sizes[0]} to {sizes[1]}"
    return Way(name, len(compare(expected, answers)), came, came, "tokens")


def _wait(what: str, servers: Sequence[VllmServer]) -> None:
    with Step(f"starting {what}") as step:
        wait_ready(servers, tick=step.tick)


def _ask(server: VllmServer, requests: Sequence[Request]) -> list[Answer]:
    with Step(f"requests to the {server.process.name}"):
        answers = ask(server, requests)
    errors = [one.error for one in answers if one.error]
    if errors:
        raise ServingError(f"{len(errors)} requests failed: {errors[0]}\n{server.process.tail()}")
    return answers


def _way(
    name: str,
    expected: Sequence[Answer],
    got: Sequence[Answer],
    place: Path,
    server: VllmServer,
) -> Way:
    pages = pages_read(place / "te", server.process.pid)
    return Way(name, len(compare(expected, got)), _cached(got), pages)


def _cached(answers: Sequence[Answer]) -> int:
    return sum(one.cached_tokens for one in answers)


def _table(ways: Sequence[Way], requests: int) -> str:
    head = f"{'KV cache':28} {'equal':>9} {'cached tokens':>14} {'moved':>22}"
    lines = [
        f"{one.name:28} {requests - one.different:4}/{requests:<4} {one.cached_tokens:14}"
        f" {one.moved:11,} {one.unit}"
        for one in ways
    ]
    return "\n".join([head, *lines])
