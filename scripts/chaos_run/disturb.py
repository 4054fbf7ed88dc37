# SPDX-License-Identifier: Apache-2.0
"""What each kind of fault does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from cpu_serving.processes import ServingError
from cpu_serving.servers import wait_ready

from chaos_run.beside import Beside
from chaos_run.deployment import Deployment
from chaos_run.hosts import Hosts
from chaos_run.intruder import Attack, Found
from chaos_run.schedule import REGISTRY, SERVERS, Fault, pair_of
from chaos_run.traffic import Known, Outcome

__all__ = ["Disturber", "Undone"]

#: About as much work for its servers as that of the clients who then wait.
_CROWD_CLIENTS = 12
#: A process beside the servers ends by itself at the end of its fault; its imports take seconds.
_GRACE_S = 60.0


@dataclass(frozen=True)
class Undone:
    """A fault that is over.

    at_s: when its end began, of `time.monotonic`.
    let_in: what somebody got who was not invited, in sentences.
    """

    at_s: float
    let_in: tuple[str, ...] = ()


class Disturber:
    """Carries faults out.

    record: is told of requests that belong to a fault.
    """

    def __init__(
        self,
        deployment: Deployment,
        hosts: Hosts,
        known: Sequence[Known],
        seed: int,
        record: Callable[[Outcome], None],
    ) -> None:
        self._deployment, self._hosts, self._known = deployment, hosts, known
        self._seed, self._record = seed, record

    async def carry_out(self, fault: Fault) -> Undone:
        """Returns when it is undone."""
        hosts, deployment, victim = self._hosts, self._deployment, fault.victim
        match fault.kind:
            case "kill":
                await self._restart(victim)
            case "registry-dies":
                await self._without_registry(lambda: asyncio.sleep(fault.lasts_s))
            case "newcomer":
                await self._without_registry(lambda: self._newcomer(fault))
            case "stranger":
                await self._stranger(fault)
            case "intruder":
                let_in = await self._intruder(fault)
                return Undone(time.monotonic(), tuple(let_in))
            case "freeze":
                process = deployment.servers[victim].process
                return await _between(process.freeze, process.thaw, fault.lasts_s)
            case "registry":
                process = (
                    deployment.registry
                    if victim == REGISTRY
                    else deployment.servers[victim].process
                )
                stop = partial(os.kill, process.pid, signal.SIGSTOP)
                go_on = partial(os.kill, process.pid, signal.SIGCONT)
                return await _between(stop, go_on, fault.lasts_s)
            case "cut" | "sever" | "slow" | "lossy":
                begin = {
                    "cut": hosts.cut,
                    "sever": hosts.sever,
                    "slow": hosts.slow,
                    "lossy": hosts.lossy,
                }[fault.kind]
                mend = partial(hosts.mend, victim)
                return await _between(partial(begin, victim), mend, fault.lasts_s)
            case "control-cut" | "control-lossy":
                filtered = hosts.control_cut if fault.kind == "control-cut" else hosts.control_lossy
                ports = await asyncio.to_thread(deployment.control_ports, victim)
                begin_filter = partial(filtered, victim, ports)
                return await _between(begin_filter, partial(hosts.mend, victim), fault.lasts_s)
            case "full":
                await self._full(fault)
        return Undone(time.monotonic())

    async def _restart(self, victim: str) -> None:
        await asyncio.to_thread(self._deployment.servers[victim].process.kill)
        again = self._deployment.start(victim)
        await asyncio.to_thread(wait_ready, [again])

    async def _without_registry(self, meanwhile: Callable[[], asyncio.Future[None]]) -> None:
        await asyncio.to_thread(self._deployment.registry.kill)
        try:
            await meanwhile()
        finally:
            self._deployment.start_registry()

    async def _newcomer(self, fault: Fault) -> None:
        """A decode server that has never heard of the instance asks for it in vain."""
        await self._restart(fault.victim)
        await asyncio.sleep(fault.lasts_s)

    async def _full(self, fault: Fault) -> None:
        """Control messages pass slowly, and there are many."""
        deployment, victim = self._deployment, fault.victim
        ports = await asyncio.to_thread(deployment.control_ports, victim)
        spec = deployment.clients_of(
            pair_of(victim), self._known, _CROWD_CLIENTS, 1.0, fault.lasts_s, self._seed
        )
        self._hosts.control_narrow(victim, ports)
        try:
            async with Beside("chaos_run.clients", [], deployment.cores(victim)) as clients:
                await clients.tell(msgspec.json.encode(spec))
                await asyncio.sleep(fault.lasts_s)
                told = await clients.said(_GRACE_S)
        finally:
            self._hosts.mend(victim)
        for outcome in msgspec.json.decode(told, type=list[Outcome]):
            self._record(outcome)

    async def _stranger(self, fault: Fault) -> None:
        host, ports = self._reached(fault.victim)
        argv = [host, str(fault.lasts_s), str(self._seed), *map(str, ports)]
        if int(await self._beside("chaos_run.stranger", argv, fault)) == 0:
            raise ServingError(f"a stranger at {host} made no connection to any of {ports}")

    async def _intruder(self, fault: Fault) -> list[str]:
        host, ports = self._reached(fault.victim)
        # Of a decode server nothing is registered: he tries that of its pair.
        prefill = fault.victim if fault.victim in SERVERS[:2] else f"prefill-{fault.victim[-1]}"
        instance = await asyncio.to_thread(self._deployment.instance, prefill)
        registry = self._deployment.registry_address(prefill)
        spec = msgspec.json.encode(Attack(host, ports, registry, instance, fault.lasts_s)).decode()
        found = msgspec.json.decode(
            await self._beside("chaos_run.intruder", [spec], fault), type=Found
        )
        if found.attempts == 0:
            raise ServingError(f"an intruder at {host} tried nothing")
        return found.let_in

    def _reached(self, victim: str) -> tuple[str, list[int]]:
        return self._hosts.address(victim), self._hosts.listening_ports(victim)

    async def _beside(self, module: str, argv: Sequence[str], fault: Fault) -> bytes:
        """What a process prints until it ends by itself. It has cores of the victim's pair."""
        async with Beside(module, argv, self._deployment.cores(fault.victim)) as process:
            return await process.said(fault.lasts_s + _GRACE_S)


async def _between(begin: Callable[[], None], end: Callable[[], None], lasts_s: float) -> Undone:
    """Programs carry out both; clients go on while these run."""
    await asyncio.to_thread(begin)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        undone = Undone(time.monotonic())
        await asyncio.to_thread(end)
    return undone
