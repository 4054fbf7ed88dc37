# SPDX-License-Identifier: Apache-2.0
"""Test writes by real engines: within this host, and to a doctor that listens."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

import te
from te.cli import main
from te.doctor import gather, listen, near, service
from te.doctor.channel import ChannelError, answer, call
from te.doctor.facts import Facts
from te.doctor.listen import CALLS_MAX, Listener
from te.doctor.messages import Digest, Digested, EngineOpened, Host, OpenEngine, Refused, Reply
from te.doctor.near import Near, child, dial, loop_back, matrix
from te.doctor.outcome import End, Stage
from te.doctor.service import LOOPBACK, Service, describe, host_addresses, serve
from te.errors import UsageError
from te.proof import NO_KEY, Key

pytestmark = pytest.mark.pure

TIMEOUT_S = 60.0
HERE = End(name="tcp")
ONE, OTHER = Key(b"1" * 32), Key(b"2" * 32)


def quiet(text: str) -> None:
    """Of progress."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody here gives up because a thread stands still for seconds."""
    for name in ("CONNECT_TIMEOUT_S", "STALL_TIMEOUT_S", "REPLY_TIMEOUT_S"):
        monkeypatch.setattr(service, name, TIMEOUT_S)
    for name in ("WRITE_TIMEOUT_S", "REPLY_TIMEOUT_S"):
        monkeypatch.setattr(near, name, TIMEOUT_S)
    for name in ("CALL_TIMEOUT_S", "TURN_TIMEOUT_S"):
        monkeypatch.setattr(listen, name, TIMEOUT_S)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return structs.replace(gather(), ports=())


@contextlib.contextmanager
def far_side(host: Host) -> Iterator[Near]:
    """A near side whose other side is a thread here."""
    sockets = socket.socketpair()

    def run() -> None:
        with contextlib.suppress(ChannelError):
            serve(answer(sockets[1], (NO_KEY,), TIMEOUT_S), host)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with Near(call(sockets[0], (NO_KEY,), TIMEOUT_S), None) as side:
        yield side
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    sockets[1].close()


@pytest.fixture
def side(facts: Facts) -> Iterator[Near]:
    with far_side(describe(facts, (), None, LOOPBACK)) as side:
        yield side


# -- on one host


@pytest.mark.slow
def test_writes_to_a_child_over_each_transport() -> None:
    with child(None) as side:
        cells = list(loop_back(side, ("samehost", "tcp"), (), quiet))
    assert [(one.transport, one.stage) for one in cells] == [
        ("samehost", Stage.DONE),
        ("tcp", Stage.DONE),
    ], cells
    assert all(one.latency_s and one.bytes_per_s for one in cells)


@pytest.mark.slow
def test_a_child_is_told_the_gid_index() -> None:
    with child(7) as side:
        assert side.look().gid_index == 7


def test_what_the_far_side_cannot_open_is_a_way_that_does_not_connect(side: Near) -> None:
    far = side.open_engine("rdma", "", LOOPBACK)
    assert isinstance(far, str)
    cell = side.cell("rdma", HERE, HERE, "", far)
    assert (cell.stage, cell.latency_s) == (Stage.CONNECT, None)
    assert cell.problem == f"tcp: {far}"


def test_an_engine_that_has_gone_is_a_way_that_does_not_connect(side: Near) -> None:
    far = side.open_engine("tcp", "", LOOPBACK)
    assert isinstance(far, EngineOpened)
    assert isinstance(side.open_engine("tcp", "", LOOPBACK), EngineOpened), (
        "in place of the one before"
    )
    cell = side.cell("tcp", HERE, HERE, "", far)
    assert (cell.stage, cell.problem[:14]) == (Stage.CONNECT, "cannot connect")


def test_an_engine_that_this_side_cannot_open_is_such_a_way(side: Near) -> None:
    far = side.open_engine("tcp", "", LOOPBACK)
    cell = side.cell("rdma", HERE, HERE, "", far)
    assert cell.stage is Stage.CONNECT
    assert "no RDMA device" in cell.problem


