# SPDX-License-Identifier: Apache-2.0
"""A serving pair and an owner of the store, attacked at all ports that are not SGLang's own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
from chaos_run.resources import Held, grown, held_by, resident
from cpu_serving.model import make_model
from cpu_serving.pools import leaked_pages
from cpu_serving.processes import ManagedProcess, ServingError
from cpu_serving.servers import HOST, Pair, ServerOptions, with_secret
from cpu_serving.store import with_store
from cpu_serving.strangers import listeners, of_group
from store_redis import redis_server

from bootstrap_server.admission.secret_file import write_secret_file
from soak_run.attack import Attack, Made
from soak_run.bench import WAIT_S, Bench, Place, Tally, until
from soak_run.loglines import NewLines, kinds, others
from soak_run.results import Known, Row, Span

__all__ = ["strangers", "strangers_secret"]

GROWN_BYTES_MAX: Final = 50 * 10**6
LINES_MAX: Final = 100
STAYING: Final = 300
"""Connections at each port that stay."""
PORTS: Final = 20
"""For each process: what is ours listens on some of them, and nothing of SGLang does."""
PORTS_APART: Final = 100
"""From the one that a fleet gives."""
SAMPLE_S: Final = 1.0
GRACE_S: Final = 60.0
WARM_UP_S: Final = 60.0


@dataclass(frozen=True)
class Attacked:
    """What is attacked: processes of ours by name, the ports of these, and where clients ask."""

    pair: Pair
    processes: dict[str, ManagedProcess]
    ports: list[int]

    def resident(self) -> int:
        """Bytes, over all processes."""
        return sum(resident(one.pid) for one in self.processes.values())

    def held(self) -> dict[str, dict[str, Held]]:
        """Once nobody asks: see ``held_by``."""
        return {name: held_by(one.pid) for name, one in self.processes.items()}

    def logs(self) -> dict[str, str]:
        """All of each, up to now."""
        return {name: one.log_text() for name, one in self.processes.items()}


def strangers(bench: Bench, seconds: float) -> Row:
    """Servers of a deployment that has no secret. An owner on several hosts has one in any case."""
    return _attacked(bench, seconds, "strangers", has_secret=False)


def strangers_secret(bench: Bench, seconds: float) -> Row:
    """The same with a secret."""
    return _attacked(bench, seconds, "strangers-secret", has_secret=True)


def _attacked(bench: Bench, seconds: float, name: str, *, has_secret: bool) -> Row:
    """Clients ask for a minute, or a third of the time, before the strangers come: what the servers
    hold and say then, they hold and say anyway."""
    place, model = bench.place(name), make_model("llama")
    known = [{"": one} for one in bench.known(model)]
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(HOST))
        secret = place.path / "secret"
        write_secret_file(str(secret))
        here = _start(bench, place, model, redis.url, secret, name, has_secret=has_secret)
        tally, lines = Tally(), NewLines()
        lines.of(here.logs())
        with bench.clients(here.pair.router) as clients:
            bench.wait(here.pair, min(WARM_UP_S, seconds / 3))
        tally.add(clients.asked, known, [Span("", 0.0)])
        held = _held_when_idle(here)
        ordinary = lines.of(here.logs())
        begun_s = time.monotonic()
        grown_bytes, made = _under_attack(bench, here, seconds, name, tally, known)
        tally.seconds = time.monotonic() - begun_s
        left = _not_given_back(here, held)
        said = others(ordinary, lines.of(here.logs()))
        connections = f"{made.talking + made.staying}, up to {made.at_a_time} at a time"
        notes = [
            f"connections to {len(here.ports)} ports: {connections}",
            f"{grown_bytes / 1e6:.0f} MB more of resident memory, {len(said)} lines of logs",
            *kinds(said),
        ]
        faults = [
            *_too_much(grown_bytes, len(said)),
            *left,
            *(f"the {one.name} has ended" for one in here.processes.values() if not one.alive()),
        ]
        for one in (here.pair.router, here.pair.prefill, here.pair.decode):
            one.stop()
        here.processes["owner"].stop()
    return bench.row(name, place, tally, notes=notes, faults=faults)


def _too_much(grown_bytes: int, lines: int) -> Iterable[str]:
    if grown_bytes >= GROWN_BYTES_MAX:
        yield f"{grown_bytes / 1e6:.0f} MB more of resident memory"
    if lines >= LINES_MAX:
        yield f"{lines} lines of logs are about strangers"


# --- the servers ---


def _start(
    bench: Bench,
    place: Place,
    model: Path,
    index: str,
    secret: Path,
    name: str,
    *,
    has_secret: bool,
) -> Attacked:
    first = bench.fleet.port() + PORTS_APART
    ranges = [(one, one + PORTS - 1) for one in range(first, first + 3 * PORTS, PORTS)]
    metrics = ranges[2][0]
    owner = bench.owner(
        place,
        f"--index={index}",
        f"--secret-file={secret}",
        f"--host={HOST}",
        f"--ports={ranges[2][0] + 1}-{ranges[2][1]}",
        f"--metrics={HOST}:{metrics}",
    )
    both = []
    for lowest, highest in ranges[:2]:
        env = {"SGLANG_MOONCAKE_PORTS": f"{lowest}-{highest}"}
        plain = replace(ServerOptions(model), extra_env=env)
        both.append(with_secret(plain, secret) if has_secret else plain)
    more = {"index": index, "secret_file": str(secret), "host": HOST, "admission": False}
    prefill = with_store(both[0], place.directory, "0", **more)
    pair = bench.pair(prefill, replace(both[1], page_size=prefill.page_size), name)
    processes = {
        "prefill": pair.prefill.process,
        "decode": pair.decode.process,
        "owner": owner,
    }
    ports = _ports_of(processes.values(), ranges, pair.prefill.bootstrap_port)
    return Attacked(pair, processes, ports)


def _ports_of(
    processes: Iterable[ManagedProcess], ranges: Sequence[tuple[int, int]], registry: int
) -> list[int]:
    """Where these listen, as the kernel tells it, but at SGLang's own ports."""
    pids = [found.pid for one in processes for found in of_group(one.pid)]
    ours = {port for low, high in ranges for port in range(low, high + 1)} | {registry}
    found = {one.where for one in listeners(pids) if isinstance(one.where, int)}
    return sorted(found & ours)


