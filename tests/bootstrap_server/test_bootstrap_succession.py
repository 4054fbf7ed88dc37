# SPDX-License-Identifier: Apache-2.0
"""A rank that was killed and started again gets its place before the former lease ends; nobody else
gets one."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable

import pytest
import requests
from bootstrap_rank import rank_process
from bootstrap_waits import WAIT_S, patient_client, until

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    NotReady,
    PlaceTaken,
    Rank,
    RankCoords,
    RankLease,
    RankRecord,
    Topology,
)
from bootstrap_server.http import succession
from bootstrap_server.http.rank_lines import RankLines
from bootstrap_server.http.succession import ASKED_MAX, Succession, refuses
from bootstrap_server.page.board import Board
from bootstrap_server.ranks.instance import InstanceTable
from bootstrap_server.ranks.records import Role
from bootstrap_server.ranks.registry import Registry

MakeRecord = Callable[..., RankRecord]

ONE, TWO = Topology(1, 1, 1, 1), Topology(1, 1, 2, 1)
FIRST, SECOND = RankCoords(0, 0, 0, 0), RankCoords(0, 0, 1, 0)
SOURCE = "127.0.0.1"


class World:
    """A registry, in which ports refuse if they are `closed`. `meanwhile` happens while one is
    asked."""

    def __init__(self, role: Role = "prefill") -> None:
        self.registry, self.board, self.role = Registry(), Board(), role
        self.closed: set[int] = set()
        self.asked: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None
        lines = RankLines(has_secret=False)
        self.succession = Succession(self.board, lines, lambda: 0.0, self._refuses)

    async def _refuses(self, host: str, port: int) -> bool:
        self.asked.append(port)
        await asyncio.sleep(0)
        self.meanwhile()
        return port in self.closed

    def register(self, record: RankRecord) -> None:
        table = self.registry.register("a", record, 0.0, leased=True, role=self.role)
        self.board.registered(table.name, record, record.rank, 0.0)

    def lose(self, record: RankRecord) -> None:
        """Its side closes the connection."""
        self.board.disconnected(record.rank, 0.0)

    def table(self) -> InstanceTable:
        return self.registry.get("a", self.role)

    def comes(self, record: RankRecord) -> bool:
        """Whether the rank has its place after it has found it taken once."""
        with pytest.raises(PlaceTaken):
            self.register(record)
        asyncio.run(self.succession.end_former(self.table, record.rank, SOURCE))
        try:
            self.register(record)
        except PlaceTaken:
            return False
        return True


@pytest.fixture
def world() -> World:
    return World()


def test_a_rank_that_has_ended_is_succeeded_at_once(
    world: World, make_record: MakeRecord, caplog: pytest.LogCaptureFixture
) -> None:
    former, newcomer = make_record(ONE, FIRST), make_record(ONE, FIRST, 2, port=5)
    world.register(former)
    world.lose(former)
    world.closed = {former.rank.port}
    assert world.comes(newcomer)
    assert world.table().snapshot().ranks == (newcomer.rank,)
    whats = [event.what for event in world.board.events]
    assert whats == ["registered", "lease lapsed", "connection lost", "registered"]
    assert "at 127.0.0.1 port 10000, has ended and was removed" in caplog.text


def test_whoever_listens_lives(world: World, make_record: MakeRecord) -> None:
    former = make_record(ONE, FIRST)
    world.register(former)
    world.lose(former)
    assert not world.comes(make_record(ONE, FIRST, 2, port=5))
    assert world.asked == [former.rank.port]
    assert world.table().snapshot().ranks == (former.rank,)


def test_whoever_keeps_its_connection_lives_though_its_port_refuses(
    world: World, make_record: MakeRecord
) -> None:
    """As where its address leads to another host from here."""
    former = make_record(ONE, FIRST)
    world.register(former)
    world.closed = {former.rank.port}
    assert not world.comes(make_record(ONE, FIRST, 2, port=5))
    assert world.asked == []


@pytest.mark.parametrize("came", ["renewed", "replaced"])
def test_whoever_comes_back_while_its_port_is_asked_lives(
    world: World, make_record: MakeRecord, came: str
) -> None:
    former = make_record(ONE, FIRST)
    back = former if came == "renewed" else make_record(ONE, FIRST, 3)
    world.register(former)
    world.lose(former)
    world.closed = {former.rank.port}
    world.meanwhile = lambda: world.register(back)
    assert not world.comes(make_record(ONE, FIRST, 2, port=5))
    assert world.table().snapshot().ranks == (back.rank,)


def test_a_whole_server_that_was_killed_leaves_no_rank_that_seems_to_live(
    world: World, make_record: MakeRecord
) -> None:
    """Or the instance would be whole with a rank that has ended."""
    former = [make_record(TWO, coords) for coords in (FIRST, SECOND)]
    for record in former:
        world.register(record)
        world.lose(record)
        world.closed.add(record.rank.port)
    assert world.comes(make_record(TWO, FIRST, 2, port=5))
    with pytest.raises(NotReady, match=r"tp 1 pp 0 was at .* and has ended: nothing listens"):
        world.table().snapshot()
    world.register(make_record(TWO, SECOND, 2, port=6))
    assert world.table().ready


def test_ranks_that_have_each_other_s_ports_now_get_their_places(
    world: World, make_record: MakeRecord
) -> None:
    for coords in (FIRST, SECOND):
        world.register(make_record(TWO, coords))
        world.lose(make_record(TWO, coords))
    first = make_record(TWO, FIRST, 2, port=10_001)
    second = make_record(TWO, SECOND, 3, port=10_000)
    assert not world.comes(first)
    world.register(second)
    assert world.comes(first)
    assert world.table().snapshot().ranks == (first.rank, second.rank)


def test_a_server_that_was_started_again_with_other_flags_begins_a_generation(
    world: World, make_record: MakeRecord
) -> None:
    for coords in (FIRST, SECOND):
        world.register(make_record(TWO, coords))
        world.lose(make_record(TWO, coords))
    world.closed = {10_000}
    newcomer = make_record(TWO, FIRST, 2, port=5, page_size=32)
    assert not world.comes(newcomer)
    world.closed = {10_001}
    assert world.comes(newcomer)
    assert world.table().generation == 2


def test_the_ports_of_decode_ranks_are_not_asked(make_record: MakeRecord) -> None:
    """Each of them names its server's HTTP port, which opens last."""
    world, former = World("decode"), make_record(ONE, FIRST)
    world.register(former)
    world.lose(former)
    world.closed = {former.rank.port}
    assert not world.comes(make_record(ONE, FIRST, 2, port=5))
    assert world.asked == []


