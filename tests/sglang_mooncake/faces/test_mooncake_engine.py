# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine.TransferEngine`` over te, between two processes."""

from __future__ import annotations

import gc
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_far import P2P, FarFace, near
from te_far import pattern, wait_until
from te_ports import two_ports

import te
from sglang_mooncake.faces.mooncake_engine import engine as engine_module
from sglang_mooncake.faces.mooncake_engine import sessions as sessions_module
from sglang_mooncake.faces.mooncake_engine.batches import Batch, settle
from sglang_mooncake.faces.mooncake_engine.engine import TransferEngine
from sglang_mooncake.faces.mooncake_engine.exchange import NoCard
from sglang_mooncake.faces.mooncake_engine.sessions import Sessions
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.drop_in import engine_options
from te.topology import Machine, Nic

SECRET = "6f1d0c8a92e47b35b7e2f90a4c81d356"
OTHER = "c03be5a71f8d24969d47e2a0f5b8136c"


@pytest.fixture
def ended() -> Iterator[list]:
    """What is put in ends with the test."""
    processes: list = []
    yield processes
    for one in processes:
        one.end()


@pytest.fixture
def held_ports() -> Iterator[int]:
    """The first of two ports in a row that nobody else is given; who asks for them may listen."""
    while True:
        with ExitStack() as held:
            first, second = (held.enter_context(socket.socket()) for _ in range(2))
            for one in (first, second):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            yield port
            return


def registered(engine: TransferEngine, nbytes: int, seed: int | None = None) -> np.ndarray:
    memory = np.zeros(nbytes, np.uint8) if seed is None else pattern(seed, nbytes)
    assert engine.register_memory(memory.ctypes.data, nbytes) == 0
    return memory


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"SGLANG_MOONCAKE_SECRET": SECRET}])
@pytest.mark.parametrize(
    ("protocol", "transport"), [("rdma", "samehost"), ("tcp", "tcp")], ids=["same host", "tcp"]
)
def test_bytes_go_both_ways(ended, protocol, transport, environment) -> None:
    far = FarFace(protocol, **environment)
    ended.append(far)
    engine = near(protocol, **environment)
    session, there = far.session, far.register(nbytes=1 << 20, seed=1)
    here = registered(engine, 1 << 20)
    at = here.ctypes.data
    assert engine.transfer_sync_read(session, at, there, 1 << 20) == 0
    assert (here == pattern(1, 1 << 20)).all()

    here[:] = pattern(2, 1 << 20)
    assert engine.transfer_sync_write(session, at, there, 1 << 20) == 0
    assert (far.memory(there) == pattern(2, 1 << 20)).all()
    assert engine._impl.sessions.peer(session).transport == transport

    theirs = far.register(nbytes=4096, seed=3)
    to = f"127.0.0.1:{engine.get_rpc_port()}"
    assert far.write_to(session=to, src=theirs, dst=at + 100, nbytes=4096) == 0
    assert (here[100:4196] == pattern(3, 4096)).all()


@pytest.mark.slow
def test_batches_have_one_outcome(ended) -> None:
    far = FarFace()
    ended.append(far)
    engine = near()
    there, here = far.register(nbytes=4096, seed=1), registered(engine, 4096)
    at, session = here.ctypes.data, far.session
    places = [0, 1000, 2000, 3000]
    swapped = [there + 3000, there + 2000, there + 1000, there]
    some = [at + place for place in places]
    assert engine.batch_transfer_sync_read(session, some, swapped, [10, 0, 20, 30]) == 0
    wanted = np.zeros(4096, np.uint8)
    source = pattern(1, 4096)
    wanted[:10], wanted[2000:2020], wanted[3000:3030] = (
        source[3000:3010],
        source[1000:1020],
        (source[:30]),
    )
    assert (here == wanted).all()
    assert engine.batch_transfer_sync_write(session, some, swapped, [1000] * 4) == 0
    assert (far.memory(there)[3000:4000] == wanted[:1000]).all()
    assert engine.batch_transfer_sync_write(session, [], [], []) == 0
    assert engine.batch_transfer_sync_write(session, [at], [there], [0]) == 0
    # One of them outside: nothing of it is taken for success.
    assert engine.batch_transfer_sync_write(session, some, [*swapped[:3], 4096], [8] * 4) == -1
    assert engine.batch_transfer_sync_read(session, some, [*swapped[:3], 4096], [8] * 4) == -1
    assert engine.batch_transfer_sync_read(session, some, swapped, [8] * 3) == -1
    assert engine.batch_transfer_sync_write(session, some, swapped[:3], [8] * 4) == -1


