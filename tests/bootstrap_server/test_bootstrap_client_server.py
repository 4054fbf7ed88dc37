# SPDX-License-Identifier: Apache-2.0
"""Our client against our server, against nobody, and against strangers."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import bootstrap_server
from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    NotReady,
    RankCoords,
    RankRecord,
    RegistrationRefused,
    Topology,
    Unreachable,
)
from bootstrap_server import client as client_module
from bootstrap_server.sglang_http import ROOMS_PER_QUERY_MAX

MakeRecord = Callable[..., RankRecord]

ONE = Topology(1, 1, 1, 1)
FIRST = RankCoords(0, 0, 0, 0)
PORT_FLAG = "--disaggregation-bootstrap-port"


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_an_instance_from_first_rank_to_last(
    client: BootstrapClient, make_record: MakeRecord
) -> None:
    topology = Topology(2, 1, 2, 1)
    with pytest.raises(NotReady) as empty:
        client.instance()
    assert (empty.value.registered, empty.value.expected) == (0, 0)
    records = [make_record(topology, coords) for coords in topology.coords()]
    for record in reversed(records[1:]):
        client.register(record)
        with pytest.raises(NotReady) as caught:
            client.instance()
        assert caught.value.expected == 4
        assert FIRST in caught.value.missing
    client.register(records[0])
    instance = client.instance()
    assert instance.config == records[0].config
    assert instance.ranks == tuple(record.rank for record in records)
    assert instance.rank(records[2].rank.coords) == records[2].rank


def test_why_ranks_have_gone_reaches_the_client(
    client: BootstrapClient, make_record: MakeRecord
) -> None:
    client.register(make_record(ONE, FIRST, epoch=1))
    client.register(make_record(Topology(1, 1, 2, 1), FIRST, epoch=2))
    with pytest.raises(NotReady, match="1 ranks with tp_size 1 were replaced"):
        client.instance()


def test_a_refusal_is_final(client: BootstrapClient, make_record: MakeRecord) -> None:
    client.register(make_record(ONE, FIRST, epoch=2))
    with pytest.raises(RegistrationRefused, match="page_size 1, but"):
        client.register(make_record(ONE, FIRST, epoch=2, page_size=1))
    with pytest.raises(RegistrationRefused, match="former life"):
        client.register(make_record(ONE, FIRST, epoch=1))


def test_many_rooms_are_asked_for_in_parts(client: BootstrapClient) -> None:
    rooms = range(2**62, 2**62 + ROOMS_PER_QUERY_MAX + 1)
    client.register_dp_rank(rooms[0], 1)
    client.register_dp_rank(rooms[-1], 2)
    assert client.query_dp_ranks(rooms) == {rooms[0]: 1, rooms[-1]: 2}
    assert client.query_dp_ranks([]) == {}
    with pytest.raises(BootstrapError, match="dp_rank -1 does not exist") as caught:
        client.register_dp_rank(1, -1)
    assert "another service" not in str(caught.value)


def test_the_server_may_come_up_later(make_record: MakeRecord) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
    port = taken.getsockname()[1]
    started: list[BootstrapServer] = []
    naps: list[float] = []

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        if len(naps) == 3:
            taken.close()
            started.append(BootstrapServer("127.0.0.1", port))

    with BootstrapClient(f"127.0.0.1:{port}", sleep=sleep) as client:
        client.register(make_record(ONE, FIRST))
        assert client.instance().ranks[0].coords == FIRST
    started[0].close()
    assert len(naps) == 3
    assert naps == sorted(set(naps))


def test_registration_gives_up_at_the_deadline(make_record: MakeRecord) -> None:
    now_s = [100.0]

    def sleep(duration_s: float) -> None:
        now_s[0] += duration_s

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with BootstrapClient(address, sleep=sleep, clock=lambda: now_s[0]) as client:
            with pytest.raises(Unreachable) as caught:
                client.register(make_record(ONE, FIRST), deadline_s=9)
            with pytest.raises(Unreachable, match="refused"):
                client.instance()
    assert now_s[0] == pytest.approx(109)
    for words in ("dp 0 cp 0 tp 0 pp 0", "for 9 s", address, "refused"):
        assert words in str(caught.value)


@contextmanager
def stranger(status: int, body: bytes) -> Iterator[str]:
    """Something else that speaks HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = answer  # noqa: N815 - the names that http.server calls
        do_PUT = answer  # noqa: N815
        do_POST = answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>welcome</html>"),
        (404, b"404: Not Found"),
        (301, b""),
        (503, b"busy"),
        (500, b"\xff\x00"),
        (200, b'{"config": 1}'),
        (200, b'"OK"'),
    ],
)
def test_strangers_are_recognised(make_record: MakeRecord, status: int, body: bytes) -> None:
    with stranger(status, body) as address, BootstrapClient(address) as client:
        for ask in (
            client.instance,
            lambda: client.register(make_record(ONE, FIRST)),
            lambda: client.register_dp_rank(1, 0),
            lambda: client.query_dp_ranks([1]),
        ):
            with pytest.raises(BootstrapError) as caught:
                ask()
            assert type(caught.value) is BootstrapError
            for words in (address, f"status {status}", PORT_FLAG):
                assert words in str(caught.value)


