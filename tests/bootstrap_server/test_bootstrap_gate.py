# SPDX-License-Identifier: Apache-2.0
"""A bootstrap server with a secret, over real HTTP."""

from __future__ import annotations

import email.utils
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
import requests
from bootstrap_http import route, route_body, url
from bootstrap_waits import NEVER_S, WAIT_S, patient_client

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    NotReady,
    RankCoords,
    RankLease,
    RankRecord,
    RegistrationRefused,
    Topology,
)
from bootstrap_server.admission.proof import HEADER, Claim, digest_of, prove_request
from bootstrap_server.admission.refusals import LOG_EVERY_S, Refusals
from bootstrap_server.admission.replays import SKEW_MAX_S, Replays
from bootstrap_server.client import proofs as client_proof
from bootstrap_server.http.gate import Gate

MakeRecord = Callable[..., RankRecord]

ONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
OLD, NEW = b"o" * 32, b"n" * 32
INSTANCE = "/v1/instances/default"
ROUTES = [
    ("PUT", "/route"),
    ("GET", route(-1, -1, -1, -1)),
    ("POST", "/register_dp_rank"),
    ("POST", "/query_dp_ranks"),
    ("GET", "/health?"),
    ("GET", "//health"),
    ("POST", "/health"),
    ("GET", "/v1/instances"),
    ("GET", INSTANCE),
    ("PUT", f"{INSTANCE}/ranks"),
    ("PUT", f"{INSTANCE}/leases"),
    ("DELETE", f"{INSTANCE}/leases"),
    ("GET", "/no/such/path"),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[BootstrapServer]:
    with BootstrapServer(host="127.0.0.1", port=0, keys=[OLD]) as running:
        yield running


def address(server: BootstrapServer | HTTPServer) -> str:
    port = server.port if isinstance(server, BootstrapServer) else server.server_port
    return f"127.0.0.1:{port}"


def proved(method: str, path: str, body: bytes = b"", number: int = 1, ago_s: float = 0) -> str:
    """The header of a client of its own."""
    claim = Claim(int((time.time() - ago_s) * 1e3), os.urandom(16), number, digest_of(body))
    return str(prove_request(OLD, method, path, claim))


def test_ranks_with_the_secret_are_served_as_ever(
    make_record: MakeRecord,
) -> None:
    with BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S, keys=[OLD]) as server:
        record = make_record(ONE, FIRST)
        with RankLease(address(server), record, keys=[OLD], make_client=patient_client) as lease:
            with BootstrapClient(address(server), WAIT_S, keys=[OLD]) as client:
                # Compressed, as HttpClient asks.
                assert client.instance().ranks == (record.rank,)
                client.register_dp_rank(5, 0)
                assert client.query_dp_ranks([5, 6]) == {5: 0}
                with pytest.raises(RegistrationRefused, match="is alive at"):
                    client.register(make_record(ONE, FIRST, epoch=9, port=9), deadline_s=0)
            lease.renew()
            assert lease.problem is None
        with (
            BootstrapClient(address(server), WAIT_S, keys=[OLD]) as client,
            pytest.raises(NotReady, match="has been shut down"),
        ):
            client.instance()


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_strangers_get_401_and_not_a_word(guarded: BootstrapServer, method: str, path: str) -> None:
    good = proved(method, path)
    bad = good[:-1] + ("0" if good[-1] != "0" else "1")
    for headers in ({}, {HEADER: "1"}, {HEADER: bad}):
        with closing(http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)) as asking:
            asking.request(method, path, b'{"bootstrap_rooms": [', headers)
            answer = asking.getresponse()
            assert (answer.status, answer.read()) == (401, b"")
            assert HEADER not in answer.headers


def test_health_is_open_and_says_nothing(guarded: BootstrapServer) -> None:
    answer = requests.get(url(guarded, "/health"), timeout=30)
    assert (answer.status_code, answer.text) == (200, "OK")


def test_stock_ranks_change_nothing(guarded: BootstrapServer) -> None:
    answer = requests.put(url(guarded, "/route"), json=route_body(), timeout=30)
    assert (answer.status_code, answer.content) == (401, b"")
    with BootstrapClient(address(guarded), WAIT_S, keys=[OLD]) as client, pytest.raises(NotReady):
        client.instance()