def test_few_ports_are_asked_at_once(world: World, make_record: MakeRecord) -> None:
    many = Topology(1, 1, ASKED_MAX + 1, 1)
    for coords in many.coords():
        record = make_record(many, coords)
        world.register(record)
        world.lose(record)
        world.closed.add(record.rank.port)
    newcomer = make_record(many, FIRST, 2, port=5).rank

    async def end() -> bool:
        return await world.succession.end_former(world.table, newcomer, SOURCE)

    async def two_at_once() -> list[bool]:
        return await asyncio.gather(end(), end())

    assert asyncio.run(two_at_once()) == [True, False]
    assert (len(world.asked), world.table().registered) == (ASKED_MAX, 1)
    # There is room again.
    assert asyncio.run(end())
    assert world.table().registered == 0


# --- asking ---


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_refuses_when_nothing_listens(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        assert not asyncio.run(refuses(host, port))
    assert asyncio.run(refuses(host, port))


def test_silence_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", silence)
    monkeypatch.setattr(succession, "ASK_TIMEOUT_S", 0.0)
    assert not asyncio.run(refuses("10.0.0.1", 1))


def test_no_way_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_way(*_: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "no route to host")

    monkeypatch.setattr(asyncio, "open_connection", no_way)
    assert not asyncio.run(refuses("10.0.0.1", 1))


# --- over HTTP, where leases outlast the test ---


def where(server: BootstrapServer) -> str:
    return f"127.0.0.1:{server.port}"


def listening(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    return listener, listener.getsockname()[1]


def at(record: RankRecord, host: str) -> RankRecord:
    rank = record.rank
    return RankRecord(record.config, Rank(rank.coords, host, rank.port, rank.epoch))


def lost(server: BootstrapServer) -> bool:
    status = requests.get(f"http://{where(server)}/v1/status", timeout=WAIT_S).json()
    return any(rank["lost_s"] is not None for one in status["instances"] for rank in one["ranks"])


def test_a_registry_asks_the_port_of_who_holds_the_place(
    server: BootstrapServer, make_record: MakeRecord
) -> None:
    listener, port = listening()
    newcomer = make_record(ONE, FIRST, 2, port=5)
    with listener, patient_client(where(server)) as former:
        former.register(make_record(ONE, FIRST, port=port))
        former.close()
        until(lambda: lost(server), "the registry sees that the connection is closed")
        with patient_client(where(server)) as client:
            with pytest.raises(PlaceTaken):
                client.try_register(newcomer)
            listener.close()
            client.try_register(newcomer)
            assert client.instance().ranks == (newcomer.rank,)


def test_a_taken_place_is_asked_for_soon_again_and_then_less_often(
    server: BootstrapServer, make_record: MakeRecord
) -> None:
    naps, now_s = list[float](), [0.0]

    def sleep(duration_s: float) -> None:
        naps.append(duration_s)
        now_s[0] += duration_s

    with (
        patient_client(where(server)) as holder,
        BootstrapClient(where(server), WAIT_S, sleep=sleep, clock=lambda: now_s[0]) as client,
    ):
        holder.register(make_record(ONE, FIRST))
        with pytest.raises(PlaceTaken):
            client.register(make_record(ONE, FIRST, 2, port=5), deadline_s=5.0)
    assert naps[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_rank_that_is_killed_and_started_again_does_not_wait_for_its_lease(
    server: BootstrapServer, make_record: MakeRecord, host: str
) -> None:
    listener, port = listening(host)
    record = at(make_record(ONE, FIRST, port=port), host)
    restart = at(make_record(ONE, FIRST, 2, port=5), host)
    with (
        patient_client(where(server)) as client,
        rank_process(where(server), record, listener=listener) as process,
    ):
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(PlaceTaken):
            client.try_register(restart)
        os.kill(process.pid, signal.SIGKILL)
        with RankLease(where(server), restart, deadline_s=WAIT_S, make_client=patient_client):
            assert client.instance(wait_s=WAIT_S).ranks == (restart.rank,)
