# SPDX-License-Identifier: Apache-2.0
"""Strangers who open many connections, or ask often: bounded, and nobody else suffers."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from bootstrap_waits import NEVER_S, WAIT_S, until

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    RankCoords,
    RankRecord,
    Topology,
)
from bootstrap_server import server as running
from bootstrap_server.admission import allowance, connections, refusals
from bootstrap_server.admission.allowance import BURST, PER_S, SOURCES_MAX, Allowance
from bootstrap_server.admission.connections import ConnectionWatch
from bootstrap_server.http import body as http_body

MakeRecord = Callable[..., RankRecord]

KEY = b"k" * 32
ONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
FEW = 40
SAYINGS = {
    "nothing": b"",
    "half a head": b"GET /v1/instances/default HTTP/1.1\r\nHost: x\r\nX-A: ",
    "half a body": b"PUT /v1/instances/default/ranks HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: 5000\r\n\r\n{",
}


@pytest.fixture(params=["secret", "no secret"])
def keys(request: pytest.FixtureRequest) -> list[bytes]:
    return [KEY] if request.param == "secret" else []


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> list[ConnectionWatch]:
    """That of each server that is started; few connections may have proved nothing."""
    made: list[ConnectionWatch] = []
    init = ConnectionWatch.__init__

    def spy(self: ConnectionWatch, *arguments: object) -> None:
        init(self, *arguments)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(connections, "UNPROVED_OF_SOURCE_MAX", FEW)
    monkeypatch.setattr(ConnectionWatch, "__init__", spy)
    return made


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def client(port: int, keys: list[bytes]) -> BootstrapClient:
    return BootstrapClient(f"127.0.0.1:{port}", timeout_s=WAIT_S, keys=keys)


@pytest.mark.parametrize("said", SAYINGS)
def test_however_many_say_too_little_few_are_kept_and_ranks_are_served(
    keys: list[bytes],
    watch: list[ConnectionWatch],
    said: str,
    make_record: MakeRecord,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusals, "LOG_EVERY_S", NEVER_S)
    record = make_record(ONE, FIRST)
    with (
        BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S, keys=keys) as server,
        contextlib.ExitStack() as u,
    ):
        friend = u.enter_context(client(server.port, keys))
        friend.register(record)
        for _ in range(10 * FEW):
            stranger = u.enter_context(connect(server.port))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(SAYINGS[said])
        with client(server.port, keys) as late:
            assert late.instance().ranks == (record.rank,)
        until(lambda: watch[0]._open <= FEW + 1, "few are kept")
        assert len(watch[0]._unproved) <= FEW
        # Over the connection that it had.
        assert friend.renew(record.rank) > 0
        assert watch[0]._open <= FEW + 1
    assert caplog.text.count("too many unauthenticated connections") == 1


def test_connections_that_have_proved_something_make_room_for_nobody(
    keys: list[bytes], watch: list[ConnectionWatch], make_record: MakeRecord
) -> None:
    record = make_record(ONE, FIRST)
    with (
        BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S, keys=keys) as server,
        contextlib.ExitStack() as u,
    ):
        friends = [u.enter_context(client(server.port, keys)) for _ in range(2 * FEW)]
        for friend in friends:
            friend.register(record)
        assert watch[0]._open == 2 * FEW
        for friend in friends:
            assert friend.renew(record.rank) > 0
        assert watch[0]._open == 2 * FEW


def test_who_asks_for_health_has_proved_nothing(watch: list[ConnectionWatch]) -> None:
    with (
        BootstrapServer(host="127.0.0.1", port=0, keys=[KEY]) as server,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, WAIT_S)) as asking,
    ):
        asking.request("GET", "/health")
        answer = asking.getresponse()
        assert answer.read() == b"OK"
        # So that he cannot begin another request over it.
        assert answer.getheader("Connection") == "close"
        until(lambda: not watch[0]._open, "the connection is closed")


def test_connections_are_bounded_in_all(
    keys: list[bytes],
    watch: list[ConnectionWatch],
    monkeypatch: pytest.MonkeyPatch,
    make_record: MakeRecord,
) -> None:
    """Who comes last goes, if nobody else has proved nothing."""
    monkeypatch.setattr(connections, "OPEN_MAX", 3)
    record = make_record(ONE, FIRST)
    with (
        BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S, keys=keys) as server,
        contextlib.ExitStack() as u,
    ):
        friends = [u.enter_context(client(server.port, keys)) for _ in range(3)]
        for friend in friends:
            friend.register(record)
        for _ in range(3):
            with connect(server.port) as one:
                assert one.recv(1) == b""
        for friend in friends:
            assert friend.renew(record.rank) > 0
        assert watch[0]._open == 3


@pytest.mark.slow
def test_a_server_with_few_descriptors_serves_on(tmp_path: Path) -> None:
    """Its bounds are parts of what it has."""
    path = tmp_path / "secret"
    path.write_text("6f1d0c8a92e47b35b7e2f90a4c81d356\n")
    path.chmod(0o600)
    argv = [sys.executable, "-m", "bootstrap_server", "--port", "0", "--secret-file", str(path)]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline().split()[-1])
        with contextlib.ExitStack() as undo:
            for _ in range(600):
                undo.enter_context(connect(port))
            until(lambda: descriptors(process.pid) < 140, "few are kept")
            asking = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
            asking.request("GET", "/health")
            assert asking.getresponse().read() == b"OK"
            asking.close()
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


# --- who drips ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "deadline", "said"),
    [
        (connections, "HEAD_DEADLINE_S", b""),
        (
            http_body,
            "BODY_DEADLINE_S",
            b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n",
        ),
        (running, "KEEPALIVE_TIMEOUT_S", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
    ],
    ids=["first head", "body", "second head"],
)
def test_who_drips_has_one_deadline_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, deadline: str, said: bytes
) -> None:
    """A byte at a time, for longer than a minute."""
    monkeypatch.setattr(module, deadline, 0.3)
    with (
        BootstrapServer(host="127.0.0.1", port=0) as server,
        connect(server.port) as stranger,
        contextlib.suppress(ConnectionError),
    ):
        stranger.sendall(said)
        if deadline == "KEEPALIVE_TIMEOUT_S":
            assert stranger.recv(4096).startswith(b"HTTP/1.1 200 ")
        stranger.settimeout(0.02)
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\nX: ".ljust(3000, b"x"):
            stranger.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                answer = stranger.recv(4096)
                assert answer[:13] in (b"", b"HTTP/1.1 408 ")
                return
        pytest.fail("it may drip for as long as it likes")


# --- requests that prove nothing ---


def ask(port: int, path: str) -> tuple[int, str | None, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as one:
        one.request("GET", path)
        answer = one.getresponse()
        return answer.status, answer.getheader("Retry-After"), answer.read()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[BootstrapServer]:
    """A stranger has three requests, and one more in 1,000 s."""
    monkeypatch.setattr(allowance, "BURST", 3)
    monkeypatch.setattr(allowance, "PER_S", 0.001)
    with BootstrapServer(host="127.0.0.1", port=0, lease_s=NEVER_S, keys=[KEY]) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "first"), [("/v1/instances", (401, b"")), ("/health", (200, b"OK"))]
)
def test_who_asks_too_often_is_told_when_to_come_again(
    slow: BootstrapServer, path: str, first: tuple[int, bytes], make_record: MakeRecord
) -> None:
    for _ in range(3):
        status, retry_s, body = ask(slow.port, path)
        assert ((status, body), retry_s) == (first, None)
    for _ in range(3):
        status, retry_s, body = ask(slow.port, path)
        assert (status, body) == (429, b"")
        assert retry_s is not None
        assert 900 <= int(retry_s) <= 1000
    # Who has the secret is served, from the same address, and as often as he likes.
    record = make_record(ONE, FIRST)
    with client(slow.port, [KEY]) as friend:
        friend.register(record)
        for _ in range(20):
            assert friend.renew(record.rank) > 0


def test_a_server_with_another_secret_hears_of_that_however_often_it_asks(
    slow: BootstrapServer,
) -> None:
    with client(slow.port, [os.urandom(32)]) as stranger:
        for _ in range(5):
            with pytest.raises(BootstrapError, match="refuses us: it has another secret"):
                stranger.instance()


@pytest.mark.parametrize("path", ["/health", "/v1/instances", "/no/such/path"])
def test_answers_do_not_tell_which_releases_give_them(keys: list[bytes], path: str) -> None:
    with (
        BootstrapServer(host="127.0.0.1", port=0, keys=keys) as server,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, WAIT_S)) as one,
    ):
        one.request("GET", path)
        answer = one.getresponse()
        assert answer.getheader("Date")
        assert not [value for value in answer.headers.values() if "ython" in value]


@pytest.mark.pure
def test_an_allowance_fills_again_and_is_each_source_s_own() -> None:
    one = Allowance()
    assert [one.wait_s("a", 5.0) for _ in range(BURST)] == [0.0] * BURST
    assert one.wait_s("a", 5.0) == pytest.approx(1 / PER_S)
    assert one.wait_s("b", 5.0) == 0.0
    assert one.wait_s("a", 5.0 + 0.5 / PER_S) == pytest.approx(0.5 / PER_S)
    assert one.wait_s("a", 5.0 + 1.001 / PER_S) == 0.0
    assert one.wait_s("a", 5.0 + 1.001 / PER_S) > 0
    taken = [one.wait_s("a", 1e6) for _ in range(BURST + 1)]
    assert taken[:BURST] == [0.0] * BURST
    assert taken[BURST] > 0


@pytest.mark.pure
def test_sources_are_bounded() -> None:
    one = Allowance()
    for number in range(SOURCES_MAX + 10):
        assert one.wait_s(str(number), 0.0) == 0.0
    assert len(one) == SOURCES_MAX