def test_a_body_is_not_read_before_the_proof(guarded: BootstrapServer) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)) as asking:
        asking.putrequest("PUT", "/route")
        asking.putheader("Content-Length", "1000000")
        asking.endheaders()
        assert asking.getresponse().status == 401


def test_a_request_is_answered_once(guarded: BootstrapServer) -> None:
    headers = {HEADER: proved("GET", INSTANCE)}
    asked = [requests.get(url(guarded, INSTANCE), headers=headers, timeout=30) for _ in range(2)]
    assert [answer.status_code for answer in asked] == [503, 401]
    # Nor is it as another request.
    headers = {HEADER: proved("GET", INSTANCE)}
    answer = requests.get(url(guarded, "/v1/instances"), headers=headers, timeout=30)
    assert answer.status_code == 401


def test_another_body_than_was_proved_is_refused(guarded: BootstrapServer) -> None:
    path = "/query_dp_ranks"
    headers = {HEADER: proved("POST", path, b'{"bootstrap_rooms": [1]}')}
    answer = requests.post(
        url(guarded, path), data=b'{"bootstrap_rooms": [2]}', headers=headers, timeout=30
    )
    assert answer.status_code == 400
    assert "not the one that was proved" in answer.text


def test_refusals_of_the_registry_are_proved(guarded: BootstrapServer) -> None:
    for path in ("/no/such/path", "/v1/instances/!"):
        headers = {HEADER: proved("GET", path)}
        answer = requests.get(url(guarded, path), headers=headers, timeout=30)
        assert answer.status_code in (400, 404)
        assert HEADER in answer.headers


@pytest.mark.parametrize("ago_s", [SKEW_MAX_S + 60, -SKEW_MAX_S - 60])
def test_a_request_of_another_time_is_refused(guarded: BootstrapServer, ago_s: float) -> None:
    headers = {HEADER: proved("GET", INSTANCE, ago_s=ago_s)}
    answer = requests.get(url(guarded, INSTANCE), headers=headers, timeout=30)
    assert (answer.status_code, answer.content) == (401, b"")


# --- what operators are told ---


def refused(server: BootstrapServer, keys: list[bytes]) -> str:
    with BootstrapClient(address(server), WAIT_S, keys=keys) as client:
        with pytest.raises(BootstrapError) as error:
            client.instance()
        return str(error.value)


def test_a_client_learns_why_it_is_not_served(
    guarded: BootstrapServer, server: BootstrapServer
) -> None:
    assert "serves only SGLang servers that have its secret" in refused(guarded, [])
    assert "refuses us: it has another secret" in refused(guarded, [NEW])
    unproved = refused(server, [NEW])
    assert "status 503 and does not prove that it has our secret: it has none" in unproved
    for sentence in (refused(guarded, []), refused(guarded, [NEW]), unproved):
        assert "same" in sentence
        assert "SGLANG_MOONCAKE_SECRET_FILE" in sentence


def test_a_lease_that_is_refused_says_so_at_once(
    guarded: BootstrapServer, make_record: MakeRecord
) -> None:
    with pytest.raises(BootstrapError, match="refuses us: it has another secret"):
        RankLease(address(guarded), make_record(ONE, FIRST), deadline_s=60.0, keys=[NEW])


def test_a_client_whose_clock_is_wrong_learns_both_times(
    guarded: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        time_ns = staticmethod(lambda: time.time_ns() + 10**12)
        time = staticmethod(lambda: time.time() + 1000)

    monkeypatch.setattr(client_proof, "time", Clock)
    assert "refuses us: its clock says 1" in refused(guarded, [OLD])
    assert "set the clocks" in refused(guarded, [OLD])


def test_who_is_refused_is_in_the_log_of_the_server_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with BootstrapServer(host="127.0.0.1", port=0, keys=[OLD]) as server:
        assert requests.get(url(server, INSTANCE), timeout=30).content == b""
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.msg]
    assert line.startswith("refused a request from 127.0.0.1: it does not prove that it has our")


def test_each_cause_has_a_sentence() -> None:
    claim = Claim(5_000, b"c" * 16, 1, digest_of(b""))
    proof = prove_request(OLD, "GET", INSTANCE, claim)
    gate = Gate([OLD], clock=lambda: 1000.0)
    assert "does not prove that it has our secret" in gate.admit("GET", INSTANCE, None, "a")
    assert "no proof of version 1" in gate.admit("GET", INSTANCE, "2", "a")
    assert "wrong key" in Gate([NEW]).admit("GET", INSTANCE, str(proof), "a")
    assert "its clock says 5 and ours 1000" in gate.admit("GET", INSTANCE, str(proof), "a")
    full = Gate([OLD], clock=lambda: 5.0, replays=Replays(clients_max=0))
    assert "the limit" in full.admit("GET", INSTANCE, str(proof), "a")