@pytest.mark.slow
def test_memory_that_is_not_registered_is_refused(ended, caplog) -> None:
    far = FarFace()
    ended.append(far)
    engine = near()
    there, here = far.register(nbytes=100), registered(engine, 100, seed=1)
    at, session = here.ctypes.data, far.session
    for src, dst, nbytes, says in [
        (at, there + 1, 100, "the destination: 100 bytes"),
        (at, 4096, 100, "the destination: 100 bytes"),
        (at + 1, there, 100, "lie outside the registered memory"),
        (at, -1, 100, "-1"),
        (at, there, -1, "-1"),
    ]:
        caplog.clear()
        assert engine.transfer_sync_write(session, src, dst, nbytes) == -1
        assert says in caplog.text
    assert not far.memory(there).any()
    assert far.unregister(address=there) == 0
    assert engine.transfer_sync_write(session, at, there, 100) == -1
    assert far.unregister(address=there) == -1
    assert engine.unregister_memory(at) == 0
    there = far.register(nbytes=100)
    assert engine.transfer_sync_write(session, at, there, 100) == -1
    assert engine.register_memory(at, 100) == 0
    assert engine.transfer_sync_write(session, at, there, 100) == 0
    assert (far.memory(there) == here).all()


def test_registrations_are_all_or_none(caplog) -> None:
    engine = near()
    memory = pattern(1, 8192)
    at = memory.ctypes.data
    assert engine.batch_register_memory([at, at + 4096, at + 4000], [4096] * 3) == -1
    assert "overlaps the registered region" in caplog.text
    assert engine.batch_register_memory([at, at + 4096], [4096] * 2) == 0
    assert engine.register_memory(at, 4096) == -1
    assert engine.batch_register_memory([at], []) == -1
    assert "1 addresses and 0 sizes" in caplog.text
    assert engine.register_memory(4096, 4096) == -1
    assert engine.batch_unregister_memory([at, 77, at + 4096]) == -1
    assert "no registered memory begins at 0x4d" in caplog.text
    assert engine.batch_register_memory([at], [8192]) == 0
    assert engine.batch_unregister_memory([at]) == 0
    assert engine.batch_unregister_memory([]) == 0


@pytest.mark.slow
def test_the_first_address_is_told(ended) -> None:
    far = FarFace()
    ended.append(far)
    engine, session = near(), far.session
    assert engine.get_first_buffer_address(session) == 0
    first, _ = far.register(nbytes=100), far.register(nbytes=100)
    assert engine.get_first_buffer_address(session) == first
    assert engine.get_first_buffer_address("127.0.0.1:1") == 0


@pytest.mark.slow
def test_a_peer_that_is_gone_fails_and_one_that_came_back_is_found(
    ended, held_ports, caplog
) -> None:
    first = held_ports
    given = {"SGLANG_MOONCAKE_PORTS": f"{first}-{first + 1}"}
    far = FarFace(**given)
    ended.append(far)
    engine, session = near(), far.session
    there, here = far.register(nbytes=100), registered(engine, 100, seed=1)
    assert engine.send_probe(session) == 0
    assert engine.transfer_sync_write(session, here.ctypes.data, there, 100) == 0
    ended.remove(far)
    far.end()
    wait_until(lambda: not engine._impl.sessions._known[session].peer.alive, "noticed")
    assert engine.send_probe(session) == -1
    assert engine.transfer_sync_write(session, here.ctypes.data, there, 100) == -1
    assert f"session {session}: no answer within" in caplog.text
    far = FarFace(**given)
    ended.append(far)
    assert far.session == session
    there = far.register(nbytes=100)
    assert engine.transfer_sync_write(session, here.ctypes.data, there, 100) == 0
    assert (far.memory(there) == here).all()


