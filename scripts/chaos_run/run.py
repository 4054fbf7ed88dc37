# SPDX-License-Identifier: Apache-2.0
"""A run: servers on their hosts, clients, and one fault after another."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable

import aiohttp
from cpu_serving.model import make_model
from cpu_serving.pools import leaked_pages
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, Role, Server, ServerOptions, wait_ready, with_secret
from cpu_serving.traffic import Answer, Request, make_requests, run, send, send_all

from bootstrap_server.secret_file import write_secret_file
from chaos_run.hosts import Hosts
from chaos_run.options import ChaosOptions
from chaos_run.resources import Held, grown, held_by
from chaos_run.results import Happened, Result
from chaos_run.schedule import SERVERS, Fault, faults
from chaos_run.stranger import attack
from chaos_run.traffic import Ask, Known, Outcome, Way, ask_once, client, through

__all__ = ["Run"]

Tick = Callable[[str], None]

PROMPTS = 48
PROMPT_TOKENS_MAX = 800
WARM_UPS = 4
WARM_UP_S = 10.0
#: From the end of a fault until its victim serves again; a killed one has begun to answer by then.
RECOVERY_S = 60.0
PROBE_PAUSE_S = 0.2
#: For links of the last fault to be made anew, and those of dead servers to go.
SETTLE_S = 40.0
SAMPLES_S = 1.0


class Run:
    """The servers, ready. Raises ServingError."""

    def __init__(self, options: ChaosOptions, hosts: Hosts, fleet: Fleet) -> None:
        self._options, self._hosts, self._fleet = options, hosts, fleet
        self._servers: dict[str, Server] = {}
        self._restarts = 0
        self._secret = fleet.run_dir / "secret" if options.secret else None
        if self._secret is not None:
            write_secret_file(self._secret)
        self._outcomes: list[Outcome] = []
        self._happened: list[Happened] = []
        self._known = self._ask_one_server()
        for name in SERVERS:
            self._servers[name] = self._start(name)
        with Step("starting two prefill servers, two decode servers and the router") as step:
            wait_ready(self._servers.values(), tick=step.tick)
            servers = list(self._servers.values())
            self._router = fleet.router(servers[:2], servers[2:])
            wait_ready([self._router], tick=step.tick)
        self._ways = self._make_ways()

    def result(self) -> Result:
        """Traffic and faults, and then what is left of them."""
        options = self._options
        with Step("warming up") as step:
            run(self._warm_up, 2 * options.deadline_s)
            before = self._held_when_idle(step.tick)
        began_s = time.monotonic()
        with Step(f"{options.minutes:g} minutes of chaos, seed {options.seed}") as step:
            run(
                lambda session: self._with_clients(
                    session, lambda: self._chaos(session, step.tick)
                ),
                2 * options.deadline_s,  # each request has its own
            )
        ended_s = time.monotonic()
        with Step("looking for what was left behind") as step:
            leaked = {name: leaked_pages(server) for name, server in self._servers.items()}
            held = self._held_more(before, step.tick)
        outcomes, happened = tuple(self._outcomes), tuple(self._happened)
        return Result(options.seed, began_s, ended_s, self._ways, outcomes, happened, leaked, held)

    # --- servers and ways ---

    def _start(self, name: str, old: Server | None = None) -> Server:
        env = {"SGLANG_MOONCAKE_TRANSPORTS": "tcp"}
        if self._options.layerwise:
            env["SGLANG_MOONCAKE_LAYERWISE"] = "1"
        role: Role = "prefill" if name.startswith("prefill") else "decode"
        host = self._hosts.address(name)
        how = ServerOptions(make_model("llama"), extra_env=env, host=host)
        if self._secret is not None:
            how = with_secret(how, self._secret)
        ports = {"port": old.port, "bootstrap_port": old.bootstrap_port} if old else {}
        label = name if old is None else f"{name}-again-{self._restarts}"
        with self._hosts.on(name):
            return self._fleet.server(role, how, name=label, **ports)

    def _ask_one_server(self) -> list[Known]:
        requests = make_requests(PROMPTS, PROMPT_TOKENS_MAX, seed=self._options.seed)
        single = self._fleet.server("single", ServerOptions(make_model("llama")))
        with Step("known answers of one ordinary server") as step:
            wait_ready([single], tick=step.tick)
            answers = send_all(single.url, requests, 4, tick=step.tick)
        single.stop()
        for answer in answers:
            if answer.error:
                raise ServingError(f"the ordinary server failed a request: {answer.error}")
        return [Known(r, a.output_ids) for r, a in zip(requests, answers, strict=True)]

    def _make_ways(self) -> tuple[Way, ...]:
        ways = [
            Way(f"{first} to {second}", frozenset((first, second)), self._pair(first, second))
            for first, second in zip(SERVERS[:2], SERVERS[2:], strict=True)
        ]
        url = self._router.url

        def by_router(session: aiohttp.ClientSession, request: Request) -> asyncio.Task[Answer]:
            return asyncio.create_task(send(session, url, request))

        ways.append(Way("router", frozenset(), by_router))
        for first, second in zip(SERVERS[:2], reversed(SERVERS[2:]), strict=True):
            names = frozenset((first, second))
            ways.append(Way(f"{first} to {second}", names, self._pair(first, second)))
        return tuple(ways)

    def _pair(self, first: str, second: str) -> Ask:
        return through(lambda: (self._servers[first], self._servers[second]))

    # --- traffic ---

    async def _warm_up(self, session: aiohttp.ClientSession) -> None:
        for way in self._ways:
            for known in self._known[:WARM_UPS]:
                outcome = await ask_once(session, way, known, None, self._options.deadline_s)
                if outcome.end != "equal":
                    raise ServingError(
                        f"before any fault a request over {way.name} ended {outcome.end}: "
                        f"{outcome.error}"
                    )
        # Pools of threads grow to their size only once several requests ask for them at a time.
        await self._with_clients(session, lambda: asyncio.sleep(WARM_UP_S))
        self._outcomes.clear()

    async def _with_clients(
        self, session: aiohttp.ClientSession, job: Callable[[], Awaitable[None]]
    ) -> None:
        """Clients ask for as long as `job` takes. What they have asked by then still ends, or is
        late."""
        options, stopping = self._options, asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for n in range(options.clients):
                clients.create_task(
                    client(
                        session,
                        self._ways[n % len(self._ways)],
                        self._known,
                        random.Random(options.seed * 1000 + n),
                        options.abort_share,
                        options.deadline_s,
                        self._outcomes.append,
                        stopping,
                    )
                )
            try:
                await job()
            finally:
                stopping.set()

    async def _chaos(self, session: aiohttp.ClientSession, tick: Tick) -> None:
        options = self._options
        deadline_s = time.monotonic() + options.minutes * 60
        for fault in faults(options.seed, options.kinds):
            ended = len(self._outcomes)
            tick(f"{ended} requests; quiet for {fault.gap_s:.0f} s, then {fault}")
            await asyncio.sleep(fault.gap_s)
            if time.monotonic() > deadline_s:
                break
            tick(f"{ended} requests; {fault}")
            self._happened.append(await self._disturb(session, fault))

    # --- faults ---

    async def _disturb(self, session: aiohttp.ClientSession, fault: Fault) -> Happened:
        server = self._servers[fault.victim]
        began_s = time.monotonic()
        hosts, process = self._hosts, server.process
        match fault.kind:
            case "kill":
                await asyncio.to_thread(process.kill)
                self._restarts += 1
                self._servers[fault.victim] = again = self._start(fault.victim, server)
                await asyncio.to_thread(wait_ready, [again])
            case "freeze":
                await self._between(process.freeze, process.thaw, fault.lasts_s)
            case "registry":
                freeze = lambda: os.kill(process.pid, signal.SIGSTOP)  # noqa: E731
                thaw = lambda: os.kill(process.pid, signal.SIGCONT)  # noqa: E731
                await self._between(freeze, thaw, fault.lasts_s)
            case "stranger":
                ports = hosts.listening_ports(fault.victim)
                await attack(hosts.address(fault.victim), ports, self._options.seed, fault.lasts_s)
            case "cut" | "slow" | "lossy":
                disturb = {"cut": hosts.cut, "slow": hosts.slow, "lossy": hosts.lossy}[fault.kind]
                victim = fault.victim
                await self._between(
                    lambda: disturb(victim), lambda: hosts.mend(victim), fault.lasts_s
                )
        ended_s = time.monotonic()
        await self._recovered(session, fault)
        return Happened(fault, began_s, ended_s, time.monotonic() - ended_s)

    async def _between(
        self, begin: Callable[[], None], end: Callable[[], None], lasts_s: float
    ) -> None:
        begin()
        try:
            await asyncio.sleep(lasts_s)
        finally:
            end()

    async def _recovered(self, session: aiohttp.ClientSession, fault: Fault) -> None:
        """Once a request over each way with the victim was answered."""
        deadline_s = time.monotonic() + RECOVERY_S
        rng = random.Random(self._options.seed)
        left = [way for way in self._ways if fault.victim in way.servers]
        while left:
            until_s = deadline_s - time.monotonic()
            if until_s <= 0:
                raise ServingError(
                    f"{RECOVERY_S:.0f} s after {fault} requests over {left[0].name} still fail: "
                    f"{self._outcomes[-1].error}\n{self._servers[fault.victim].process.tail()}"
                )
            outcome = await ask_once(session, left[0], rng.choice(self._known), None, until_s)
            self._outcomes.append(outcome)
            if outcome.end == "equal":
                left.pop(0)
            else:
                await asyncio.sleep(PROBE_PAUSE_S)

    # --- what is left behind ---

    def _held_when_idle(self, tick: Tick) -> dict[str, dict[int, Held]]:
        for server in self._servers.values():
            tick(f"waiting until the {server.process.name} is idle")
            leaked_pages(server)
        return {name: held_by(server.process.pid) for name, server in self._servers.items()}

    def _held_more(self, before: dict[str, dict[int, Held]], tick: Tick) -> dict[str, list[str]]:
        """Of processes that were there all the time."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            found = {
                name: grown(before[name], held_by(server.process.pid))
                for name, server in self._servers.items()
            }
            if not any(found.values()) or time.monotonic() > deadline_s:
                return found
            tick("waiting for links that are gone to be closed")
            time.sleep(SAMPLES_S)