def test_the_log_has_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    refusals = Refusals(clock=lambda: now_s[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            refusals.note("10.0.0.9", "wrong key")
        now_s[0] += LOG_EVERY_S
        refusals.note("10.0.0.9", "wrong key")
    assert caplog.messages == [
        "refused a request from 10.0.0.9: wrong key",
        "refused a request from 10.0.0.9: wrong key (99 earlier refusals were not logged)",
    ]


# --- rotation ---


@pytest.mark.parametrize(
    ("client_keys", "server_keys"),
    [
        ([OLD], [OLD, NEW]),
        ([OLD, NEW], [OLD]),
        ([OLD, NEW], [NEW, OLD]),
        ([NEW, OLD], [OLD, NEW]),
        ([NEW, OLD], [NEW]),
        ([NEW], [NEW, OLD]),
    ],
)
def test_a_secret_is_replaced_while_servers_run(
    client_keys: list[bytes], server_keys: list[bytes]
) -> None:
    with (
        BootstrapServer(host="127.0.0.1", port=0, keys=server_keys) as server,
        BootstrapClient(address(server), WAIT_S, keys=client_keys) as client,
        pytest.raises(NotReady),
    ):
        client.instance()


# --- a registry that is none of ours ---


@pytest.fixture
def liar(guarded: BootstrapServer) -> Iterator[HTTPServer]:
    """Passes requests on, and changes the answers by its `change`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with closing(http.client.HTTPConnection("127.0.0.1", guarded.port)) as asking:
                asking.request("GET", self.path, headers=dict(self.headers))
                answer = asking.getresponse()
                kept = ("Content-Encoding", HEADER)
                headers = {name: answer.headers[name] for name in kept if name in answer.headers}
                status, headers, body = self.server.change(answer.status, headers, answer.read())
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_answers_that_somebody_has_changed_are_refused(liar: HTTPServer) -> None:
    old = []

    def keep(status: int, headers: dict[str, str], body: bytes) -> object:
        old.append((status, headers, body))
        return status, headers, body

    changes = [
        keep,
        lambda status, headers, body: (status, headers, body.replace(b"0", b"1")),
        lambda status, headers, body: (200, headers, body),
        lambda status, headers, body: (status, headers | {"Content-Encoding": "gzip"}, body),
        lambda status, headers, body: (status, headers | {HEADER: "1 é"}, body),
        lambda status, headers, body: old[0],
    ]
    sentences = []
    with BootstrapClient(address(liar), WAIT_S, keys=[OLD]) as client:
        for change in changes:
            liar.change = change
            with pytest.raises(BootstrapError) as error:
                client.instance()
            sentences.append(str(error.value))
        assert "is not ready: none of its ranks" in sentences[0]
        assert all("a wrong proof" in sentence for sentence in sentences[1:])
        liar.change = lambda status, headers, body: (status, {}, body)
        with pytest.raises(BootstrapError, match="does not prove that it has our secret"):
            client.instance()


@pytest.mark.parametrize(
    ("date", "sentence"),
    [
        ("", "it has another secret"),
        ("yesterday", "it has another secret"),
        ("Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "it has another secret"),
        (email.utils.formatdate(1_000_000_000, usegmt=True), "its clock says 1000000000 and ours"),
    ],
)
def test_the_date_of_a_refusal_may_be_anything(date: str, sentence: str) -> None:
    assert sentence in client_proof._unproved(401, date)


def test_a_forked_child_is_another_client() -> None:
    ours = client_proof._process.client
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, client_proof._process.client)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        theirs = file.read()
    os.waitpid(child, 0)
    assert len(theirs) == len(ours) == 16
    assert theirs != ours
    assert client_proof._process.client == ours


def test_records_are_bodies_too(guarded: BootstrapServer, make_record: MakeRecord) -> None:
    path = "/v1/instances/other/ranks"
    body = msgspec.json.encode(make_record(ONE, FIRST))
    headers = {HEADER: proved("PUT", path, body)}
    answer = requests.put(url(guarded, path), data=body, headers=headers, timeout=30)
    assert answer.status_code == 200
