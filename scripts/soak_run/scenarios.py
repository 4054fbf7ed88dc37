# SPDX-License-Identifier: Apache-2.0
"""What happens to servers under load: one function for each scenario on one host."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cpu_serving.lora import LORA_FLAGS, write_adapter
from cpu_serving.model import make_model
from cpu_serving.processes import ManagedProcess, ServingError
from cpu_serving.servers import Server, ServerOptions
from cpu_serving.store_figures import SlowRank, figures_in, total
from store_redis import redis_server

from bootstrap_server.admission.secret_file import write_secret_file
from soak_run.bench import Bench, Place, Tally, until
from soak_run.firewall import firewall
from soak_run.kills import kills
from soak_run.results import Row, Span
from soak_run.strangers import strangers, strangers_secret

__all__ = ["RUNNERS"]

ROUND_S: Final = 20.0
"""Of load, at most, before an adapter is trained again."""
UPDATE_EVERY_S: Final = 8.0
UPDATE_TIMEOUT_S: Final = 60.0
HOSTS: Final = 6
STILL_S: Final = 6.0
KILL_OWNER_EVERY_S: Final = 20.0
KEPT_MIN: Final = 0.9
"""Of its objects: what was being stored when an owner died is lost."""
SLOW: Final = SlowRank(rank=1, offload_s=1.0, load_s=0.02, wait_max_s=0.5)
"""Whose server need not be fast for more to come than the rank can store: of two requests that end
within half a second one is dropped."""


def lora(bench: Bench, seconds: float) -> Row:
    """The server is started again, as SGLang reads an adapter's files at its start. The owner stays
    and has the pages of all."""
    model, place, adapter = make_model("llama"), bench.place("lora"), "a"
    versions = ("1", "2")
    for version in versions:
        write_adapter(place.path / version, int(version))
    paths = (f"{version}={place.path / version}" for version in versions)
    with_adapter = {
        version: [replace(one, fields={"lora_path": version}) for one in bench.requests]
        for version in versions
    }
    every = [*bench.requests, *with_adapter["1"], *with_adapter["2"]]
    answers = bench.known(model, every, (*LORA_FLAGS, "--lora-paths", *paths))
    count = len(bench.requests)
    base, first, second = (answers[n * count : (n + 1) * count] for n in range(3))
    known = [
        *({"1": one, "2": one} for one in base),
        *({"1": one, "2": other} for one, other in zip(first, second, strict=True)),
    ]
    requests = [
        *bench.requests,
        *(replace(one, fields={"lora_path": adapter}) for one in bench.requests),
    ]
    bench.owner(place)
    args = (*LORA_FLAGS, "--lora-paths", f"{adapter}={place.path / adapter}")
    options = bench.options(place, model, "0", args=args)
    tally, rounds = Tally(), 0
    while (left_s := seconds - tally.seconds) > 0:
        version = versions[rounds % 2]
        write_adapter(place.path / adapter, int(version))
        server = bench.start(options, f"lora-{version}")
        until(lambda: place.usable_owners(server), "the server can use the owner")  # noqa: B023
        load_s = min(ROUND_S, seconds / 3, left_s)
        with bench.clients(server, requests) as clients:
            bench.wait(server, load_s)
            if rounds:
                bench.wait_for_loads(server, place)
        server.stop()
        tally.add(clients.asked, known, [Span(version, 0.0)])
        tally.seconds += load_s
        rounds += 1
    return bench.row("lora", place, tally, notes=[f"trained again {rounds - 1} times"])


def update(bench: Bench, seconds: float) -> Row:
    """One update names a version, the next one does not."""
    place, models = bench.place("update"), (make_model("llama"), make_model("llama", seed=1))
    old, new = (bench.known(one) for one in models)
    known = [{"0": one, "1": other} for one, other in zip(old, new, strict=True)]
    server = bench.start(bench.options(place, models[0], "64MiB"), "update")
    tally, spans, updates = Tally(), [Span("0", 0.0)], 0
    with bench.clients(server) as clients:
        begun_s = time.monotonic()
        while (left_s := seconds - (time.monotonic() - begun_s)) > 0:
            bench.wait(server, min(UPDATE_EVERY_S, seconds / 3, left_s))
            updates += 1
            named = {"weight_version": str(updates)} if updates % 2 else {}
            change_s = time.monotonic()
            _update(server, models[updates % 2], named)
            spans[-1] = replace(spans[-1], end_s=time.monotonic())
            spans.append(Span(str(updates % 2), change_s))
        bench.wait_for_loads(server, place)
        tally.seconds = time.monotonic() - begun_s
    server.stop()
    tally.add(clients.asked, known, spans)
    return bench.row("update", place, tally, notes=[f"updated {updates} times"])


def _update(server: Server, model: Path, named: Mapping[str, str]) -> None:
    request = urllib.request.Request(
        f"{server.url}/update_weights_from_disk",
        json.dumps({"model_path": str(model), **named}).encode(),
        {"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=UPDATE_TIMEOUT_S) as answer:
        told = json.load(answer)
    if not told["success"]:
        raise ServingError(f"the weights were not updated: {told['message']}")


def slow_rank(bench: Bench, seconds: float) -> Row:
    """More comes than the slow rank can store, so that it drops what the other one stores."""
    model, place = make_model("llama"), bench.place("slow")
    known = [{"": one} for one in bench.known(model)]
    bench.owner(place)
    options = replace(bench.options(place, model, "0", slow=SLOW), tp=2)
    server = bench.start(options, "slow-rank")
    until(lambda: place.usable_owners(server), "both ranks can use the owner")
    tally = Tally()
    with bench.clients(server) as clients:
        begun_s = time.monotonic()
        bench.wait(server, seconds)
        until(lambda: total(figures_in(place.figures)).dropped, "a rank drops what it cannot store")
        bench.wait_for_loads(server, place)
        tally.seconds = time.monotonic() - begun_s
    server.stop()
    tally.add(clients.asked, known, [Span("", 0.0)])
    dropped = [one.dropped for one in figures_in(place.figures)]
    return bench.row(
        "slow-rank", place, tally, notes=[f"offloads that a rank has dropped: {sorted(dropped)}"]
    )


def frozen(bench: Bench, seconds: float) -> Row:
    """SIGSTOP and SIGCONT to the owner of the host, under load, again and again."""
    place = bench.place("frozen")
    owner = bench.owner(place)
    options = bench.options(place, make_model("llama"), "0", load_timeout_s=1.0)
    settings = {"directory": str(place.directory)}
    return _frozen(bench, seconds, place, options, [owner], settings)


def frozen_tcp(bench: Bench, seconds: float) -> Row:
    """The same to owners of other hosts, which have most of the pages: that of the server's host
    has room for few."""
    place = bench.place("frozen-tcp")
    with redis_server() as redis:
        secret = place.path / "secret"
        write_secret_file(str(secret))
        meet = {"index": redis.url, "secret_file": str(secret)}
        where = [f"--{name.replace('_', '-')}={value}" for name, value in meet.items()]
        owners = [
            bench.owner(place, *where, "--transports=tcp", f"--directory={place.path / str(host)}")
            for host in range(HOSTS)
        ]
        few: dict[str, Any] = {"copies": 2, "policy": "lru", "load_timeout_s": 1.0, **meet}
        options = bench.options(place, make_model("llama"), "4MiB", **few)
        settings = {"directory": str(place.path / "probe"), "linger_s": 0.0, **meet}
        return _frozen(bench, seconds, place, options, owners, settings)


def _frozen(
    bench: Bench,
    seconds: float,
    place: Place,
    options: ServerOptions,
    owners: Sequence[ManagedProcess],
    settings: dict[str, Any],
) -> Row:
    """``settings``: of a client of the store beside the server."""
    name, known = place.path.name, [{"": one} for one in bench.known(options.model)]
    server = bench.start(options, name)
    until(lambda: place.usable_owners(server), "the server can use the owner of its host")
    if len(owners) > 1:
        until(lambda: place.other_hosts() == len(owners), "the owner knows those of other hosts")
    tally, stood_still = Tally(), 0
    with ExitStack() as stack:
        seen = stack.enter_context(bench.probe(settings, ("samehost", "tcp")))
        clients = stack.enter_context(bench.clients(server))
        begun_s = time.monotonic()
        while (left_s := seconds - (time.monotonic() - begun_s)) > 0:
            bench.wait(server, min(STILL_S, left_s))
            for one in owners:
                one.freeze()
            stood_still += 1
            try:
                bench.wait(server, STILL_S)
            finally:
                for one in owners:
                    one.thaw()
        bench.wait_for_loads(server, place)
        tally.seconds = time.monotonic() - begun_s
    server.stop()
    for one in owners:
        one.stop()
    tally.add(clients.asked, known, [Span("", 0.0)])
    loads = total(figures_in(place.figures))
    notes = [
        f"stood still {stood_still} times; {loads.loads} loads came, {loads.failed_loads} did not"
    ]
    return bench.row(name, place, tally, seen[0], notes)


def owner_dies(bench: Bench, seconds: float) -> Row:
    """SIGKILL to the owner that the two servers of a host share, under load, again and again. The
    next one takes over what it had, and the servers load on."""
    place, model = bench.place("owner-dies"), make_model("llama")
    known = [{"": one} for one in bench.known(model)]
    options = bench.options(place, model, "64MiB")
    servers = [bench.start(options, f"owner-dies-{number}") for number in (1, 2)]
    tally, kept, faults = Tally(), list[float](), list[str]()
    with ExitStack() as stack:
        settings, transports = {"directory": str(place.directory)}, ("samehost", "tcp")
        seen = stack.enter_context(bench.probe(settings, transports, place.status))
        clients = [stack.enter_context(bench.clients(one)) for one in servers]
        bench.wait_for_loads(servers[0], place)
        begun_s = time.monotonic()
        while (left_s := seconds - (time.monotonic() - begun_s)) > 0:
            before, objects = place.started_owner()
            os.kill(before, signal.SIGKILL)
            until(lambda: place.started_owner()[0] != before, "there is another owner")  # noqa: B023
            kept.append(place.started_owner()[1] / objects)
            until(lambda: min(map(place.usable_owners, servers)), "both servers use it")
            pages = total(figures_in(place.figures)).pages
            bench.wait(servers[0], min(KILL_OWNER_EVERY_S, left_s))
            bench.wait_for_loads(servers[1], place, pages)
        tally.seconds = time.monotonic() - begun_s
    for server, asking in zip(servers, clients, strict=True):
        server.stop()
        tally.add(asking.asked, known, [Span("", 0.0)])
    if min(kept) < KEPT_MIN:
        faults.append(f"the next owner had {min(kept):.0%} of what the last one had")
    loads = total(figures_in(place.figures))
    notes = [
        f"killed {len(kept)} times; the next owner had {min(kept):.0%} of its objects at least",
        f"{loads.loads} loads came, {loads.failed_loads} did not",
    ]
    return bench.row("owner-dies", place, tally, seen[0], notes, faults=faults)


RUNNERS: Final[Mapping[str, Callable[[Bench, float], Row]]] = {
    "lora": lora,
    "update": update,
    "slow-rank": slow_rank,
    "frozen": frozen,
    "frozen-tcp": frozen_tcp,
    "owner-dies": owner_dies,
    "firewall": firewall,
    "kills": kills,
    "strangers": strangers,
    "strangers-secret": strangers_secret,
}