def test_writes_that_are_refused_are_seen(side: Near) -> None:
    far = side.open_engine("tcp", "", LOOPBACK)
    assert isinstance(far, EngineOpened)
    cell = side.cell("tcp", HERE, HERE, "", structs.replace(far, memory=far.memory - 8))
    assert (cell.stage, cell.latency_s) == (Stage.SMALL, None)
    assert cell.problem
    cell = side.cell("tcp", HERE, HERE, "", structs.replace(far, memory=far.memory + 8))
    assert (cell.stage, cell.bytes_per_s) == (Stage.LARGE, None)
    assert cell.latency_s
    assert side._engines["tcp", ""].stats().peers == 0, "closed, so that no rail is made anew"


class Changing(Service):
    """Memory in which a bit flips after the bytes have arrived."""

    def reply(self, request: Any) -> Reply:
        if isinstance(request, Digest):
            self._memory[12345] ^= 1
        return super().reply(request)


def test_bytes_that_arrive_changed_are_seen(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "Service", Changing)
    with far_side(describe(facts, (), None, LOOPBACK)) as side:
        cell = side.cell("tcp", HERE, HERE, "", side.open_engine("tcp", "", LOOPBACK))
    assert cell.stage is Stage.BYTES
    assert cell.latency_s
    assert cell.bytes_per_s


def test_what_is_no_device_or_address_of_the_far_side_is_refused(side: Near) -> None:
    for request, says in (
        (OpenEngine(transport="tcp", address="192.0.2.99"), "192.0.2.99 is no address of"),
        (
            OpenEngine(transport="rdma", nic="mlx5_9", address=LOOPBACK),
            "mlx5_9 is not among the devices",
        ),
        (OpenEngine(transport="nonsense", address=LOOPBACK), "'nonsense' is not available"),
    ):
        found = side.ask(request)
        assert isinstance(found, Refused)
        assert says in found.reason


class Odd(Service):
    """Answers what was not asked."""

    answers: Reply

    def reply(self, request: Any) -> Reply:
        return self.answers


@pytest.mark.parametrize(
    ("answers", "says"),
    [(Digested(b""), "answered with Digested"), (Refused("busy"), "refuses: busy")],
)
def test_an_odd_answer_ends_the_check(
    facts: Facts, monkeypatch: pytest.MonkeyPatch, answers: Reply, says: str
) -> None:
    monkeypatch.setattr(service, "Service", Odd)
    monkeypatch.setattr(Odd, "answers", answers, raising=False)
    with (
        far_side(describe(facts, (), None, LOOPBACK)) as side,
        pytest.raises(ChannelError, match=says),
    ):
        side.look()


# -- between two


@pytest.mark.slow
def test_each_address_of_the_far_side_is_tried(facts: Facts) -> None:
    here = describe(facts, (), None, LOOPBACK)
    with far_side(here) as side:
        there = side.look()
        assert there == here
        cells = list(matrix(side, here, there, ("a", "b"), ("tcp", "rdma"), quiet))
    assert [one.there.name for one in cells] == [LOOPBACK, *host_addresses()]
    assert [one.stage for one in cells] == [Stage.DONE] * len(cells), cells
    assert [one.is_spare for one in cells] == [False] + [True] * (len(cells) - 1)
    assert (cells[0].here.name, cells[0].here.host) == (LOOPBACK, "a")


def test_an_address_without_a_route_is_told(facts: Facts) -> None:
    here = describe(facts, (), None, LOOPBACK)
    there = structs.replace(here, addresses=("255.255.255.255",))
    with far_side(here) as side:
        (cell,) = matrix(side, here, there, ("a", "b"), ("tcp",), quiet)
    assert (cell.stage, cell.here.name) == (Stage.CONNECT, "no route")
    assert cell.problem == "this host has no route to 255.255.255.255"


def test_an_engine_of_a_check_connects_with_those_of_its_session_alone(side: Near) -> None:
    far = side.open_engine("tcp", "", LOOPBACK)
    assert isinstance(far, EngineOpened)
    with (
        te.Engine(te.Config(transports=("tcp",))) as engine,
        pytest.raises(te.ConnectError, match="it has keys"),
    ):
        engine.connect(far.card)


