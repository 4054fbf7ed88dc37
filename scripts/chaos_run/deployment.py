# SPDX-License-Identifier: Apache-2.0
"""The servers of a run, each on a host of its own, and how clients reach them.

`prefill-0` has its registry in its main process, as SGLang starts it. That of `prefill-1` is a
process of its own (`python -m bootstrap_server`) on another host, which has the port of the first.
On a machine of several cores each pair has its own half of them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import aiohttp
from cpu_serving.model import make_model
from cpu_serving.processes import ManagedProcess, ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import (
    Fleet,
    Role,
    Router,
    Server,
    ServerOptions,
    base_environment,
    wait_ready,
    with_secret,
)
from cpu_serving.traffic import Answer, Request, send

from bootstrap_server import BootstrapClient, BootstrapError, Instance
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_secret_file, write_secret_file
from chaos_run.backends import STOCK
from chaos_run.clients import Spec
from chaos_run.hosts import Hosts
from chaos_run.options import ChaosOptions
from chaos_run.rates import pair_name
from chaos_run.schedule import REGISTRY, SERVERS, pair_of
from chaos_run.stock_registry import stock_port
from chaos_run.traffic import Known, PairAddress, Way, through

__all__ = ["Deployment"]

#: On every prefill host.
_REGISTRY_PORT = 8998
_CLIENT_WAITS_S = 10.0


class Deployment:
    """Four servers, a registry and the router, ready. Raises ServingError."""

    def __init__(self, options: ChaosOptions, hosts: Hosts, fleet: Fleet) -> None:
        self._options, self._hosts, self._fleet = options, hosts, fleet
        self._starts = 0
        self._stock = STOCK.get(options.backend) if options.backend else None
        self._secret = fleet.run_dir / "secret" if options.secret else None
        if self._secret is not None:
            write_secret_file(self._secret)
        if self._stock is None:
            hosts.forward(SERVERS[1], _REGISTRY_PORT, REGISTRY)
            self.start_registry()
        self.servers: dict[str, Server] = {}
        for name in SERVERS:
            self.start(name)
        with Step("starting two prefill servers, two decode servers and the router") as step:
            wait_ready(self.servers.values(), tick=step.tick)
            servers = list(self.servers.values())
            self._router: Router = fleet.router(servers[:2], servers[2:])
            wait_ready([self._router], tick=step.tick)
        self.ways = self._make_ways()

    def start(self, name: str) -> Server:
        """Start it; again, if it has been there, at the same ports."""
        old = self.servers.get(name)
        env = {} if self._stock else {"SGLANG_MOONCAKE_TRANSPORTS": "tcp"}
        if self._options.layerwise:
            env["SGLANG_MOONCAKE_LAYERWISE"] = "1"
        role: Role = "prefill" if name.startswith("prefill") else "decode"
        flags = ("--disaggregation-transfer-backend", self._stock.flag) if self._stock else ()
        address = self._hosts.address(name)
        how = ServerOptions(make_model("llama"), extra_args=flags, extra_env=env, host=address)
        if self._secret is not None:
            how = with_secret(how, self._secret)
        with self._hosts.on(name, self.cores(name)):
            self.servers[name] = self._fleet.server(
                role,
                how,
                name=self._label(name),
                port=old.port if old else None,
                bootstrap_port=_REGISTRY_PORT,
            )
        return self.servers[name]

    async def start_all_again(self) -> None:
        """Of a fleet that serves no more, as an operator would. Raises ServingError."""
        for server in self.servers.values():
            await asyncio.to_thread(server.process.kill)
        again = [self.start(name) for name in SERVERS]  # signals are the main thread's
        await asyncio.to_thread(wait_ready, again)

    def start_registry(self) -> ManagedProcess:
        """That of `prefill-1`, empty."""
        argv = ["bootstrap_server", "--host", self._hosts.address(SERVERS[1])]
        argv += ["--port", str(_REGISTRY_PORT), "--log-level", "info"]
        if self._secret is not None:
            argv += ["--secret-file", str(self._secret)]
        log = self._fleet.run_dir / f"{self._label(REGISTRY)}.log"
        with self._hosts.on(REGISTRY, sorted(os.sched_getaffinity(0))):
            self.registry = self._fleet.process(REGISTRY, argv, base_environment(), log)
        return self.registry

    def cores(self, name: str) -> list[int]:
        """Of the machine, those of a server."""
        every = sorted(os.sched_getaffinity(0))
        return every[pair_of(name) :: 2] if len(every) > 1 else every

    def instance(self, prefill: str) -> Instance:
        """What the registry of a prefill server tells of it. Raises ServingError."""
        keys = Keys()
        if self._secret is not None:
            keys = Keys.from_secrets(read_secret_file(self._secret))
        try:
            with BootstrapClient(self.registry_address(prefill), keys=keys.registry) as client:
                return client.instance(wait_s=_CLIENT_WAITS_S)
        except BootstrapError as error:
            raise ServingError(f"the registry of {prefill} says nothing of it: {error}") from error

    def registry_address(self, prefill: str) -> str:
        return f"{self._hosts.address(prefill)}:{_REGISTRY_PORT}"

    def control_ports(self, name: str) -> list[int]:
        """On which prefill ranks wait for control links of this server, or to it."""
        prefills = [name] if name in SERVERS[:2] else SERVERS[:2]
        if self._stock is not None:
            return [stock_port(self.registry_address(one), _CLIENT_WAITS_S) for one in prefills]
        return [rank.port for one in prefills for rank in self.instance(one).ranks]

    # --- ways ---

    def address(self, first: str, second: str) -> PairAddress:
        """Of two servers, as they are now."""
        prefill, decode = self.servers[first], self.servers[second]
        return PairAddress(prefill.url, decode.url, prefill.options.host, _REGISTRY_PORT)

    def clients_of(
        self,
        pair: int,
        known: Sequence[Known],
        clients: int,
        abort_share: float,
        deadline_s: float,
        seed: int,
    ) -> Spec:
        """What a process with clients of a pair is told (`chaos_run.clients`). It holds for as
        long as the run: servers are started again at their ports."""
        first, second = SERVERS[pair], SERVERS[2 + pair]
        tokens = [(one.request.input_ids, one.output_ids) for one in known]
        address = self.address(first, second)
        return Spec(pair_name(pair), address, tokens, clients, abort_share, deadline_s, seed)

    def _make_ways(self) -> tuple[Way, ...]:
        crossing = zip(SERVERS[:2], reversed(SERVERS[2:]), strict=True)
        return (
            *(self._pair(SERVERS[n], SERVERS[2 + n], pair_name(n)) for n in (0, 1)),
            Way("router", frozenset(), self._by_router),
            *(self._pair(first, second, f"{first} to {second}") for first, second in crossing),
        )

    def _pair(self, first: str, second: str, name: str) -> Way:
        return Way(name, frozenset((first, second)), through(lambda: self.address(first, second)))

    def _by_router(self, session: aiohttp.ClientSession, request: Request) -> asyncio.Task[Answer]:
        return asyncio.create_task(send(session, self._router.url, request))

    def _label(self, name: str) -> str:
        self._starts += 1
        return f"{name}-{self._starts}"