# --- the attack ---


def _under_attack(
    bench: Bench,
    here: Attacked,
    seconds: float,
    name: str,
    tally: Tally,
    known: Sequence[Known],
) -> tuple[int, Made]:
    """By how much the processes have grown at most, while clients asked."""
    spec = Attack(HOST, here.ports, bench.seed, seconds, STAYING)
    before, most = here.resident(), 0
    with bench.clients(here.pair.router) as clients:
        attack = bench.beside(name, "soak_run.attack", msgspec.json.encode(spec).decode())
        deadline_s = time.monotonic() + seconds + GRACE_S
        while attack.alive():
            bench.wait(here.pair, SAMPLE_S)
            most = max(most, here.resident() - before)
            if time.monotonic() > deadline_s:
                raise ServingError(f"the strangers have not ended after {seconds + GRACE_S:.0f} s")
        if attack.wait(WAIT_S):
            raise ServingError(f"the strangers failed\n{attack.tail()}")
    tally.add(clients.asked, known, [Span("", 0.0)])
    return most, msgspec.json.decode(attack.log_text().splitlines()[-1], type=Made)


def _held_when_idle(here: Attacked) -> dict[str, dict[str, Held]]:
    for server in (here.pair.prefill, here.pair.decode):
        leaked_pages(server)
    return here.held()


def _not_given_back(here: Attacked, before: dict[str, dict[str, Held]]) -> list[str]:
    """Pages, threads, descriptors and memory that are shared."""
    found = [
        f"{pages} pages of the {server.process.name} are left"
        for server in (here.pair.prefill, here.pair.decode)
        if (pages := leaked_pages(server))
    ]
    more: list[str] = []

    def is_given_back() -> bool:
        more[:] = [
            f"{name}: {one}"
            for name, held in here.held().items()
            for one in grown(before[name], held)
        ]
        return not more

    try:
        until(is_given_back, "what strangers took is given back")
    except ServingError:
        return found + more
    return found
