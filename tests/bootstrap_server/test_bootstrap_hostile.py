# SPDX-License-Identifier: Apache-2.0
"""The server over real sockets, asked as nobody should."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

import msgspec
import pytest
import requests
from bootstrap_http import get, put_route, route, route_body, url
from bootstrap_waits import NEVER_S, WAIT_S

from bootstrap_server import BootstrapClient, BootstrapServer, RankCoords, RankRecord, Topology
from bootstrap_server.admission import connections
from bootstrap_server.http import body as http_body
from bootstrap_server.http.body import BODY_BYTES_MAX
from bootstrap_server.ranks.sglang_http import ROOM_MAX, ROOMS_PER_QUERY_MAX

MakeRecord = Callable[..., RankRecord]


def test_what_contradicts_the_registered_ranks_changes_nothing(
    server: BootstrapServer, client: BootstrapClient, make_record: MakeRecord
) -> None:
    topology = Topology(2, 1, 2, 2)
    lease_s = max(client.register(make_record(topology, coords)) for coords in topology.coords())
    before = client.instance()
    last = RankCoords(1, 0, 1, 1)
    for sizes, words in (
        ((2, 1, 4, 2), "tp_size 4, but the 8 registered ranks of this instance have tp_size 2"),
        ((3, 1, 2, 2), "dp_size 3, but"),
        ((2, 2, 2, 2), "cp_size 2, but"),
        ((2, 1, 2, 3), "pp_size 3, but"),
    ):
        record = make_record(Topology(*sizes), last, epoch=2, port=9)
        answer = requests.put(
            url(server, "/v1/instances/default/ranks"),
            data=msgspec.json.encode(record),
            timeout=30,
        )
        assert answer.status_code == 409
        assert words in answer.json()["error"]
        assert 0 < answer.json()["left_s"] <= lease_s
        assert client.instance() == before
    answer = put_route(server)
    assert answer.status_code == 400
    assert "dp_size 1, but the 8 registered ranks" in answer.text
    for life, words in (
        ({"coords": msgspec.to_builtins(last), "epoch": 2}, "epoch 2 has no lease: epoch 1"),
        ({"coords": {"dp": 9, "cp": 0, "tp": 0, "pp": 0}, "epoch": 1}, "dp 9 cp 0 tp 0 pp 0"),
    ):
        for method in ("PUT", "DELETE"):
            path = url(server, "/v1/instances/default/leases")
            answer = requests.request(method, path, json=life, timeout=30)
            assert answer.status_code == 410
            assert words in answer.json()["error"]
    assert client.instance() == before


HOSTILE_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe{}",
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b"{}",
]
PATHS = [
    ("PUT", "/route"),
    ("PUT", "/v1/instances/default/ranks"),
    ("PUT", "/v1/instances/default/leases"),
    ("DELETE", "/v1/instances/default/leases"),
    ("POST", "/register_dp_rank"),
    ("POST", "/query_dp_ranks"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_bodies_that_are_no_bodies(server: BootstrapServer, method: str, path: str) -> None:
    with requests.Session() as session:
        for body in HOSTILE_BODIES:
            answer = session.request(method, url(server, path), data=body, timeout=30)
            assert answer.status_code == 400, body[:20]
            assert f"{method} {path}: bad body" in answer.text
        assert session.get(url(server, "/v1/instances/default"), timeout=30).json()["expected"] == 0


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_over_the_limit(
    server: BootstrapServer, method: str, path: str, chunked: bool
) -> None:
    def parts() -> object:
        for _ in range(17):
            yield b" " * (BODY_BYTES_MAX >> 4)

    data = parts() if chunked else b" " * (BODY_BYTES_MAX + 1)
    answer = requests.request(method, url(server, path), data=data, timeout=30)
    assert answer.status_code == 413
    assert str(BODY_BYTES_MAX) in answer.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_tp_rank": -1}, "tp rank is -1"),
        ({"attn_tp_rank": 2}, "tp rank 2 does not exist: tp_size is 2"),
        ({"attn_tp_rank": "0"}, "Expected `int`, got `str`"),
        ({"attn_tp_rank": True}, "Expected `int`, got `bool`"),
        ({"attn_tp_size": 10**30}, "tp_size is 1000000"),
        ({"pp_size": 0}, "pp_size is 0"),
        ({"attn_dp_size": 2, "system_dp_size": 2}, "cannot both exceed 1"),
        ({"rank_port": 0}, "port is 0"),
        ({"rank_ip": ""}, "host has 0 characters"),
        ({"page_size": None}, "Expected `int`, got `null`"),
        ({"kv_cache_dtype": "x" * 10_000}, "kv_cache_dtype has 10000"),
        ({"dsv41_spec_layout": {"a": {"b": 1}}}, "dsv41_spec_layout"),
        ({"dsv41_spec_layout": {"a": [[]] * 6_000}}, "dsv41_spec_layout has 18007 bytes"),
        ({"load_balance_method": []}, "Expected `str`, got `array`"),
    ],
)
def test_bad_stock_records(server: BootstrapServer, changes: dict[str, object], words: str) -> None:
    answer = put_route(server, **changes)
    assert answer.status_code == 400
    assert words in answer.text
    assert "none of its ranks" in get(server, route(-1, -1, -1, -1)).text


def test_each_missing_field_is_named(server: BootstrapServer) -> None:
    required = list(route_body())[:14]
    for name in required:
        body = {key: value for key, value in route_body().items() if key != name}
        answer = requests.put(url(server, "/route"), json=body, timeout=30)
        assert answer.status_code == 400
        assert f"`{name}`" in answer.text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("config.topology.tp_size", "tp_size is -7"),
        ("config.format.page_size", "page_size is -7"),
        ("config.protocol", "protocol is -7"),
        ("rank.coords.dp", "dp rank is -7"),
        ("rank.port", "port is -7"),
        ("rank.epoch", "epoch is -7"),
    ],
)
def test_bad_records_of_ours(
    server: BootstrapServer, make_record: MakeRecord, path: str, words: str
) -> None:
    body = msgspec.to_builtins(make_record(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)))
    *outer, last = path.split(".")
    part = body
    for name in outer:
        part = part[name]
    part[last] = -7
    answer = requests.put(url(server, "/v1/instances/default/ranks"), json=body, timeout=30)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert get(server, "/v1/instances/default").json()["expected"] == 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/register_dp_rank", {"bootstrap_room": -1, "dp_rank": 0}, "bootstrap_room is outside"),
        ("/register_dp_rank", {"bootstrap_room": 2**64, "dp_rank": 0}, "bootstrap_room is outside"),
        ("/register_dp_rank", {"bootstrap_room": 1, "dp_rank": -1}, "dp_rank -1"),
        ("/register_dp_rank", {"bootstrap_room": 1, "dp_rank": 10**9}, "dp_rank 1000000000"),
        ("/register_dp_rank", {"bootstrap_room": 1}, "`dp_rank`"),
        ("/query_dp_ranks", {"bootstrap_rooms": [1, "2"]}, "Expected `int`"),
        ("/query_dp_ranks", {"bootstrap_rooms": [1] * (ROOMS_PER_QUERY_MAX + 1)}, "at most 32768"),
    ],
)
def test_bad_rooms(server: BootstrapServer, path: str, body: dict[str, object], words: str) -> None:
    answer = requests.post(url(server, path), json=body, timeout=30)
    assert answer.status_code == 400
    assert words in answer.text


def test_a_room_that_can_be_none_spoils_no_question_for_others(server: BootstrapServer) -> None:
    """Clients choose the numbers, and SGLang asks for all requests that wait at once."""
    room, bad = {"bootstrap_room": 7, "dp_rank": 3}, [-1, ROOM_MAX + 1, 10**40]
    requests.post(url(server, "/register_dp_rank"), json=room, timeout=30)
    answer = requests.post(
        url(server, "/query_dp_ranks"), json={"bootstrap_rooms": [*bad, 7]}, timeout=30
    )
    assert (answer.status_code, answer.json()) == (200, {"7": 3})


def test_a_dp_rank_outside_the_instance_is_refused(server: BootstrapServer) -> None:
    put_route(server)
    answer = requests.post(
        url(server, "/register_dp_rank"), json={"bootstrap_room": 1, "dp_rank": 1}, timeout=30
    )
    assert (answer.status_code, answer.text) == (400, "dp_rank 1 does not exist: dp_size is 1")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("wait_s=x", "wait_s must be a number of seconds up to 60: 'x'"),
        ("wait_s=-1", "wait_s"),
        ("wait_s=61", "up to 60"),
        ("wait_s=1e3", "wait_s"),
        ("wait_s=nan", "wait_s"),
        ("wait_s=", "wait_s"),
        ("after=-1", "after must be a revision number"),
        ("after=1.5", "after must be a revision number"),
        ("after=" + "9" * 20, "after must be a revision number"),
    ],
)
def test_bad_waits(server: BootstrapServer, query: str, words: str) -> None:
    answer = get(server, f"/v1/instances/default?{query}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]


@pytest.mark.parametrize("name", ["-", "%20", "a%2Fb", "x" * 65, "%00", "%C3%A9"])
@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("PUT", "/ranks"), ("PUT", "/leases")])
def test_bad_instance_names(
    server: BootstrapServer, make_record: MakeRecord, method: str, path: str, name: str
) -> None:
    record = make_record(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0))
    life = {"coords": msgspec.to_builtins(record.rank.coords), "epoch": 1}
    body = life if path == "/leases" else msgspec.to_builtins(record)
    answer = requests.request(
        method, url(server, f"/v1/instances/{name}{path}"), json=body, timeout=30
    )
    assert answer.status_code == 400
    assert "instance name" in answer.json()["error"]
    assert list(get(server, "/v1/instances").json()) == ["default"]


@pytest.mark.parametrize("number", ["x", "1.0", "1_0", "٣", "9" * 10_000, "-2", "", "%00"])
def test_bad_query_numbers(server: BootstrapServer, number: str) -> None:
    answer = get(server, route(0, 0, number, 0))
    assert answer.status_code in (400, 431)
    assert answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "//", 404),
        ("POST", "/", 405),
        ("GET", "/v2/instances", 404),
        ("GET", "/v1/instances/default/", 404),
        ("POST", "/v1/instances/default", 405),
        ("PUT", "/v2/ranks", 404),
        ("DELETE", "/route", 405),
        ("POST", "/v1/instances/default/ranks", 405),
        ("GET", "/query_dp_ranks", 405),
    ],
)
def test_unknown_paths_versions_and_methods(
    server: BootstrapServer, method: str, path: str, status: int
) -> None:
    answer = requests.request(method, url(server, path), timeout=30)
    assert answer.status_code == status
    sentence = json.loads(answer.text)["error"] if path.startswith("/v") else answer.text
    assert path in sentence
    assert ("/v1/instances" in sentence and "/health" in sentence) == (status == 404)
    assert ("Allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_hundred_megabytes_is_refused_without_being_kept(
    server: BootstrapServer, chunked: bool
) -> None:
    whole = b" " * (100 << 20)
    data = (whole[at : at + (1 << 20)] for at in range(0, len(whole), 1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        body = data if chunked else whole
        answer = requests.put(url(server, "/route"), data=body, timeout=60)
        assert answer.status_code == 413
    except requests.ConnectionError:
        pass  # the server has answered, and closed, while this client was still sending
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10  # KiB
    assert "none of its ranks" in get(server, route(-1, -1, -1, -1)).text


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("begun", [b"", b"PUT /route HTT", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_client_that_never_asks_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_DEADLINE_S", NEVER_S)
    monkeypatch.setattr("bootstrap_server.server.TICK_S", 0.02)
    with (
        BootstrapServer(host="127.0.0.1", port=0) as server,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, WAIT_S)) as asking,
    ):
        asking.request("GET", "/health")
        assert asking.getresponse().read() == b"OK"
        monkeypatch.setattr(connections, "HEAD_DEADLINE_S", 0.05)
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
            parts: list[bytes] = []
            with suppress(ConnectionError):  # Turned away before it has said that much.
                connection.sendall(begun)
                while part := connection.recv(1 << 16):
                    parts.append(part)
            answer = b"".join(parts)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"no complete request has arrived within 0.05 s" in answer
        # A connection that has asked once may rest: this one is older.
        asking.request("GET", "/health")
        assert asking.getresponse().read() == b"OK"


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, make_record: MakeRecord
) -> None:
    monkeypatch.setattr(connections, "READ_DEADLINE_S", 0.05)
    lost, connection_lost = threading.Event(), connections._Watched.connection_lost

    def spy(self: connections._Watched, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set()

    monkeypatch.setattr(connections._Watched, "connection_lost", spy)
    topology = Topology(1, 1, 2048, 1)
    with (
        BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S) as server,
        BootstrapClient(f"127.0.0.1:{server.port}", WAIT_S) as client,
        socket.socket() as reader,
    ):
        for coords in topology.coords():
            client.register(make_record(topology, coords))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(WAIT_S)
        reader.connect(("127.0.0.1", server.port))
        # Uncompressed, about 250 kB each: far more than the sockets' buffers hold.
        reader.sendall(b"GET /v1/instances/default HTTP/1.1\r\nHost: x\r\n\r\n" * 40)
        assert lost.wait(WAIT_S)
        assert read_all(reader).count(b"HTTP/1.1 200 OK") < 40
        assert client.instance().config.topology == topology


def test_with_many_connections_none_is_kept(
    server: BootstrapServer,
    client: BootstrapClient,
    monkeypatch: pytest.MonkeyPatch,
    make_record: MakeRecord,
) -> None:
    monkeypatch.setattr(connections, "KEPT_MAX", 2)
    client.register(make_record(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)))
    with ExitStack() as undo:
        sessions = [undo.enter_context(requests.Session()) for _ in range(3)]
        answers = [session.get(url(server, "/health"), timeout=30) for session in sessions]
        # One connection is the client's own.
        assert [answer.headers.get("Connection") for answer in answers] == [None, "close", "close"]
        for _ in range(3):
            assert client.instance().ranks[0].port == 10_000


def test_a_client_that_stops_in_mid_body_is_answered(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "BODY_DEADLINE_S", 0.01)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert get(server, "/health").text == "OK"


@pytest.mark.parametrize(
    "noise",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of TLS
        b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",  # and then gone
        b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"\x00" * 4096,
    ],
)
def test_noise_on_the_socket_harms_nobody(
    server: BootstrapServer, caplog: pytest.LogCaptureFixture, noise: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert get(server, "/health").text == "OK"
    assert get(server, "/v1/instances/default").json()["expected"] == 0
    assert caplog.records == []  # or a stranger could fill SGLang's log