def test_the_address_of_the_connection_comes_first_and_once(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "host_addresses", lambda: ("10.0.0.1", "10.0.0.2"))
    assert describe(facts, (), None, "10.0.0.2").addresses == ("10.0.0.2", "10.0.0.1")


def test_addresses_leave_out_the_loopback_and_container_networks(tmp_path: Path) -> None:
    for name in ("lo", "docker0", "cali12"):
        (tmp_path / name).mkdir()
    assert host_addresses(tmp_path) == ()


def test_te_makes_its_rails_over_each_device_and_its_like() -> None:
    here, there = (
        [SimpleNamespace(nic=SimpleNamespace(name=name)) for name in names]
        for names in (("a0", "a1"), ("b0",))
    )
    assert near._preferred(here, there) == {("a0", "b0"), ("a1", "b0")}
    assert near._preferred(here, []) == set()


@contextlib.contextmanager
def listening(
    facts: Facts, keys: tuple[Key, ...] = (NO_KEY,), lifetime_s: float = TIMEOUT_S
) -> Iterator[tuple[Listener, queue.Queue[str]]]:
    """A listener, and what it says."""
    listener, said = Listener(LOOPBACK, 0, keys), queue.Queue[str]()
    is_over = threading.Event()
    thread = threading.Thread(
        target=listener.run,
        args=(lambda address: describe(facts, (), None, address), lifetime_s, said.put, is_over),
        daemon=True,
    )
    thread.start()
    try:
        yield listener, said
    finally:
        is_over.set()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_a_check_with_a_secret(facts: Facts) -> None:
    with listening(facts, (ONE,)) as (listener, said):
        with dial((LOOPBACK, listener.port), (ONE,), None, TIMEOUT_S) as side:
            assert side.look().addresses[0] == LOOPBACK
            cell = side.cell("tcp", HERE, HERE, "", side.open_engine("tcp", "", LOOPBACK))
            assert cell.stage is Stage.DONE
        assert said.get(timeout=TIMEOUT_S) == "127.0.0.1: a check begins"
        assert "the check is over" in said.get(timeout=TIMEOUT_S)
        with pytest.raises(ChannelError, match="another secret"):
            dial((LOOPBACK, listener.port), (OTHER,), None, TIMEOUT_S)
        assert "refused: a doctor with another secret" in said.get(timeout=TIMEOUT_S)