@pytest.mark.slow
@pytest.mark.parametrize("read", [True, False])
def test_a_peer_that_stands_still_fails_in_time(ended, read) -> None:
    far = FarFace("tcp")
    ended.append(far)
    given = engine_options(Config.from_environment({"SGLANG_MOONCAKE_STALL_TIMEOUT_S": "1"}))
    engine = near("tcp", given)
    session, there = far.session, far.register(nbytes=1 << 20)
    here = registered(engine, 1 << 20)
    work = engine.transfer_sync_read if read else engine.transfer_sync_write

    def works() -> bool:  # not each time where the machine stops the process for a second
        return work(session, here.ctypes.data, there, 1 << 20) == 0

    wait_until(works, "a transfer is done")
    far.signal(signal.SIGSTOP)
    assert not works()
    far.signal(signal.SIGCONT)
    wait_until(works, "another one is done")


class SlowTransfer:
    """A transfer whose waits end as told, and all further ones as the last of them."""

    duration_s = 0.0

    def __init__(self, *ends: object) -> None:
        self.ends, self.was_cancelled = list(ends), False

    def wait(self, timeout_s: float) -> te.Status:
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if isinstance(end, Exception):
            raise end
        return end

    def poll(self) -> te.Status:
        end = self.ends[-1]
        return end if isinstance(end, te.Status) else te.Status.FAILED

    def cancel(self) -> None:
        self.was_cancelled = True


@pytest.mark.parametrize(
    ("ends", "is_read", "raises", "cancels"),
    [
        ([te.Status.DONE], False, None, False),
        ([te.WaitTimeout("slow"), te.Status.CANCELLED], False, te.WaitTimeout, True),
        ([te.WaitTimeout("slow"), te.Status.DONE], True, None, True),
        ([te.WaitTimeout("slow"), te.TransferFailed("no")], False, te.WaitTimeout, True),
        ([te.TransferFailed("no")], True, te.TransferFailed, True),
        ([te.TransferFailed("no")], False, te.TransferFailed, True),
    ],
)
def test_te_has_done_with_the_memory_when_a_call_returns(ends, is_read, raises, cancels) -> None:
    transfer: Any = SlowTransfer(*ends)
    nobody: Any = None
    batch = Batch(transfer, is_read, 1.0, nobody)
    if raises is None:
        settle([batch])
    else:
        with pytest.raises(raises):
            settle([batch])
    assert transfer.was_cancelled is cancels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours", "works"),
    [
        (SECRET, OTHER, False),
        (SECRET, "", False),
        ("", SECRET, False),
        (f"{OTHER}\n{SECRET}", f"{SECRET}\n{OTHER}", True),
        (f"{OTHER}\n{SECRET}", SECRET, True),
    ],
    ids=["another", "without", "with", "rotation", "rotation's end"],
)
def test_only_holders_of_the_secret_are_let_in(ended, caplog, theirs, ours, works) -> None:
    def environment(secret: str) -> dict[str, str]:
        return {"SGLANG_MOONCAKE_SECRET": secret} if secret else {}

    far = FarFace(**environment(theirs))
    ended.append(far)
    engine = near(**environment(ours))
    there, here = far.register(nbytes=100), registered(engine, 100, seed=1)
    result = engine.transfer_sync_write(far.session, here.ctypes.data, there, 100)
    assert result == (0 if works else -1)
    assert far.memory(there).any() == works
    assert works or "it refuses: the secrets of the two processes differ" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("127.0.0.1", "etcd://x", "tcp", ""), "metadata_server='etcd://x' must be 'P2PHANDSHAKE'"),
        (("127.0.0.1", P2P, "efa", ""), "protocol='efa' must be one of 'rdma', 'tcp'"),
        (("0.0.0.0", P2P, "rdma", ""), "0.0.0.0"),
        (("8.8.8.8", P2P, "rdma", ""), "start with SGLANG_MOONCAKE_INSECURE=1"),
        (("", P2P, "rdma", ""), "host must be"),
    ],
)
def test_bad_arguments_of_initialize_are_told(caplog, arguments, says) -> None:
    given = engine_options(Config.from_environment({}))
    engine = type("TransferEngine", (TransferEngine,), {"options": given})()
    assert engine.initialize(*arguments) == -1
    assert says in caplog.text
    with pytest.raises(RuntimeError, match="was not initialized"):
        engine.get_rpc_port()
    assert engine.register_memory(4096, 10) == -1
    assert engine.send_probe("127.0.0.1:1") == -1


