# SPDX-License-Identifier: Apache-2.0
"""A run: the servers, their routers, and the loads, which each way gets in turn.

All ways but the one with the store have the same prefill servers, and all have the same decode
servers. Caches are emptied before each turn, and prompts are new in each round, as the store keeps
what it has.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
import psutil
import requests
from cpu_serving.architectures import LlamaSize
from cpu_serving.model import make_llama
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, Router, RouterKind, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_store
from cpu_serving.traffic import Request, make_requests, run, send_all

from route_bench.load import Load, oracle_hits, sampled, scaled
from route_bench.options import BenchOptions, Way
from route_bench.results import Sample, Turn, differences

__all__ = ["Bench"]

PAGE_SIZE: Final = 16
NEW_TOKENS: Final = 4
KINDS: Final[Mapping[Way, RouterKind]] = {
    "mini-lb": "mini-lb",
    "cache_aware": "sglang-router",
    "ours": "ours",
    "ours+store": "ours",
}
#: Prompts by which the speed of a server is found out.
CALIBRATIONS: Final = 5
REFUSED: Final = frozenset({429, 503})
TIMEOUT_S: Final = 60.0
#: A server tells of a request in its metrics soon after it has ended.
SETTLED_S: Final = 20.0
_COUNTER: Final = r"^sglang:{}(?:\{{.*\}})? (\S+)$"


class Bench:
    """The servers, ready, and what they are asked."""

    def __init__(
        self, options: BenchOptions, fleet: Fleet, directory: Path, loads: Mapping[str, list[Any]]
    ) -> None:
        """``directory``: where the store's sockets may be. ``loads``: requests of traces, by name.
        Starts all servers; raises ServingError."""
        self._options, self._fleet = options, fleet
        self._loads = {
            name: sampled(found, options.requests, options.seed) for name, found in loads.items()
        }
        heads = options.hidden // 64
        self._size = LlamaSize(
            options.layers,
            options.hidden,
            4 * options.hidden,
            heads,
            64,
            positions=options.prompt_max + 64,
        )
        plain = self._server_options()
        self._prefill: dict[Way, list[Server]] = {}
        if set(options.ways) - {"ours+store"}:
            servers = [self._prefill_server(plain, f"prefill-{n}") for n in range(options.prefill)]
            self._prefill = {way: servers for way in options.ways if way != "ours+store"}
        if "ours+store" in options.ways:
            stored = with_store(plain, directory, self._store_memory(), linger_s=1)
            self._prefill["ours+store"] = [
                self._prefill_server(stored, f"prefill-store-{n}") for n in range(options.prefill)
            ]
        self._decode = [
            fleet.server("decode", plain, name=f"decode-{n}") for n in range(options.decode)
        ]
        self._one = fleet.server("single", plain, name="one server")
        servers = list(dict.fromkeys(one for each in self._prefill.values() for one in each))
        servers += [*self._decode, self._one]
        with Step(f"starting {len(servers)} servers") as step:
            wait_ready(servers, tick=step.tick)
        told = json.dumps({"directory": str(directory)})
        self._routers = {
            way: fleet.router(
                self._prefill[way],
                self._decode,
                name=f"router-{n}",
                kind=KINDS[way],
                extra_args=("--store", told) if way == "ours+store" else (),
            )
            for n, way in enumerate(options.ways)
        }
        wait_ready(self._routers.values())
        self._token_s = 0.0

    def run(self) -> tuple[list[Turn], list[str]]:
        """All turns, and a sentence for each answer that has other tokens than it should."""
        with Step("warming up") as step:
            self._warm_up(step.tick)
        turns: list[Turn] = []
        expected = {}
        for number in range(self._options.rounds):
            for name in self._loads:
                load = self._load(name, number)
                if number == 0:
                    expected[name] = self._alone(load)
                ways = self._options.ways
                first = number % len(ways)
                for way in ways[first:] + ways[:first]:
                    with Step(f"round {number + 1}, {name}, {way}"):
                        turns.append(self._turn(name, load, way, number))
        return turns, differences(turns, expected)

    def _server_options(self) -> ServerOptions:
        return ServerOptions(
            make_llama(self._size),
            page_size=PAGE_SIZE,
            extra_args=("--enable-metrics",),
            extra_env={"SGLANG_MOONCAKE_TRANSPORTS": "tcp"},
        )

    def _prefill_server(self, options: ServerOptions, name: str) -> Server:
        ports = [self._fleet.port(), self._fleet.port()]
        published = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }
        args = (*options.extra_args, "--kv-events-config", json.dumps(published))
        return self._fleet.server("prefill", replace(options, extra_args=args), name=name)

    def _store_memory(self) -> str:
        """Of the host: all prompts of all rounds have room there, twice."""
        options = self._options
        tokens = sum(self._load(name, 0).tokens for name in self._loads) * options.rounds
        nbytes = 2 * tokens * self._size.kv_bytes_per_token
        return f"{(nbytes >> 20) + 64}MiB"

    def _load(self, name: str, number: int) -> Load:
        options = self._options
        seed = [options.seed, number, *name.encode()]
        return scaled(self._loads[name], options.block_tokens, options.prompt_max, seed)

    def _warm_up(self, tick: Any) -> None:
        """Each router once, and how long a token takes."""
        length = min(1024, self._options.prompt_max)
        for way, router in self._routers.items():
            tick(way)
            warm = make_requests(2 * self._options.prefill, length // 2, seed=9)
            errors = [one.error for one in send_all(router.url, warm, 2) if one.error]
            if errors:
                raise ServingError(f"{way} does not serve: {errors[0]}")
        asked = make_requests(CALIBRATIONS + 2, length, seed=8, new_tokens=1)
        asked = [one for one in asked if len(one.input_ids) > length // 4]
        took = [
            answer.elapsed_s / len(one.input_ids)
            for one in asked
            for answer in send_all(self._one.url, [one], 1)
        ]
        self._token_s = median(took)

    def _alone(self, load: Load) -> list[tuple[int, ...]]:
        """The tokens of one ordinary server for the first prompts."""
        asked = [Request(one, NEW_TOKENS) for one in load.prompts[: self._options.compared]]
        answers = send_all(self._one.url, asked, 1)
        errors = [one.error for one in answers if one.error]
        if errors:
            raise ServingError(f"one ordinary server fails: {errors[0]}")
        return [one.output_ids for one in answers]

    def _turn(self, name: str, load: Load, way: Way, number: int) -> Turn:
        servers, router = self._prefill[way], self._routers[way]
        for server in (*servers, *self._decode):
            flush(server)
        if KINDS[way] == "ours":  # It has to hear of it.
            requests.post(f"{router.url}/flush_cache", timeout=TIMEOUT_S).raise_for_status()
        before = [_figures(server) for server in servers]
        busy = psutil.cpu_percent(0.3) / 100
        cores = len(os.sched_getaffinity(0))
        whole_s = load.tokens * self._token_s / (cores * self._options.load)
        samples = run(lambda session: _send(session, router, load, whole_s))
        told = sum(
            len(prompt)
            for prompt, one in zip(load.prompts, samples, strict=True)
            if one.ttft_s is not None
        )
        prompts, hits = _settled(servers, before, told)
        errors = _median_errors(router) if KINDS[way] == "ours" else ()
        oracle = sum(oracle_hits(load.prompts, PAGE_SIZE))
        return Turn(name, way, number, tuple(samples), prompts, hits, oracle, errors, busy)


async def _send(
    session: aiohttp.ClientSession, router: Router, load: Load, whole_s: float
) -> list[Sample]:
    begun_s = time.monotonic()

    async def one(prompt: tuple[int, ...], at: float) -> Sample:
        await asyncio.sleep(begun_s + at * whole_s - time.monotonic())
        try:
            return await _stream(session, router.url, Request(prompt, NEW_TOKENS))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Sample(None, error=f"{type(error).__name__}: {error}")

    pairs = zip(load.prompts, load.at, strict=True)
    return list(await asyncio.gather(*(one(prompt, at) for prompt, at in pairs)))


async def _stream(session: aiohttp.ClientSession, url: str, request: Request) -> Sample:
    sent_s, first_s, last = time.monotonic(), None, {}
    body = request.body() | {"stream": True}
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status in REFUSED:
            return Sample(None, refused=True)
        if response.status != 200:
            return Sample(None, error=f"status {response.status}: {await response.text()}")
        async for line in response.content:
            text = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or text == b"[DONE]":
                continue
            last = json.loads(text)
            if "error" in last:
                return Sample(None, error=str(last["error"]))
            if first_s is None and last.get("output_ids"):
                first_s = time.monotonic()
    output_ids = tuple(last.get("output_ids", ()))
    if first_s is None or len(output_ids) != request.new_tokens:
        return Sample(None, error=f"the answer ended after {len(output_ids)} tokens: {last}")
    return Sample(first_s - sent_s, output_ids)


def _settled(
    servers: Sequence[Server], before: Sequence[tuple[int, int]], told: int
) -> tuple[int, int]:
    """Tokens of prompts and of hits since ``before``, once the servers have told of ``told``."""
    deadline_s = time.monotonic() + SETTLED_S
    while True:
        after = [_figures(server) for server in servers]
        prompts, hits = (
            sum(now[n] - then[n] for now, then in zip(after, before, strict=True)) for n in (0, 1)
        )
        if prompts >= told:
            return prompts, hits
        if time.monotonic() > deadline_s:
            raise ServingError(f"prefill servers tell of {prompts} tokens of prompts, not {told}")
        time.sleep(0.1)


def _figures(server: Server) -> tuple[int, int]:
    """Tokens of prompts, and those of them that were in a cache."""
    text = requests.get(f"{server.url}/metrics", timeout=TIMEOUT_S).text
    names = ("prompt_tokens_total", "cached_tokens_total")
    prompts, hits = (
        sum(float(one) for one in re.findall(_COUNTER.format(name), text, re.MULTILINE))
        for name in names
    )
    return int(prompts), int(hits)


def _median_errors(router: Router) -> tuple[float, ...]:
    status = requests.get(f"{router.url}/v1/router", timeout=TIMEOUT_S).json()
    found = [one["median_error"] for one in status["servers"]["prefill"]]
    return tuple(one for one in found if one is not None)
