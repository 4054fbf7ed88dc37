# SPDX-License-Identifier: Apache-2.0
"""Each alert of docs/grafana/alerts.yml is made to fire by the fault that it is for, in a real
Prometheus, and is quiet before."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import metrics_doc
import prometheus_alerts
import pytest
import yaml
from bootstrap_rank import rank_process
from handover import HOST, NEVER_S, PrefillRank, make_context, until
from rank_process import AUX, SOURCE_PAGES, RankProcess, prefill_rank
from store_makers import config
from test_kvstore_metrics import STATUS
from test_stats import ENGINE

import kvstore
from bootstrap_server import (
    BootstrapServer,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    Topology,
    Why,
)
from kvstore.client.status import StoreStatus
from kvstore.metrics.http import MetricsServer
from kvstore.store import Store
from sglang_mooncake.context import Deadlines
from sglang_mooncake.metrics import METRICS
from sglang_mooncake.refused import RefusedServer
from sglang_mooncake.rooms.room import Room, RoomTimes, RoomView
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.rooms.write_story import WriteStory
from sglang_mooncake.sglang.prometheus import Exporter, HandoverFigures
from sglang_mooncake.stats import Recorder
from te.stats import FenceStats, Stats

# Each waits for its rule's time, and Prometheus is installed where it is missing.
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.by_turns,
    pytest.mark.timeout(600),
    # prometheus_client leaves the socket of its HTTP server to the interpreter.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROOMS = itertools.count(1)
TWO = Topology(1, 1, 2, 1)
#: More than the five that a rule about requests passes over.
MANY = 12
#: The alerts that some test below makes fire.
MADE_TO_FIRE: set[str] = set()


def fires(*names: str) -> pytest.MarkDecorator:
    """These alerts are what the test waits for."""
    MADE_TO_FIRE.update(names)
    return pytest.mark.parametrize("names", [set(names)], ids=[" and ".join(names)])


class Target:
    """The HTTP server of a server's metrics, which can be ended as if its process had died."""

    def __init__(self, registry: Any) -> None:
        from prometheus_client import start_http_server

        self._server, self._thread = start_http_server(0, HOST, registry)
        self.address = f"{HOST}:{self._server.server_port}"

    def die(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Server:
    """What a server of SGLang tells Prometheus: one rank, whose figures are handed in."""

    def __init__(self, role: str, recorder: Recorder, stats: Callable[[], Stats]) -> None:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        coords = dict.fromkeys(("dp_rank", "cp_rank", "tp_rank", "pp_rank"), "0")
        labels = {"model_name": "m", "role": role, **coords}
        figures = HandoverFigures(recorder, stats)
        self._exporter = Exporter(METRICS, figures, labels, registry=registry)
        self.target = Target(registry)

    @property
    def address(self) -> str:
        return self.target.address

    def close(self) -> None:
        self.target.die()
        self._exporter.close()


class Figures:
    """A rank that there is only on paper."""

    def __init__(self) -> None:
        self.stats = ENGINE
        context = make_context("prefill", f"{HOST}:1", Deadlines())
        self.recorder = Recorder(context, {}, lambda: self.stats, None)

    def hand_over(self, handover_s: float) -> None:
        """A request is done, for whose hand-over the client has waited so long."""
        opened_s = time.monotonic() - handover_s - 1
        sent_s = time.monotonic() - handover_s
        times = RoomTimes(sent_s - 0.5, sent_s, sent_s, sent_s)
        room = Room(next(ROOMS), opened_s, RoomView(RoomState.DONE, times=times))
        write = WriteStory("decode rank 0", "tcp", sent_s, sent_s, 100, 10, 2, False, 0)
        self.recorder.room_over(room, [write])


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def registry(undo: ExitStack) -> str:
    """The address of one that nothing happens to."""
    return f"{HOST}:{undo.enter_context(BootstrapServer(HOST, 0, NEVER_S)).port}"


@contextmanager
def quiet_before(
    tmp_path: Path,
    jobs: Mapping[str, list[str]],
    names: set[str],
    usual: Callable[[], object] = lambda: None,
) -> Iterator[prometheus_alerts.Prometheus]:
    """A Prometheus in which none of these alerts fires while nothing but what is usual happens."""
    with prometheus_alerts.running(tmp_path, jobs) as prometheus:
        fired = prometheus.watches(sum(map(len, jobs.values())), usual)
        assert not fired & names
        yield prometheus


def give(rank: PrefillRank, address: str, decode: RankProcess) -> None:
    """One request, from beginning to end."""
    use = rank.side.open_room(room := next(ROOMS), register_dp_rank=False)
    decode.tell("take", room, address)
    until(lambda: use.view.state is RoomState.READY, "the decode rank asks")
    rank.send(use, SOURCE_PAGES, 0, AUX)
    assert decode.answer() == "taken"


def test_promtool_takes_the_rules():
    prometheus_alerts.install()
    done = subprocess.run(
        ["promtool", "check", "rules", metrics_doc.RULES], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@fires("ServerDown", "DecodeRanksLost", "HandoversFail")
def test_a_decode_server_is_killed(tmp_path: Path, undo: ExitStack, names: set[str]) -> None:
    """Requests are under way to it."""
    rank, address = undo.enter_context(prefill_rank())
    decode = RankProcess("decode", HOST)
    undo.callback(decode.kill)
    prefill = Server("prefill", rank.recorder, rank.engine.stats)
    undo.callback(prefill.close)
    from prometheus_client import CollectorRegistry

    of_decode = Target(CollectorRegistry())
    jobs = {
        "sglang": [prefill.address, of_decode.address],
        "sglang-mooncake-registry": [address],
    }
    with quiet_before(tmp_path, jobs, names, lambda: give(rank, address, decode)) as prometheus:
        for _ in range(MANY):
            use = rank.side.open_room(room := next(ROOMS), register_dp_rank=False)
            decode.ask("ask", room, address)
            until(lambda use=use: use.view.state is RoomState.READY, "the decode rank asks")
        decode.kill()
        of_decode.die()
        told = prometheus.until_firing(names, lambda: None)
    assert of_decode.address in told["ServerDown"]
    assert prefill.address in told["DecodeRanksLost"]
    assert "On the prefill ranks " in told["HandoversFail"]


@fires("ServerDown", "RegistryDown")
def test_a_prefill_server_is_killed_with_its_registry(
    tmp_path: Path, undo: ExitStack, names: set[str]
) -> None:
    server = undo.enter_context(BootstrapServer(HOST, 0, NEVER_S))
    figures = Figures()
    prefill = Server("prefill", figures.recorder, lambda: figures.stats)
    undo.callback(prefill.close)
    address = f"{HOST}:{server.port}"
    jobs = {"sglang": [prefill.address], "sglang-mooncake-registry": [address]}
    with quiet_before(tmp_path, jobs, names) as prometheus:
        prefill.target.die()
        server.close()
        told = prometheus.until_firing(names, lambda: None)
    assert prefill.address in told["ServerDown"]
    assert f"No registry answers at {address}." in told["RegistryDown"]


@fires("RegistryDown")
def test_no_registry_is_known(tmp_path: Path, undo: ExitStack, names: set[str]) -> None:
    """Such as where those that there are come from a cluster, and it has none any more."""
    figures = Figures()
    prefill = Server("prefill", figures.recorder, lambda: figures.stats)
    undo.callback(prefill.close)
    with prometheus_alerts.running(tmp_path, {"sglang": [prefill.address]}) as prometheus:
        told = prometheus.until_firing(names, lambda: None)
    assert told["RegistryDown"].startswith("No registry answers. ")


@fires("HandoversAborted")
def test_the_router_gives_requests_up(tmp_path: Path, undo: ExitStack, names: set[str]) -> None:
    """As it does when no decode server answers it: nobody asks the prefill rank for them."""
    rank, address = undo.enter_context(prefill_rank())
    prefill = Server("prefill", rank.recorder, rank.engine.stats)
    undo.callback(prefill.close)
    decode = RankProcess("decode", HOST)
    undo.callback(decode.kill)

    def give_up() -> None:
        room = rank.side.open_room(next(ROOMS), register_dp_rank=False)
        rank.side.close_room(room)

    def usual() -> None:
        for _ in range(10):
            give(rank, address, decode)
        give_up()

    jobs = {"sglang": [prefill.address], "sglang-mooncake-registry": [address]}
    with quiet_before(tmp_path, jobs, names, usual) as prometheus:
        told = prometheus.until_firing(names, give_up)
    assert "On the prefill ranks " in told["HandoversAborted"]


@fires("RanksMissing", "RanksLost")
def test_a_prefill_rank_is_killed_whose_registry_is_elsewhere(
    tmp_path: Path, undo: ExitStack, names: set[str]
) -> None:
    one_of_two_is_killed("prefill", tmp_path, undo, names)


@fires("DecodeRanksMissing", "RanksLost")
def test_a_decode_rank_is_killed_that_names_a_registry(
    tmp_path: Path, undo: ExitStack, names: set[str]
) -> None:
    one_of_two_is_killed("decode", tmp_path, undo, names)


def one_of_two_is_killed(role: str, tmp_path: Path, undo: ExitStack, names: set[str]) -> None:
    server = undo.enter_context(BootstrapServer(HOST, 0, lease_s=6))
    address = f"{HOST}:{server.port}"
    config = InstanceConfig(TWO, KVFormat(16, "bfloat16"), protocol=1)
    processes = {
        coords: undo.enter_context(
            rank_process(
                address,
                RankRecord(config, Rank(coords, HOST, 1000 + coords.tp, time.time_ns(), 30_000)),
                role=role,
            )
        )
        for coords in TWO.coords()
    }
    with quiet_before(tmp_path, {"sglang-mooncake-registry": [address]}, names) as prometheus:
        os.kill(processes[RankCoords(0, 0, 1, 0)].pid, signal.SIGKILL)
        told = prometheus.until_firing(names, lambda: None)
    assert all(address in one for one in told.values())


@pytest.fixture
def figures() -> Figures:
    return Figures()


@pytest.fixture
def watched(
    tmp_path: Path, undo: ExitStack, registry: str, names: set[str], figures: Figures
) -> prometheus_alerts.Prometheus:
    """It has seen a prefill rank that hands requests over in 10 ms."""
    prefill = Server("prefill", figures.recorder, lambda: figures.stats)
    undo.callback(prefill.close)
    jobs = {"sglang": [prefill.address], "sglang-mooncake-registry": [registry]}
    return undo.enter_context(quiet_before(tmp_path, jobs, names, lambda: figures.hand_over(0.01)))


@fires("SlowHandover")
def test_hand_overs_become_slow(
    watched: prometheus_alerts.Prometheus, names: set[str], figures: Figures
) -> None:
    watched.until_firing(names, lambda: figures.hand_over(3.0))


@fires("TcpInsteadOfRdma")
def test_a_connection_falls_back(
    watched: prometheus_alerts.Prometheus, names: set[str], figures: Figures
) -> None:
    back = figures.stats.connects_fallen_back + 1
    figures.stats = replace(figures.stats, connects_fallen_back=back)
    watched.until_firing(names, lambda: None)


@fires("FencesTimeOut")
def test_a_fence_times_out(
    watched: prometheus_alerts.Prometheus, names: set[str], figures: Figures
) -> None:
    figures.stats = replace(figures.stats, fences=FenceStats(0, 0.0, 1))
    watched.until_firing(names, lambda: None)


@fires("WrongBytes")
def test_bytes_arrive_that_were_not_sent(
    watched: prometheus_alerts.Prometheus, names: set[str], figures: Figures
) -> None:
    figures.recorder.compared("different")
    said = watched.until_firing(names, lambda: None)["WrongBytes"]
    # Prometheus extrapolates: of one it may say 1.052, and then 2 where it has two samples.
    assert re.search(r" and [12] requests have failed for it\.", said), said


@fires("ServersDoNotFit")
def test_a_prefill_server_has_another_secret(
    tmp_path: Path, undo: ExitStack, registry: str, names: set[str]
) -> None:
    figures = Figures()
    refused: list[RefusedServer] = []
    figures.recorder.refused = lambda: tuple(refused)
    decode = Server("decode", figures.recorder, lambda: figures.stats)
    undo.callback(decode.close)
    jobs = {"sglang": [decode.address], "sglang-mooncake-registry": [registry]}
    with quiet_before(tmp_path, jobs, names) as prometheus:
        refused.append(RefusedServer(f"{HOST}:1", Why.SECRET, "it has another secret", 0.0))
        told = prometheus.until_firing(names, lambda: None)
    assert decode.address in told["ServersDoNotFit"]
    assert "(secret)" in told["ServersDoNotFit"]


@fires("StoreOwnersLost")
def test_an_owner_of_the_store_is_killed(
    tmp_path: Path,
    undo: ExitStack,
    registry: str,
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.host.lifetime.ENDED_S", 3600.0)  # Nobody starts another one.
    place = undo.enter_context(tempfile.TemporaryDirectory(prefix="kv"))
    root = Path(kvstore.__file__).parents[1]
    owner = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "serve", "--memory=4MiB", f"--directory={place}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"XDG_RUNTIME_DIR": place},
    )
    undo.callback(owner.communicate)
    undo.callback(owner.kill)
    assert owner.stdout is not None
    assert owner.stdout.readline().startswith("kvstore: lends")
    client = undo.enter_context(Store(config(Path(place))))
    until(client._owners.usable, "the owner is known")
    server = undo.enter_context(MetricsServer(client.status, HOST, 0))
    jobs = {"kvstore": [_address(server)], "sglang-mooncake-registry": [registry]}
    with quiet_before(tmp_path, jobs, names) as prometheus:
        owner.kill()
        prometheus.until_firing(names, lambda: None)


@fires("StorePagesLost")
def test_pages_of_the_store_do_not_come(
    tmp_path: Path, undo: ExitStack, registry: str, names: set[str]
) -> None:
    gets = {"right": 0, "unreachable": 0}

    def status() -> StoreStatus:
        return StoreStatus(
            7, "python3", 0, None, STATUS.owners, dict(gets), {}, {"found": 6}, 90, 20, 333
        )

    def get(right: int, wrong: int) -> None:
        gets["right"] += right
        gets["unreachable"] += wrong

    server = undo.enter_context(MetricsServer(status, HOST, 0))
    jobs = {"kvstore": [_address(server)], "sglang-mooncake-registry": [registry]}
    usual = lambda: get(1000, 1)  # noqa: E731
    with quiet_before(tmp_path, jobs, names, usual) as prometheus:
        prometheus.until_firing(names, lambda: get(1000, 100))


class Answers(BaseHTTPRequestHandler):
    """A server that is well."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def answering() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer((HOST, 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def router(prefill: str, decode: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A router in front of two servers, which are well; its process, and its address."""
    argv = ["router", "--host", HOST, "--port", "0", "--prefill", prefill, "1", "--decode", decode]
    command = [sys.executable, "-m", "sglang_mooncake.sglang.cli", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"listens on \S+ port (\d+)", said)) is None:
                said += process.stderr.readline()
                assert process.poll() is None, said
            yield process, f"{HOST}:{found[1]}"
        finally:
            process.kill()


@fires("RouterHasIllServers", "RouterDown")
def test_a_router_loses_a_server_and_ends(
    tmp_path: Path, undo: ExitStack, registry: str, names: set[str]
) -> None:
    prefill, of_decode = undo.enter_context(answering()), ExitStack()
    undo.callback(of_decode.close)
    decode = of_decode.enter_context(answering())
    urls = [f"http://{HOST}:{one.server_port}" for one in (prefill, decode)]
    process, address = undo.enter_context(router(*urls))
    jobs = {"sglang-mooncake-router": [address], "sglang-mooncake-registry": [registry]}
    with quiet_before(tmp_path, jobs, names) as prometheus:
        of_decode.close()
        told = prometheus.until_firing({"RouterHasIllServers"}, lambda: None)
        process.kill()
        told |= prometheus.until_firing({"RouterDown"}, lambda: None)
    assert f"The router {address} sends 1 decode servers no requests" in told["RouterHasIllServers"]
    assert address in told["RouterDown"]


def test_each_alert_was_made_to_fire():
    groups = yaml.safe_load(metrics_doc.RULES.read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"]} == MADE_TO_FIRE


def _address(server: MetricsServer) -> str:
    return server.url.removeprefix("http://").removesuffix("/metrics")
