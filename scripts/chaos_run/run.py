# SPDX-License-Identifier: Apache-2.0
"""A run: servers on their hosts, clients, and one fault after another."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
import msgspec
from cpu_serving.model import make_model
from cpu_serving.pools import leaked_pages
from cpu_serving.processes import ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import Fleet, ServerOptions, wait_ready
from cpu_serving.traffic import make_requests, run, send_all

from chaos_run.beside import Beside, kept_busy
from chaos_run.deployment import Deployment
from chaos_run.disturb import Disturber
from chaos_run.hosts import Hosts
from chaos_run.options import ChaosOptions
from chaos_run.peer import versions_of
from chaos_run.rates import Window
from chaos_run.resources import Held, grown, held_by, resident
from chaos_run.results import Happened, Result
from chaos_run.schedule import SERVERS, Fault, faults, within
from chaos_run.soak import Sample, thirds
from chaos_run.traffic import Known, Outcome, Way, ask_once, client

__all__ = ["Run"]

Tick = Callable[[str], None]

PROMPTS = 48
PROMPT_TOKENS_MAX = 800
WARM_UPS = 4
WARM_UP_S = 10.0
#: From the end of a fault until its victim serves again; a killed one has begun to answer by then.
RECOVERY_S = 60.0
PROBE_PAUSE_S = 0.2
#: Before and after a fault that is alone, the time in which undisturbed rates are taken; and that
#: for which the requests of the clients that rest have ended before.
QUIET_S = 6.0
REST_S = 2.0
#: For links of the last fault to be made anew, and those of dead servers to go.
SETTLE_S = 40.0
SAMPLES_S = 1.0
SOAK_SAMPLES_S = 5.0


class Run:
    """The servers, ready. Raises ServingError."""

    def __init__(self, options: ChaosOptions, hosts: Hosts, fleet: Fleet) -> None:
        self._options = options
        self._outcomes: list[Outcome] = []
        self._happened: list[Happened] = []
        self._samples: list[Sample] = []
        #: Clear while a fault is alone: only clients of the two pairs ask.
        self._others_ask = asyncio.Event()
        self._others_ask.set()
        self._known = _ask_one_server(options.seed, fleet)
        self._deployment = Deployment(options, hosts, fleet)
        self._servers, self._ways = self._deployment.servers, self._deployment.ways
        self._disturber = Disturber(
            self._deployment, hosts, self._known, options.seed, self._outcomes.append
        )

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
        leaked, held = dict[str, int](), dict[str, list[str]]()
        compared = options.backend is not None
        if compared or not any(one.lost for one in self._happened):
            with Step("looking for what was left behind") as step:
                leaked, busy = self._leaked()
                # Of others nobody knows what they keep on purpose.
                held = {} if compared else self._held_more(before, step.tick)
                for name, sentence in busy.items():
                    held.setdefault(name, []).append(sentence)
        outcomes, happened = tuple(self._outcomes), tuple(self._happened)
        return Result(
            options.seed,
            began_s,
            ended_s,
            self._ways,
            outcomes,
            happened,
            leaked,
            held,
            None if options.kinds else tuple(thirds(began_s, ended_s, self._samples, outcomes)),
            options.backend,
            versions_of(options.backend) if options.backend else "",
        )

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
        async with AsyncExitStack() as processes:
            await self._ask_beside(session, job, processes)

    async def _ask_beside(
        self,
        session: aiohttp.ClientSession,
        job: Callable[[], Awaitable[None]],
        processes: AsyncExitStack,
    ) -> None:
        options, stopping = self._options, asyncio.Event()
        of_pairs = [await self._clients_of_pair(processes, pair) for pair in (0, 1)]
        async with asyncio.TaskGroup() as clients:
            for n in range(options.clients):
                if (place := n % len(self._ways)) not in (0, 1):
                    clients.create_task(
                        client(
                            session,
                            self._ways[place],
                            self._known,
                            random.Random(options.seed * 1000 + n),
                            options.abort_share,
                            options.deadline_s,
                            self._outcomes.append,
                            stopping,
                            self._others_ask,
                        )
                    )
            try:
                await job()
            finally:
                stopping.set()
        for process in of_pairs:
            told = await process.said(2 * options.deadline_s)
            self._outcomes += msgspec.json.decode(told, type=list[Outcome])

    async def _clients_of_pair(self, processes: AsyncExitStack, pair: int) -> Beside:
        """On the cores of that pair, so that nothing but the machine is left that two pairs share
        while other clients rest."""
        options, deployment = self._options, self._deployment
        numbers = range(options.clients)
        count = sum(n % len(self._ways) == pair for n in numbers)
        how = (count, options.abort_share, options.deadline_s, options.seed * 1000 + pair)
        spec = deployment.clients_of(pair, self._known, *how)
        cores = deployment.cores(SERVERS[pair])
        process = await processes.enter_async_context(Beside("chaos_run.clients", [], cores))
        await process.tell(msgspec.json.encode(spec))
        return process

    async def _chaos(self, session: aiohttp.ClientSession, tick: Tick) -> None:
        options = self._options
        deadline_s = time.monotonic() + options.minutes * 60
        if not options.kinds:
            await self._soak(deadline_s, tick)
            return
        for fault in self._schedule():
            ended = len(self._outcomes)
            tick(f"{ended} requests; quiet for {fault.gap_s:.0f} s, then {fault}")
            await asyncio.sleep(fault.gap_s)
            if options.backend is None and time.monotonic() > deadline_s:
                break
            tick(f"{ended} requests; {fault}")
            disturb = self._alone if fault.alone else self._disturb
            happened = await disturb(session, fault)
            if options.backend is not None:
                happened = await self._in_service(happened, tick)
            self._happened.append(happened)
            if happened.lost and options.backend is None:
                break

    def _schedule(self) -> Iterable[Fault]:
        options = self._options
        if options.backend is None:
            return faults(options.seed, options.kinds, options.lasts_s)
        return within(options.seed, options.kinds, options.minutes * 60, options.lasts_s)

    async def _in_service(self, happened: Happened, tick: Tick) -> Happened:
        """In a comparison: who does not serve again is started again, and so are all others, as a
        fault must find nothing that an earlier one has left."""
        ended = [name for name, one in self._servers.items() if not one.process.alive()]
        if ended or happened.lost:
            tick(f"{happened.fault} left no service; starting all servers again")
            await self._deployment.start_all_again()
        return replace(happened, crashed=tuple(ended))

    async def _soak(self, deadline_s: float, tick: Tick) -> None:
        while time.monotonic() < deadline_s:
            self._samples.append(
                Sample(
                    time.monotonic(),
                    {name: resident(one.process.pid) for name, one in self._servers.items()},
                )
            )
            tick(f"{len(self._samples)} samples of memory")
            await asyncio.sleep(SOAK_SAMPLES_S)

    # --- faults ---

    async def _alone(self, session: aiohttp.ClientSession, fault: Fault) -> Happened:
        """With the clients of the two pairs alone, and time before and after it."""
        self._others_ask.clear()
        try:
            async with kept_busy(self._deployment.cores(fault.victim)):
                before = await _quiet()
                happened = await self._disturb(session, fault)
                after = await _quiet()
        finally:
            self._others_ask.set()
        return replace(happened, quiet=(before, after))

    async def _disturb(self, session: aiohttp.ClientSession, fault: Fault) -> Happened:
        began_s = time.monotonic()
        try:
            undone = await self._disturber.carry_out(fault)
        except ServingError as error:
            now_s = time.monotonic()
            return Happened(fault, began_s, now_s, 0.0, lost=str(error))
        ways = [way for way in self._ways if fault.victim in way.servers]
        waited = await asyncio.gather(*(self._recovered(session, way) for way in ways))
        recovered_s = time.monotonic() - undone.at_s
        lost = next((why for why in waited if why), "")
        if lost:
            lost += f"\n{self._servers[fault.victim].process.tail()}"
        return Happened(fault, began_s, undone.at_s, recovered_s, let_in=undone.let_in, lost=lost)

    async def _recovered(self, session: aiohttp.ClientSession, way: Way) -> str:
        """Asks until a request over the way is answered; why none was, else empty."""
        deadline_s = time.monotonic() + RECOVERY_S
        rng = random.Random(f"{self._options.seed} {way.name}")
        error = ""
        while (until_s := deadline_s - time.monotonic()) > 0:
            outcome = await ask_once(session, way, rng.choice(self._known), None, until_s)
            self._outcomes.append(outcome)
            if outcome.end == "equal":
                return ""
            error = outcome.error
            await asyncio.sleep(PROBE_PAUSE_S)
        return f"after {RECOVERY_S:.0f} s requests over {way.name} still fail: {error}"

    # --- what is left behind ---

    def _held_when_idle(self, tick: Tick) -> dict[str, dict[str, Held]]:
        for server in self._servers.values():
            tick(f"waiting until the {server.process.name} is idle")
            leaked_pages(server)
        return {name: held_by(server.process.pid) for name, server in self._servers.items()}

    def _leaked(self) -> tuple[dict[str, int], dict[str, str]]:
        """Pages by server; and what is wrong with those that do not become idle."""
        leaked, busy = dict[str, int](), dict[str, str]()
        for name, server in self._servers.items():
            try:
                leaked[name] = leaked_pages(server)
            except ServingError as error:
                busy[name] = str(error).splitlines()[0]
        return leaked, busy

    def _held_more(self, before: dict[str, dict[str, Held]], tick: Tick) -> dict[str, list[str]]:
        """Of servers that were there all the time, and of those that were started again beside what
        the first ones held."""
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


async def _quiet() -> Window:
    await asyncio.sleep(REST_S)
    begin_s = time.monotonic()
    await asyncio.sleep(QUIET_S)
    return Window(begin_s, time.monotonic())


def _ask_one_server(seed: int, fleet: Fleet) -> list[Known]:
    requests = make_requests(PROMPTS, PROMPT_TOKENS_MAX, seed=seed)
    single = fleet.server("single", ServerOptions(make_model("llama")))
    with Step("known answers of one ordinary server") as step:
        wait_ready([single], tick=step.tick)
        answers = send_all(single.url, requests, 4, tick=step.tick)
    single.stop()
    for answer in answers:
        if answer.error:
            raise ServingError(f"the ordinary server failed a request: {answer.error}")
    return [Known(r, a.output_ids) for r, a in zip(requests, answers, strict=True)]