def test_endless_answers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ANSWER_BYTES_MAX", 1 << 17)
    with (
        stranger(200, b" " * (1 << 20)) as address,
        BootstrapClient(address) as client,
        pytest.raises(BootstrapError, match="more than 131072 bytes"),
    ):
        client.instance()


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "http://h:1", "a b:1", "::1:80"]
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(BootstrapError, match="not of the form host:port"):
        BootstrapClient(address)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "localhost"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("::", "[::]"),
    ],
)
def test_hosts_of_all_kinds(host: str, address: str) -> None:
    if ":" in host and not has_ipv6_loopback():
        with pytest.raises(BootstrapError, match="cannot listen"):
            BootstrapServer(host=host, port=0)
        return
    with (
        BootstrapServer(host=host, port=0) as server,
        BootstrapClient(f"{address}:{server.port}") as client,
        pytest.raises(NotReady),
    ):
        client.instance()


def test_a_taken_port_is_one_clear_sentence(server: BootstrapServer) -> None:
    with pytest.raises(BootstrapError) as caught:
        BootstrapServer(host="127.0.0.1", port=server.port)
    taken = os.strerror(errno.EADDRINUSE)
    for words in ("127.0.0.1", f"port {server.port}", taken, PORT_FLAG):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 65_536, "outside 0..65535"),
        ("127.0.0.1", -1, "outside 0..65535"),
        ("", 0, "host is empty"),
        ("no.such.host.invalid", 0, "cannot resolve"),
        ("x" * 300, 0, "cannot resolve"),
        ("192.0.2.1", 0, "cannot listen on 192.0.2.1"),
    ],
)
def test_places_where_nobody_can_listen(host: str, port: int, words: str) -> None:
    with pytest.raises(BootstrapError, match=words):
        BootstrapServer(host=host, port=port)


def test_close_frees_the_port_and_may_be_repeated() -> None:
    server = BootstrapServer(host="127.0.0.1", port=0)
    with BootstrapClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(NotReady):
            client.instance()  # leaves an idle connection open
        server.close()
        server.close()
        with pytest.raises(Unreachable):
            client.instance()
    assert "bootstrap-server" not in {thread.name for thread in threading.enumerate()}
    BootstrapServer(host="127.0.0.1", port=server.port).close()


@contextmanager
def standalone(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bootstrap_server", *arguments],
        cwd=Path(bootstrap_server.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_standalone_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with standalone("--host", "127.0.0.1", "--port", "0", "--log-level", "info") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("bootstrap server listens on 127.0.0.1 port ")
        with BootstrapClient(f"127.0.0.1:{line.split()[-1]}") as client, pytest.raises(NotReady):
            client.instance()
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
        assert (process.returncode, output) == (0, "")
        assert "Traceback" not in errors


def test_standalone_says_in_one_line_that_the_port_is_taken(server: BootstrapServer) -> None:
    with standalone("--port", str(server.port)) as process:
        output, errors = process.communicate(timeout=10)
        assert (process.returncode, output) == (1, "")
        assert errors.count("\n") == 1
        assert os.strerror(errno.EADDRINUSE) in errors