def test_devices_that_are_not_there_are_told(caplog) -> None:
    given = engine_options(Config.from_environment({"SGLANG_MOONCAKE_TRANSPORTS": "rdma"}))
    engine = type("TransferEngine", (TransferEngine,), {"options": given})()
    assert engine.initialize("127.0.0.1", P2P, "rdma", "mlx5_77, mlx5_78") == -1
    assert "mlx5_77" in caplog.text


def test_a_secret_is_missed_on_a_private_address_and_not_on_a_public_one(caplog) -> None:
    """Neither address is this host's, so that none can be listened on."""
    for environment, host, says in [
        ({}, "10.255.255.254", "no secret is set"),
        ({"SGLANG_MOONCAKE_SECRET": SECRET}, "8.8.8.8", "cannot listen"),
    ]:
        caplog.clear()
        given = engine_options(Config.from_environment(environment))
        engine = type("TransferEngine", (TransferEngine,), {"options": given})()
        assert engine.initialize(host, P2P, "rdma", "") == -1
        assert says in caplog.text


def test_ports_that_are_taken_leave_no_engine(caplog) -> None:
    with two_ports(1) as first:
        ports = f"{first}-{first + 1}"
        given = engine_options(Config.from_environment({"SGLANG_MOONCAKE_PORTS": ports}))
        engine = type("TransferEngine", (TransferEngine,), {"options": given})()
        assert engine.initialize("127.0.0.1", P2P, "rdma", "") == -1
        assert "in use" in caplog.text
        socket.create_server(("127.0.0.1", first + 1)).close()  # te's engine has gone.


def test_an_engine_is_initialized_once_and_goes_with_its_last_reference() -> None:
    engine = near()
    port = engine.get_rpc_port()
    assert engine.initialize("127.0.0.1:0", P2P, "rdma", "") == -1
    assert engine.get_rpc_port() == port
    del engine
    gc.collect()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    "given", ["127.0.0.1:{}", "[127.0.0.1]", "127.0.0.1"], ids=["port", "brackets", "address"]
)
def test_a_port_in_the_hostname_is_not_used(given) -> None:
    engine = type("TransferEngine", (TransferEngine,), {"options": near().options})()
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert engine.initialize(given.format(taken.getsockname()[1]), P2P, "tcp", "") == 0
    assert engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}") == 0


@pytest.mark.parametrize("session", ["", "127.0.0.1", "127.0.0.1:", ":5", "a:0", "a:65536", "a:x"])
def test_a_session_that_is_none_is_told(caplog, session) -> None:
    engine = near()
    memory = registered(engine, 10)
    assert engine.transfer_sync_write(session, memory.ctypes.data, 4096, 10) == -1
    assert "is not a host and a port" in caplog.text


def test_ipv6(ended) -> None:
    engines = []
    for _ in range(2):
        engine = type("TransferEngine", (TransferEngine,), {"options": near().options})()
        assert engine.initialize("::1", P2P, "tcp", "") == 0
        engines.append(engine)
    there, here = registered(engines[0], 100), registered(engines[1], 100, seed=1)
    session = f"[::1]:{engines[0].get_rpc_port()}"
    assert engines[1].transfer_sync_write(session, here.ctypes.data, there.ctypes.data, 100) == 0
    assert (here == there).all()


def test_who_wants_an_engine_that_cannot_be_reached_waits_for_one_attempt(monkeypatch) -> None:
    """Each attempt takes seconds; ten threads would take ten times as long."""
    engine: Any = SimpleNamespace(connect=pytest.fail)
    sessions, count = Sessions(engine, ()), 10
    join, joined, asked = sessions._join, threading.Semaphore(0), list[str]()

    def joins(*of: Any) -> Any:
        found = join(*of)
        joined.release()
        return found

    def fails(session: str) -> Any:
        asked.append(session)
        for _ in range(count):
            assert joined.acquire(timeout=60.0)
        raise NoCard(f"session {session}: no route to host")

    def problem(_: int) -> str:
        with pytest.raises(NoCard) as caught:
            sessions.peer("10.0.0.9:15000")
        return str(caught.value)

    monkeypatch.setattr(sessions, "_join", joins)
    monkeypatch.setattr(sessions, "ask", fails)
    with ThreadPoolExecutor(count) as threads:
        said = list(threads.map(problem, range(count)))
    assert len(asked) == 1
    assert sorted(said)[-1] == "session 10.0.0.9:15000: no route to host"
    others = "another call has just tried: session 10.0.0.9:15000: no route to host"
    assert sorted(said)[:-1] == [others] * (count - 1)

    count = 1
    assert "no route to host" in problem(0), "the next one tries again"
    assert len(asked) == 2


