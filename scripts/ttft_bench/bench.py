# SPDX-License-Identifier: Apache-2.0
"""A run: the servers, and requests to them in turn.

All kinds share a decode server. PD with and without overlap have a prefill server each, as how KV
leaves is a setting of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np
import psutil
from cpu_serving import stats, traffic
from cpu_serving.direct import Streamed, in_a_room, stream
from cpu_serving.model import FIRST_PLAIN_TOKEN, VOCAB_SIZE, make_llama
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready

from ttft_bench.network import FAR, NEAR, Network
from ttft_bench.options import TtftOptions
from ttft_bench.rates import EVEN, Rate
from ttft_bench.results import Carried, Kind, Point, Sample

__all__ = ["Bench"]

Tick = Callable[[str], None]

# Beside the longest prompt and its answer: what a decode server keeps free for running requests.
SPARE_TOKENS = 2048
CALIBRATIONS = 3
# Of what leaves a network interface, what is TCP's payload: 1448 of 1514 bytes of a packet.
PAYLOAD = 1448 / 1514
# glibc gives freed memory back to the kernel once enough of it lies at the heap's end. Whether that
# happens in each layer of a forward or never hangs on what else is allocated: 25,000 page faults in
# one server, 700 in another, and a tenth of the forward. A GPU's allocator keeps what it has. The
# second is the largest value that there is.
KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
BUSY_WINDOW_S = 0.3
# Others that take less than this share of all processors are no reason to wait.
QUIET = 0.05


class Bench:
    """The servers, ready, and what they are asked."""

    def __init__(self, options: TtftOptions, network: Network, fleet: Fleet) -> None:
        """Starts the servers that the asked kinds need; raises ServingError."""
        self._options = options
        self._network = network
        self._rng = np.random.default_rng(options.seed)
        #: Share of the processors that others had before a round, for each round.
        self.others_busy: list[float] = []
        self._servers: dict[Kind, Server] = {}
        near = self._server_options(NEAR)
        if "one" in options.kinds:
            self._servers["one"] = fleet.server("single", near, name="one server")
        if set(options.kinds) - {"one"}:
            self._decode = fleet.server("decode", near)
        with network.far_side():
            for kind in options.kinds:
                if kind != "one":
                    how = self._server_options(FAR, by_layers=kind == "layers")
                    self._servers[kind] = fleet.server("prefill", how, name=f"prefill-{kind}")
        waiting = list(self._servers.values())
        if set(options.kinds) - {"one"}:
            waiting.append(self._decode)
        with Step(f"starting {len(waiting)} servers") as step:
            wait_ready(waiting, tick=step.tick)

    def points(self) -> list[Point]:
        """Measures every prompt at every rate."""
        with Step("warming up") as step:
            compute_s = self._warm_up(step.tick)
        found = []
        for rate in self._options.rates:
            for prompt in self._options.prompts:
                with Step(f"{prompt} tokens at {rate.text}") as step:
                    found.append(self._point(rate, prompt, compute_s[prompt], step.tick))
        return found

    def _server_options(self, host: str, by_layers: bool = False) -> ServerOptions:
        options = self._options
        env = {"SGLANG_MOONCAKE_TRANSPORTS": "tcp", **KEEPING_MEMORY}
        if by_layers:
            env["SGLANG_MOONCAKE_LAYERWISE"] = "1"
        return ServerOptions(
            make_llama(options.model),
            page_size=options.page_size,
            chunked_prefill_size=options.chunked_prefill_size or -1,
            max_total_tokens=_round_up(options.model.positions + SPARE_TOKENS, options.page_size),
            # Metrics make SGLang say when a forward began and ended.
            extra_args=("--disable-radix-cache", "--enable-metrics"),
            extra_env=env,
            host=host,
        )

    def _warm_up(self, tick: Tick) -> dict[int, float]:
        """Time to first token of the ordinary server, or of the forward, for each prompt."""
        self._network.limit(None)
        found = {}
        for prompt in self._options.prompts:
            for kind in self._options.kinds:
                tick(f"{prompt} tokens, {kind}")
                self._ask(kind, self._prompt(prompt), 0)
            first = self._options.kinds[0]
            self._wait_for_quiet(tick)
            samples = [self._ask(first, self._prompt(prompt), 0) for _ in range(CALIBRATIONS)]
            # Others can only make it longer.
            found[prompt] = min(s.ttft_s if first == "one" else s.forward_s for s in samples)
        return found

    def _point(self, rate: Rate, prompt: int, compute_s: float, tick: Tick) -> Point:
        bits_per_s = rate.bits_per_s
        if rate == EVEN:
            nbytes = prompt * self._options.model.kv_bytes_per_token
            bits_per_s = nbytes * 8 / compute_s / PAYLOAD
        self._network.limit(bits_per_s)
        tick("the network's rate")
        bytes_per_s = self._network.measured_bytes_per_s(bits_per_s)
        prefills = [kind for kind in self._options.kinds if kind != "one"]
        for kind in prefills:  # what servers believe of the rate is of the last point
            self._ask(kind, self._prompt(self._options.prompts[0]), 0)
        before = {kind: self._figures(kind) for kind in prefills}
        samples = self._rounds(prompt, tick)
        carried = {kind: self._carried(kind, before[kind]) for kind in prefills}
        dropped = self._network.dropped_packets()
        if dropped:
            raise ServingError(f"the limited network dropped {dropped} packets: its queue is short")
        layers = self._options.model.layers
        return Point(rate.text, bits_per_s, bytes_per_s, prompt, layers, tuple(samples), carried)

    def _rounds(self, prompt: int, tick: Tick) -> list[Sample]:
        kinds = self._options.kinds
        samples = []
        for number in range(self._options.rounds):
            self.others_busy.append(self._wait_for_quiet(tick))
            request = self._prompt(prompt)
            first = number % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                tick(f"round {number + 1} of {self._options.rounds}, {kind}")
                samples.append(self._ask(kind, request, number))
        return samples

    def _ask(self, kind: Kind, request: traffic.Request, number: int) -> Sample:
        asked = [self._servers[kind], *([self._decode] if kind != "one" else [])]
        before = [_cpu_s(server) for server in asked]
        sample = traffic.run(lambda session: self._measure(session, kind, request, number))
        used = [_cpu_s(server) - earlier for server, earlier in zip(asked, before, strict=True)]
        return replace(sample, cpu_s=used[0], decode_cpu_s=sum(used[1:]))

    async def _measure(
        self, session: aiohttp.ClientSession, kind: Kind, request: traffic.Request, number: int
    ) -> Sample:
        server = self._servers[kind]
        began_s = time.monotonic()
        if kind == "one":
            answer = computed = await stream(session, server, request)
        else:
            request = in_a_room(server, request)
            async with asyncio.TaskGroup() as group:
                prefill = group.create_task(stream(session, server, request))
                decode = group.create_task(stream(session, self._decode, request))
            answer, computed = decode.result(), prefill.result()
        return Sample(
            kind, number, answer.first_token_s - began_s, _forward_s(computed), answer.output_ids
        )

    def _prompt(self, tokens: int) -> traffic.Request:
        ids = self._rng.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, tokens)
        return traffic.Request(tuple(ids.tolist()))

    def _figures(self, kind: Kind) -> stats.RankStats:
        (figures,) = stats.collect(self._servers[kind], time.time())
        return figures

    def _carried(self, kind: Kind, before: stats.RankStats) -> Carried:
        after = self._figures(kind)
        rounds = self._options.rounds
        hooks_us = after.hooks_us[len(before.hooks_us) :]
        return Carried(
            nbytes=(after.bytes - before.bytes) / rounds,
            early_nbytes=(after.bytes_early - before.bytes_early) / rounds,
            handover_s=median(after.handover_ms[len(before.handover_ms) :]) / 1000,
            hooks_s=median(hooks_us) / 1e6 if hooks_us else 0.0,
            fallbacks={
                reason: count - before.fallbacks.get(reason, 0)
                for reason, count in after.fallbacks.items()
                if count > before.fallbacks.get(reason, 0)
            },
        )

    def _wait_for_quiet(self, tick: Tick) -> float:
        """Share of the processors that is taken while no request is under way."""
        deadline = time.monotonic() + self._options.wait_for_quiet_s
        while True:
            busy = _busy_share()
            if busy < QUIET or time.monotonic() > deadline:
                return busy
            tick("waiting for others to leave the processors")


def _forward_s(answer: Streamed) -> float:
    try:
        meta = answer.meta
        return float(meta["prefill_finished_time"]) - float(meta["forward_entry_time"])
    except KeyError as error:
        raise ServingError(f"SGLang does not say when its forward ran: no {error}") from error


def _cpu_s(server: Server) -> float:
    leader = psutil.Process(server.process.pid)
    times = [one.cpu_times() for one in (leader, *leader.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _busy_share() -> float:
    before = _processor_times()
    time.sleep(BUSY_WINDOW_S)
    busy, idle = (
        after - earlier for after, earlier in zip(_processor_times(), before, strict=True)
    )
    return busy / (busy + idle) if busy + idle else 0.0


def _processor_times() -> tuple[int, int]:
    """Busy and idle, of all processors together, in ticks: the first line of proc_stat(5)."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, idle


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
