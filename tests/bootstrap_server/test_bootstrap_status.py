# SPDX-License-Identifier: Apache-2.0
"""The status page's data over real HTTP: what it says of ranks, how soon, and to whom."""

from __future__ import annotations

import http.client
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from bootstrap_http import put_route, url
from bootstrap_rank import rank_process
from bootstrap_status import ask, ranks, report, until
from bootstrap_waits import NEVER_S, WAIT_S, patient_client

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    RankCoords,
    RankLease,
    RankRecord,
    RankStatus,
    StatusPage,
    Topology,
    TransportRate,
)
from bootstrap_server import server as server_module
from bootstrap_server.admission import allowance, connections
from bootstrap_server.admission.proof import HEADER
from bootstrap_server.client import lease as lease_module
from bootstrap_server.client.http import HttpClient
from bootstrap_server.http import status as status_http
from bootstrap_server.http.app import make_app
from bootstrap_server.http.rank_lines import RankLines
from bootstrap_server.page import Page
from bootstrap_server.page.board import Board
from bootstrap_server.ranks.registry import Registry
from bootstrap_server.ranks.rooms import RoomTable

MakeRecord = Callable[..., RankRecord]

ONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
KEY = b"k" * 32
STATUS = RankStatus(rates=(TransportRate("tcp", 1.0, 2.0),), rooms={"done": 3})


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """News is published, and leases are looked at, as often as no test waits for it."""
    monkeypatch.setattr(status_http, "PUBLISH_EVERY_S", 0.02)
    monkeypatch.setattr(server_module, "TICK_S", 0.02)