def test_a_second_check_has_to_wait(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(facts) as (listener, said):
        where = (LOOPBACK, listener.port)
        with (
            dial(where, (NO_KEY,), None, TIMEOUT_S) as first,
            monkeypatch.context() as short,
        ):
            short.setattr(listen, "TURN_TIMEOUT_S", 0.5)
            first.look()
            with (
                dial(where, (NO_KEY,), None, TIMEOUT_S) as second,
                pytest.raises(ChannelError, match="refuses: another check is under way"),
            ):
                second.look()
            first.look()
        while "the check is over" not in said.get(timeout=TIMEOUT_S):
            pass
        with dial(where, (NO_KEY,), None, TIMEOUT_S) as third:
            third.look()


@pytest.mark.slow
def test_callers_that_say_nothing_are_bounded_and_cost_nobody_else(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te.doctor.listen.CALL_TIMEOUT_S", 3.0)
    with listening(facts) as (listener, said), contextlib.ExitStack() as stack:
        where = (LOOPBACK, listener.port)
        silent = [
            stack.enter_context(socket.create_connection(where, TIMEOUT_S))
            for _ in range(CALLS_MAX + 4)
        ]
        silent[-1].settimeout(TIMEOUT_S)
        assert silent[-1].recv(1) == b""
        for _ in range(CALLS_MAX):
            assert "refused: no word" in said.get(timeout=TIMEOUT_S)
        with dial(where, (NO_KEY,), None, TIMEOUT_S) as side:
            side.look()
            assert "a check begins" in said.get(timeout=TIMEOUT_S), "the others were closed at once"


def test_a_listener_ends_after_its_time(facts: Facts) -> None:
    listener = Listener(LOOPBACK, 0, (NO_KEY,))
    where = (LOOPBACK, listener.port)
    listener.run(lambda address: describe(facts, (), None, address), 0.01, quiet)
    with pytest.raises(ChannelError, match=f"cannot connect to {LOOPBACK}"):
        dial(where, (NO_KEY,), None, TIMEOUT_S)


def test_a_check_under_way_is_ended_first(facts: Facts) -> None:
    listener, is_over = Listener(LOOPBACK, 0, (NO_KEY,)), threading.Event()
    thread = threading.Thread(
        target=listener.run,
        args=(lambda address: describe(facts, (), None, address), TIMEOUT_S, quiet, is_over),
        daemon=True,
    )
    thread.start()
    with dial((LOOPBACK, listener.port), (NO_KEY,), None, TIMEOUT_S) as side:
        side.look()
        is_over.set()
        thread.join(0.5)
        assert thread.is_alive()
        side.look()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_an_address_that_cannot_be_had_is_told() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.55 port 0"):
        Listener("192.0.2.55", 0, (NO_KEY,))


# -- the command


@pytest.fixture
def far(tmp_path: Path) -> Iterator[str]:
    """``te doctor --listen`` in a process of its own, without the secret; its address."""
    command = [sys.executable, "-m", "te.cli", "doctor", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert "without --secret-file" in process.stderr.readline()
            words = process.stdout.readline().split()
            yield f"127.0.0.1:{words[words.index('port') + 1]}"
        finally:
            process.terminate()


@pytest.mark.slow
def test_the_command_reports_both_hosts(far: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["doctor", "--transport", "tcp", "--peer", far]
    assert main(asked) in (0, 1)
    out = capsys.readouterr().out
    name = socket.gethostname()
    assert f"te doctor on {name}, with {name} (peer)\n" in out
    assert f"tcp: {name} to {name} (peer)\n" in out
    assert "B/s" in out
    assert main([*asked, "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert told["peer"]["version"]
    assert told["matrix"][0]["stage"] == "done"
    assert {one["transport"] for one in told["findings"]} <= {"tcp", ""}


@pytest.mark.slow
def test_a_check_that_cannot_be_made_is_3(
    far: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("6f1d0c8a92e47b35b7e2f90a4c81d356")
    secret.chmod(0o600)
    assert main(["doctor", "--peer", far, "--secret-file", str(secret)]) == 3
    assert "another secret, or none" in capsys.readouterr().err
    assert main(["doctor", "--peer", "127.0.0.1:1"]) == 3
    assert "start te doctor --listen 127.0.0.1:1 there" in capsys.readouterr().err
    for option in ("--peer", "--listen"):
        assert main(["doctor", option, "127.0.0.1:1", "--root", str(tmp_path)]) == 3
        assert "--root cannot be given beside it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--peer", "host"], "'host' is not HOST:PORT"),
        (["--peer", "host:x"], "'host:x' is not HOST:PORT"),
        (["--listen", "host:65536"], "'host:65536' is not HOST:PORT"),
        (["--listen", "a:1", "--peer", "a:1"], "not allowed with argument"),
        (["--listen", "a:1", "--listen-s", "0"], "'0' is not a whole number from 1 to 86400"),
    ],
)
def test_bad_addresses_are_told(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *options])
    assert ended.value.code == 3
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_alone_it_writes_over_each_transport(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--json", "--transport", "tcp"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert [one["stage"] for one in told["loop_back"]] == ["done"]
    monkeypatch.setattr(near.subprocess, "Popen", None)
    assert main(["doctor", "--json", "--transport", "tcp", "--quick"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["loop_back"] == []


@pytest.mark.slow
def test_engines_of_other_protocols_are_not_tried(
    far: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(service, "PROTOCOL_VERSION", service.PROTOCOL_VERSION + 1)
    assert main(["doctor", "--peer", far, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["matrix"] == []
    assert told["findings"][0]["name"] == "versions-differ"
