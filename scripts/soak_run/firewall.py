# SPDX-License-Identifier: Apache-2.0
"""An owner on another host, behind a firewall that lets one of its two ports through.

The firewall is a filter on the way out of the owner's network namespace (tc, with a BPF program),
which drops all packets from a port and tells nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from chaos_run.control_filter import vanishing
from cpu_serving.model import make_model
from cpu_serving.namespaces import inside, run_tool
from cpu_serving.servers import ServerOptions
from cpu_serving.store_figures import figures_in, total
from cpu_serving.store_status import statuses
from cpu_serving.traffic import send_all
from store_redis import redis_server
from ttft_bench.network import DEVICE, FAR, NEAR, Network

from bootstrap_server.admission.secret_file import write_secret_file
from soak_run.bench import Bench, Place, Tally, until
from soak_run.results import Row, Span

__all__ = ["firewall"]

DATA_PORT, CONTROL_PORT = 7000, 7001
"""An owner takes the first of its range for its engine, and the other one for its answers."""


def firewall(bench: Bench, seconds: float) -> Row:
    """A host that starts while the owner's data port is shut hears of its pages and cannot have
    them; one that starts while the other port is shut hears of nothing. In the middle of its time
    each gets the way opened, while its server is under load."""
    model, place, tally = make_model("llama"), bench.place("fw"), Tally()
    known = [{"": one} for one in bench.known(model)]
    with _two_hosts() as network, redis_server(NEAR) as redis:
        secret = place.path / "secret"
        write_secret_file(str(secret))
        meet = {"index": redis.url, "secret_file": str(secret)}
        with network.far_side():
            where = [f"--{name.replace('_', '-')}={value}" for name, value in meet.items()]
            ports = f"--ports={DATA_PORT}-{CONTROL_PORT}"
            where += [f"--directory={place.path / 'far'}", f"--host={FAR}", "--transports=tcp"]
            owner = bench.owner(place, *where, ports)
        _fill(bench, place, _on_near(bench.options(place, model, "0", **meet)))
        options = _on_near(bench.options(place, model, "32MiB", **meet))
        beside = {"directory": str(place.path / "probe"), "linger_s": 0.0, **meet}
        with bench.probe(beside, ("tcp",)) as seen:
            for port in (DATA_PORT, CONTROL_PORT):
                _shut(network, port)
                server = bench.start(options, f"behind-{port}")
                if port == DATA_PORT:
                    until(lambda: _heard(place), "the server's host has heard of the pages")
                with bench.clients(server) as clients:
                    bench.wait(server, seconds / 4)
                    network.limit(None)
                    until(place.other_hosts, "the owner can be used")
                    bench.wait(server, seconds / 4)
                    bench.wait_for_loads(server, place)
                server.stop()
                place.wait_for_end()
                tally.add(clients.asked, known, [Span("", 0.0)])
                tally.seconds += seconds / 2
        owner.stop()
    loads = total(figures_in(place.figures))
    note = f"{loads.loads} loads came, {loads.failed_loads} did not"
    return bench.row("firewall", place, tally, seen[0], [note])


@contextmanager
def _two_hosts() -> Iterator[Network]:
    """The calling thread, and what it starts, is on the near one meanwhile. Raises NoNetwork."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        with inside(home, home):
            yield Network()
    finally:
        os.close(home)


def _on_near(options: ServerOptions) -> ServerOptions:
    env = {**options.extra_env, "SGLANG_MOONCAKE_TRANSPORTS": "tcp"}
    return replace(options, host=NEAR, extra_env=env)


def _fill(bench: Bench, place: Place, options: ServerOptions) -> None:
    """The owner has pages of all requests, which a server without memory of its own computes."""
    server = bench.start(options, "filling")
    until(place.other_hosts, "the owner can be used")
    send_all(server.url, bench.requests, concurrency=4)
    until(lambda: _puts(place) >= _pages(bench), "the pages are stored")
    server.stop()
    place.wait_for_end()


def _pages(bench: Bench) -> int:
    return sum(len(one.input_ids) // 16 for one in bench.requests)


def _puts(place: Place) -> int:
    return sum(sum(one.puts.values()) for one in statuses(place.status))


def _heard(place: Place) -> bool:
    return any(owner.objects for one in place.started() for owner in one.owners)


def _shut(network: Network, port: int) -> None:
    with network.far_side():
        for command in vanishing(DEVICE, [port], 1.0):
            run_tool(command)