@pytest.fixture
def address(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


#: A lease whose requests wait for as long as a loaded machine may take.
PatientLease = partial(RankLease, make_client=patient_client)


@pytest.fixture
def guarded() -> Iterator[BootstrapServer]:
    with BootstrapServer("127.0.0.1", 0, keys=[KEY]) as running:
        yield running


# --- what it says ---


def test_an_empty_registry_has_no_instance() -> None:
    with BootstrapServer("127.0.0.1", 0) as server:
        status = ask(server)
    assert (status["instances"], status["events"]) == ([], [])
    assert (status["lease_s"], status["renew_s"]) == (15.0, 5.0)
    assert int(status["revision"]) > 2**53


def test_ranks_are_shown_with_what_they_report(
    server: BootstrapServer, address: str, make_record: MakeRecord
) -> None:
    two = Topology(1, 1, 2, 1)
    with PatientLease(address, make_record(two, FIRST), status=lambda: STATUS) as lease:
        before = ask(server)
        assert report(before) is None
        lease.renew()
        status = until(server, report)
        (instance,) = status["instances"]
        (rank,) = instance["ranks"]
        assert (instance["registered"], instance["expected"]) == (1, 2)
        assert instance["missing"] == [[0, 0, 1, 0]]
        assert (rank["coords"], rank["host"], rank["port"]) == ([0, 0, 0, 0], "127.0.0.1", 10_000)
        assert before["now_s"] <= rank["renewed_s"] <= status["now_s"]
        assert rank["lost_s"] is None
        assert report(status) == STATUS
    until(server, lambda status: status["events"][0]["what"] == "shut down")


def test_stock_ranks_have_no_lease(server: BootstrapServer) -> None:
    put_route(server)
    (rank,) = ranks(ask(server))
    assert (rank["renewed_s"], rank["report"]) == (None, None)


def test_a_report_that_is_no_good_costs_no_lease(
    server: BootstrapServer,
    address: str,
    make_record: MakeRecord,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = make_record(ONE, FIRST)
    with BootstrapClient(address, WAIT_S) as client:
        client.register(record)
    body = {"coords": {"dp": 0, "cp": 0, "tp": 0, "pp": 0}, "epoch": 1, "status": {"rooms": 1}}
    path = url(server, "/v1/instances/default/leases")
    with caplog.at_level(logging.WARNING, "bootstrap_server"):
        assert requests.put(path, json=body, timeout=30).status_code == 200
    assert "refused a status report from 127.0.0.1: it is no RankStatus" in caplog.text
    assert report(ask(server)) is None


def test_a_status_function_that_raises_is_logged_and_ends_no_lease(
    server: BootstrapServer,
    address: str,
    make_record: MakeRecord,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def broken() -> RankStatus:
        calls.append(1)
        raise OSError("no such counter")

    with PatientLease(address, make_record(ONE, FIRST), status=broken) as lease:
        lease.renew()
        lease.renew()
        assert (lease.problem, calls) == (None, [1])
    assert "reports no status to its registry any more" in caplog.text
    assert "no such counter" in caplog.text


def test_a_status_function_may_have_nothing_to_say(
    server: BootstrapServer, address: str, make_record: MakeRecord
) -> None:
    with PatientLease(address, make_record(ONE, FIRST), status=lambda: None) as lease:
        lease.renew()
        assert (lease.problem, report(ask(server))) == (None, None)


# --- how soon ---


@pytest.mark.slow
def test_a_killed_rank_is_seen_though_its_lease_goes_on(
    server: BootstrapServer, address: str, make_record: MakeRecord
) -> None:
    with rank_process(address, make_record(ONE, FIRST)) as process:
        before = until(server, ranks)
        assert ranks(before)[0]["lost_s"] is None
        os.kill(process.pid, signal.SIGKILL)
        status = until(server, lambda status: ranks(status)[0]["lost_s"] is not None)
    (rank,) = ranks(status)
    assert status["events"][0]["what"] == "connection lost"
    assert before["now_s"] <= rank["lost_s"] <= status["now_s"]
    assert rank["lost_s"] - rank["renewed_s"] < status["lease_s"]
    with BootstrapClient(address, WAIT_S) as client:
        assert client.instance().ranks[0].epoch == 1  # matching goes by the lease


def test_a_rank_that_comes_back_is_live_again(
    server: BootstrapServer, address: str, make_record: MakeRecord
) -> None:
    with PatientLease(address, make_record(ONE, FIRST)) as lease:
        lease._client.close()
        until(server, lambda status: ranks(status)[0]["lost_s"] is not None)
        lease.renew()
        status = until(server, lambda status: ranks(status)[0]["lost_s"] is None)
    assert [event["what"] for event in status["events"]] == [
        "came back",
        "connection lost",
        "registered",
    ]


def test_a_lapsed_lease_is_an_event(make_record: MakeRecord) -> None:
    with BootstrapServer("127.0.0.1", 0, lease_s=0.2) as server:
        with BootstrapClient(f"127.0.0.1:{server.port}", WAIT_S) as client:
            client.register(make_record(ONE, FIRST))
            status = until(server, lambda status: status["events"][0]["what"] == "lease lapsed")
        assert ranks(status) == []


def test_connections_of_ranks_are_kept_when_others_are_not(
    server: BootstrapServer,
    address: str,
    make_record: MakeRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "KEPT_MAX", 0)
    with PatientLease(address, make_record(ONE, FIRST)) as lease:
        assert lease._client._http._connection is not None
        assert requests.get(url(server, "/health"), timeout=30).headers["Connection"] == "close"
        lease._client.close()
        until(server, lambda status: ranks(status)[0]["lost_s"] is not None)


def test_of_ranks_beyond_the_limit_no_connection_is_kept_or_missed(
    monkeypatch: pytest.MonkeyPatch, make_record: MakeRecord
) -> None:
    monkeypatch.setattr(connections, "KEPT_MAX", 0)
    monkeypatch.setattr(connections, "RANKS_KEPT_MAX", 1)
    two = Topology(1, 1, 2, 1)
    with BootstrapServer("127.0.0.1", 0, lease_s=NEVER_S) as server, ExitStack() as undo:
        where = f"127.0.0.1:{server.port}"
        leases = [
            undo.enter_context(PatientLease(where, make_record(two, coords)))
            for coords in two.coords()
        ]
        kept = [lease._client._http._connection is not None for lease in leases]
        assert kept == [True, False]
        assert all(rank["lost_s"] is None for rank in ranks(ask(server)))


def test_a_question_waits_for_news_and_snapshots_are_shared(
    server: BootstrapServer,
    client: BootstrapClient,
    make_record: MakeRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_http, "PUBLISH_EVERY_S", 1.0)
    before = ask(server)
    again = ask(server, before["revision"], 0.2)
    assert again == before  # the same snapshot: nothing has happened
    client.register(make_record(ONE, FIRST))
    after = ask(server, before["revision"], 30)
    assert len(ranks(after)) == 1
    # At most one a second is made.
    assert after["now_s"] - before["now_s"] > 0.9 * status_http.PUBLISH_EVERY_S
    # Meanwhile others get what was published, and so do they all.
    monkeypatch.setattr(status_http, "PUBLISH_EVERY_S", NEVER_S)
    client.release(make_record(ONE, FIRST).rank)
    assert ask(server) == ask(server)
    assert len(ranks(ask(server))) == 1


def test_an_answer_has_the_reports_that_changed_and_so_many_at_a_time(
    server: BootstrapServer,
    client: BootstrapClient,
    make_record: MakeRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_http, "REPORTS_BYTES_MAX", 1)
    three = Topology(1, 1, 3, 1)
    records = [make_record(three, coords) for coords in three.coords()]
    for record in records:
        client.register(record)
        client.renew(record.rank, STATUS)
    status, got = ask(server), []
    while status["reports"]:
        ((_, coords, _, _),) = status["reports"]
        got.append(coords[2])
        status = ask(server, status["revision"])
    assert got == [0, 1, 2]
    client.renew(records[0].rank, STATUS)  # nothing new
    client.renew(records[1].rank, RankStatus(rooms={"done": 4}))
    after = ask(server, status["revision"], 30)
    ((_, coords, _, told),) = after["reports"]
    assert (coords[2], told["rooms"]) == (1, {"done": 4})
    assert [rank["report"] is None for rank in ranks(after)] == [False] * 3


def test_answers_that_are_kept_are_few(
    server: BootstrapServer, client: BootstrapClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "WATCHERS_MAX", 2)
    revision = int(ask(server)["revision"])
    for after in range(6):
        assert ask(server, str(after))["revision"] == str(revision)


def test_watchers_beyond_the_limit_are_answered_at_once(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "WATCHERS_MAX", 0)
    before = ask(server)
    assert ask(server, before["revision"], 60) == before  # requests would time out after 30 s


def test_a_server_that_closes_lets_watchers_go(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = ask(server)["revision"]
    waits, until_after = threading.Event(), status_http.StatusHandlers._until_after

    async def spy(self: status_http.StatusHandlers, after: int, wait_s: float) -> None:
        waits.set()
        await until_after(self, after, wait_s)

    monkeypatch.setattr(status_http.StatusHandlers, "_until_after", spy)
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as watcher:
        path = f"/v1/status?after={revision}&wait_s=60"
        watcher.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert waits.wait(WAIT_S)
        began_s = time.monotonic()
        server.close()
        assert time.monotonic() - began_s < 30
        assert watcher.recv(4096)[:12] in (b"HTTP/1.1 200", b"")


@pytest.mark.parametrize("query", ["after=x", "after=-1", "wait_s=99", "wait_s=nan"])
def test_bad_questions(server: BootstrapServer, query: str) -> None:
    answer = requests.get(url(server, f"/v1/status?{query}"), timeout=30)
    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.json()["error"]


# --- to whom ---


def get(server: BootstrapServer, path: str, host: str = "127.0.0.1", to: str = "127.0.0.1") -> int:
    with closing(http.client.HTTPConnection(to, server.port, timeout=30)) as asking:
        asking.request("GET", path, headers={"Host": host})
        return asking.getresponse().status


def own_address() -> str:
    """An address of this host that is not its loopback one, which no packet is sent to find."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("path", ["/", "/v1/status", "/v1/status?after=5"])
def test_with_a_secret_the_page_is_for_this_host(guarded: BootstrapServer, path: str) -> None:
    for host in ("127.0.0.1", "localhost", "localhost:8998", f"[::1]:{guarded.port}", "10.0.0.1"):
        assert get(guarded, path, host) == 200
    # A site that makes its own name lead here reads nothing.
    for host in ("evil.example", "evil.example:8998", "localhost.evil.example", ""):
        assert get(guarded, path, host) in (400, 401)
    for more in ("/v1/instances", "/v1/status/", "//v1/status", "/v1/statu%73"):
        assert get(guarded, more) == 401


def test_a_browser_elsewhere_is_told_how_to_see_the_page(guarded: BootstrapServer) -> None:
    for path in ("/", "/v1/status?after=5"):
        answer = requests.get(url(guarded, path), headers={"Host": "a.name"}, timeout=30)
        assert answer.status_code == 401
        assert answer.text.endswith("is shown under an IP address or as localhost, not as 'a.name'")
    # What claims to be a proof and is none, and all else that is asked, is not answered.
    for path, proof in (("/", {HEADER: "x"}), ("/v1/instances", {})):
        answer = requests.get(url(guarded, path), headers={"Host": "a.name"} | proof, timeout=30)
        assert (answer.status_code, answer.content) == (401, b"")


def test_a_proof_opens_it_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with BootstrapServer("127.0.0.1", 0, keys=[KEY]) as server:
        monkeypatch.setattr(StatusPage, "refusal", lambda *_: "not for you")
        assert get(server, "/v1/status") == 401
        with closing(HttpClient(f"127.0.0.1:{server.port}", 30, keys=[KEY])) as asking:
            assert asking.request("GET", "/v1/status")[0] == 200


def test_who_is_on_this_host() -> None:
    with BootstrapServer("0.0.0.0", 0, page=StatusPage.LOCAL) as server:
        assert get(server, "/v1/status") == 200
        assert get(server, "/v1/status", to=own_address()) == 200
        assert get(server, "/v1/status", to="127.0.0.2") == 200  # from 127.0.0.1
        assert get(server, "/v1/instances", "a.name") == 200
        assert get(server, "/", "a.name") == 403


class _Elsewhere:
    """A transport of a client on another host."""

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return {"peername": ("10.0.0.5", 4), "sockname": ("10.0.0.6", 5)}[name]


class _Request:
    method, raw_path, host = "GET", "/v1/status", "10.0.0.6:8998"
    transport: Any = _Elsewhere()


def test_who_is_not() -> None:
    request: Any = _Request()
    assert "own host only" in str(StatusPage.LOCAL.refusal(request))
    assert StatusPage.OPEN.refusal(request) is None
    request.transport = None  # it has gone
    assert not StatusPage.LOCAL.is_for_browsers(request)


def test_an_open_page_with_a_secret_is_for_all_and_counts_as_asking_without_a_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allowance, "PER_S", 0.01)  # however long the requests take
    with BootstrapServer("127.0.0.1", 0, keys=[KEY], page=StatusPage.OPEN) as server:
        assert get(server, "/", "a.name") == 200
        assert get(server, "/v1/instances") == 401
        answers = {get(server, "/") for _ in range(150)}
        assert answers == {200, 429}


@pytest.mark.parametrize("keys", [[], [KEY]])
def test_a_page_that_is_off_is_not_there(keys: list[bytes]) -> None:
    with BootstrapServer("127.0.0.1", 0, keys=keys, page=StatusPage.OFF) as server:
        for path in ("/", "/v1/status"):
            assert get(server, path) == (401 if keys else 404)


# --- the page itself ---


def test_the_page_loads_nothing_from_elsewhere(server: BootstrapServer) -> None:
    answer = requests.get(url(server, "/"), timeout=30)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for word in ("http://", "https://", "src=", "@import", "url(", "innerHTML", "style="):
        assert word not in answer.text
    plain = requests.get(url(server, "/"), headers={"Accept-Encoding": "identity"}, timeout=30)
    assert plain.text == answer.text == Page().text
    assert len(answer.content) < 64_000


def test_the_page_may_be_asked_for_with_nothing_else(server: BootstrapServer) -> None:
    answer = requests.post(url(server, "/v1/status"), timeout=30)
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_the_routes_are_those_of_the_documentation() -> None:
    """docs/registry.md has each route that the application answers, and no others."""
    text = (Path(__file__).parents[2] / "docs/registry.md").read_text()
    documented = set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", text, re.MULTILINE))
    watch, lines = connections.ConnectionWatch(), RankLines(has_secret=False)
    app = make_app(Registry(), RoomTable(1, 1.0), time.monotonic, watch, Board(), lines)
    answered = {
        f"{route.method} {route.resource.canonical}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert documented == answered


def test_connections_of_ranks_that_renew_seldom_are_kept(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "KEEPALIVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(lease_module, "RENEWALS_PER_LEASE", NEVER_S)  # one a second
    with (
        BootstrapServer("127.0.0.1", 0, lease_s=NEVER_S) as server,
        PatientLease(f"127.0.0.1:{server.port}", make_record(ONE, FIRST)),
    ):
        first_s = ranks(ask(server))[0]["renewed_s"]
        status = until(server, lambda status: ranks(status)[0]["renewed_s"] > first_s)
    assert [event["what"] for event in status["events"]] == ["registered"]


def test_a_rank_that_loses_its_decode_server_is_in_trouble(
    server: BootstrapServer, client: BootstrapClient, make_record: MakeRecord
) -> None:
    record = make_record(ONE, FIRST)
    client.register(record)
    assert [rank["ended"] for rank in ranks(ask(server))] == [None]
    client.renew(record.rank, RankStatus(rooms={"done": 900, "aborted": 2}, peers_total=1))
    before = until(server, lambda status: ranks(status)[0]["ended"])
    assert ranks(before)[0]["ended"] == {"done": 0, "failed": 0, "aborted": 0}
    assert ranks(before)[0]["trouble"] is None
    gone = {"done": 905, "failed": 25, "aborted": 3}
    client.renew(record.rank, RankStatus(rooms=gone, peers_total=0))
    after = until(server, lambda status: status["instances"][0]["in_trouble"])
    (rank,) = ranks(after)
    assert rank["ended"] == {"done": 5, "failed": 25, "aborted": 1}
    assert "25 of 31 rooms failed, 1 of 1 decode ranks were lost" in rank["trouble"]
    assert after["ended_within_s"] == 300