def test_one_that_is_being_connected_is_not_pushed_out(monkeypatch) -> None:
    """Nobody would have its connection, to use it or to close it."""
    closed = list[Any]()

    def connected(card: Any) -> Any:
        return SimpleNamespace(alive=True, close=lambda: closed.append(card))

    engine: Any = SimpleNamespace(connect=connected)
    sessions, names = Sessions(engine, (), most=2), [f"10.0.0.{n}:15000" for n in range(4)]

    def asks(session: str) -> Any:
        if session == names[0]:
            for other in names[1:]:
                sessions.peer(other)
        return SimpleNamespace(card=session)

    monkeypatch.setattr(sessions, "ask", asks)
    peer = sessions.peer(names[0])
    assert closed == names[1:3]
    assert sessions.peer(names[0]) is peer
    assert len(sessions) == 2


def test_an_interrupt_leaves_no_attempt_that_others_wait_for(monkeypatch) -> None:
    engine: Any = SimpleNamespace(connect=lambda card: SimpleNamespace(alive=True, card=card))
    sessions, session = Sessions(engine, ()), "10.0.0.9:15000"
    join = sessions._join
    monkeypatch.setattr(sessions, "ask", lambda session: SimpleNamespace(card=session))

    def interrupted(*of: Any) -> Any:
        join(*of)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sessions, "_join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sessions.peer(session)
    assert sessions.peer(session).card == session


def test_nobody_waits_for_ever_for_the_attempt_of_another_call(monkeypatch) -> None:
    nobody: Any = None
    sessions = Sessions(nobody, ())
    monkeypatch.setattr(sessions_module, "CONNECT_TIMEOUT_S", 0.0)
    another = sessions_module._Attempt()
    assert sessions._join("10.0.0.9:15000", another) is another
    with pytest.raises(NoCard, match=r"10\.0\.0\.9:15000: not connected within 0\.0 s"):
        sessions.peer("10.0.0.9:15000")


def test_the_connection_not_used_for_longest_goes_for_a_new_one() -> None:
    engine = near()
    others = [near(), near(), near()]
    a, b, c = (f"127.0.0.1:{one.get_rpc_port()}" for one in others)
    sessions = Sessions(engine._impl.engine, (), most=2)
    first, second = sessions.peer(a), sessions.peer(b)
    assert sessions.peer(a) is first
    third = sessions.peer(c)
    assert [first.alive, second.alive, third.alive] == [True, False, True]
    assert len(sessions) == 2
    assert sessions.peer(b).alive


def test_the_devices_near_each_place_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pci = ("pci0000:00", "0000:01:00.0")
    nics = tuple(
        Nic(
            name=name,
            device=name,
            port=1,
            state="ACTIVE",
            kind="CA",
            link_layer="",
            rate_gbps=1.0,
            numa=numa,
            pci=pci,
            netdev="",
            uverbs="",
        )
        for name, numa in [("mlx5_0", 0), ("mlx5_1", 1), ("mlx5_2", 0)]
    )
    machine = Machine(nics=nics, gpus=(), nodes=(0, 1))
    monkeypatch.setattr(engine_module, "read_machine", lambda: machine)
    engine = TransferEngine()  # Mooncake's needs no initialize for that, either.
    assert json.loads(engine.get_local_topology()) == {
        "cpu:0": [["mlx5_0", "mlx5_2"], ["mlx5_1"]],
        "cpu:1": [["mlx5_1"], ["mlx5_0", "mlx5_2"]],
    }
    assert json.loads(engine.get_local_topology("mlx5_1, mlx5_2"))["cpu:0"] == [
        ["mlx5_2"],
        ["mlx5_1"],
    ]
    with pytest.raises(te.TopologyError, match="no RDMA device matches 'mlx4_0'"):
        engine.get_local_topology("mlx4_0")


def test_what_te_has_not_is_named() -> None:
    engine = near()
    assert engine.get_engine() is engine
    assert not hasattr(engine, "get_engine_ptr")
    with pytest.raises(
        AttributeError, match=r"TransferEngine has no get_engine_ptr.*Mooncake's EP"
    ):
        engine.get_engine_ptr()
