# SPDX-License-Identifier: Apache-2.0
"""A rank is killed, frozen or cut off, or loses every connection: the other side knows it in time
and says so, its other peers notice nothing, and it serves again as soon as it is back.

Each rank that something happens to is a process, on another host if that matters (a network
namespace). Known in 1 s, on the same host, or 3 s if it is dead, in 5 s if it is frozen: that is
what is wanted; a slow machine gets twice as long. Nobody sets anything: the heartbeats are
the default ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import handover
import pytest
from chaos_run.hosts import CENTRE, Hosts
from cpu_serving.namespaces import inside
from handover import DecodeRank, PrefillRank, until
from rank_process import (
    AUX,
    SOURCE_PAGES,
    RankProcess,
    decode_rank,
    prefill_rank,
    request,
    take,
)

from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

pytestmark = pytest.mark.slow

SLACK = 2.0
KNOWN_S = {"kill": 1.0, "freeze": 5.0, "cut": 3.0, "sever": 1.0}
SERVES_AGAIN_S = 5.0
#: Longer than a rank may be silent, with the default heartbeats.
BUSY_S = 5
STILL_S = 3.0
#: Between two rooms that are handed over one after another: else they take a whole processor.
PAUSE_S = 0.1
VICTIM, OTHER = "victim", "other"
ROOMS = itertools.count(1)


@pytest.fixture(autouse=True)
def patient() -> None:
    """The deadlines are the ones that are meant here."""


class World:
    """Where ranks run: this process at its centre, the others here or on hosts of their own."""

    def __init__(self, transport: str, hosts: Hosts | None) -> None:
        self.transport, self._hosts = transport, hosts
        self._undo = contextlib.ExitStack()

    def rank(self, role, name: str, port: int = 0) -> RankProcess:
        if self._hosts is None:
            made = RankProcess(role, handover.HOST, port, self.transport)
        else:
            with self._hosts.on(name, sorted(os.sched_getaffinity(0))):
                made = RankProcess(role, self._hosts.address(name), port, self.transport)
        self._undo.callback(made.kill)
        return made

    def harm(self, how: str, victim: RankProcess) -> float:
        """When it happened."""
        now_s = time.monotonic()
        match how:
            case "kill":
                victim.kill()
            case "freeze":
                victim.freeze()
            case "cut":
                assert self._hosts is not None
                self._hosts.cut(VICTIM)
            case "sever":
                assert self._hosts is not None
                self._hosts.sever(VICTIM)
                now_s = time.monotonic()  # when the last connection is ended
        return now_s

    def heal(self, how: str, victim: RankProcess) -> None:
        match how:
            case "freeze":
                victim.go_on()
            case "cut" | "sever":
                assert self._hosts is not None
                self._hosts.mend(VICTIM)

    def close(self) -> None:
        self._undo.close()


@contextlib.contextmanager
def other_hosts() -> Iterator[Hosts]:
    """This thread, and what it starts, is at their centre meanwhile."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        with inside(here, otherwise=here):
            yield Hosts((VICTIM, OTHER))
    finally:
        os.close(here)


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch) -> Iterator[World]:
    with contextlib.ExitStack() as undo:
        hosts = None
        if request.param == "hosts":
            hosts = undo.enter_context(other_hosts())
            monkeypatch.setattr(handover, "HOST", CENTRE)
        made = World("tcp" if hosts else request.param, hosts)
        undo.callback(made.close)
        yield made


def each_harm(test: Callable[..., None]) -> Callable[..., None]:
    """A host is cut off only where there are several."""
    names = [("tcp", "kill"), ("tcp", "freeze"), ("samehost", "kill"), ("samehost", "freeze")]
    names += [("hosts", how) for how in ("kill", "freeze", "cut", "sever")]
    names += [("rdma", "kill"), ("rdma", "freeze")]
    ways = []
    for world, how in names:
        marks = [pytest.mark.by_turns(f"{world} {how}")]
        if world == "rdma":  # How ranks notice each other's silence is alike on all devices.
            marks += [pytest.mark.rdma, pytest.mark.driver("rxe")]
        ways.append(pytest.param(world, how, marks=marks))
    return pytest.mark.parametrize(("world", "how"), ways, indirect=["world"])(test)


one_host = pytest.mark.parametrize("world", ["tcp"], indirect=True)


def when_over(room: Room) -> Future[float]:
    """When it was, whatever the test does meanwhile: another room may take a slow machine long."""

    def watch() -> float:
        until(lambda: room.view.over, "the room is over")
        return time.monotonic()

    watching = ThreadPoolExecutor(1)
    try:
        return watching.submit(watch)
    finally:
        watching.shutdown(wait=False)


def known_in_time(how: str, harmed_s: float, over: Future[float], room: Room, name: str) -> None:
    took_s = over.result() - harmed_s
    assert room.view.state is RoomState.FAILED
    assert room.view.reason is not None
    assert name in room.view.reason
    assert took_s < SLACK * KNOWN_S[how], f"it took {took_s:.1f} s"


def served_until(is_over: Callable[[], bool], room: Callable[[], str | None]) -> None:
    """All rooms of a rank that nothing has happened to, one after another."""
    while not is_over():
        assert room() is None
        time.sleep(PAUSE_S)


def serves_again(room: Callable[[], str | None]) -> None:
    """Requests may fail until the rank that is back has noticed itself that it was lost."""
    back_s, failures = time.monotonic(), []
    while (failure := room()) is not None:
        failures.append(failure)
        assert time.monotonic() - back_s < SLACK * SERVES_AGAIN_S, failures
        time.sleep(PAUSE_S)
    assert time.monotonic() - back_s < SLACK * SERVES_AGAIN_S, failures


# --- the machine stands still ---


@pytest.mark.parametrize("world", ["tcp", "samehost"], indirect=True)
def test_ranks_that_stood_still_together_have_not_lost_each_other(world: World) -> None:
    """For longer than either may be silent. The room that waits meanwhile is handed over: a link
    that was lost would have been its end."""
    prefill, decode = world.rank("prefill", VICTIM), world.rank("decode", OTHER)
    prefill.ask("send", room := next(ROOMS))
    decode.tell("take", room, prefill.address)
    assert decode.answer() == "taken"
    prefill.ask("hold", room := next(ROOMS))
    decode.tell("take", room, prefill.address)
    assert not decode.has_answered(1.0), "it waits"
    for _ in range(2):
        for rank in (prefill, decode):
            rank.freeze()
        time.sleep(STILL_S)
        for rank in (prefill, decode):
            rank.go_on()
        assert not decode.has_answered(1.0), "it waits still"
    prefill.ask("give", room)
    assert decode.answer() == "taken"


# --- a prefill rank, as its decode rank sees it ---


def taken(rank: DecodeRank, prefill: RankProcess) -> str | None:
    """One room, from beginning to end; why it failed otherwise."""
    prefill.ask("send", room := next(ROOMS))
    return take(rank, room, prefill.address)


@each_harm
def test_a_lost_prefill_rank_is_known_and_others_serve(world: World, how: str) -> None:
    with decode_rank(world.transport) as rank:
        victim, other = world.rank("prefill", VICTIM), world.rank("prefill", OTHER)
        assert taken(rank, other) is None
        victim.ask("hold", room := next(ROOMS))
        use = request(rank, room, victim.address)
        over = when_over(use)
        harmed_s = world.harm(how, victim)
        served_until(lambda: use.view.over, lambda: taken(rank, other))
        known_in_time(how, harmed_s, over, use, "lost the connection to prefill rank")
        assert taken(rank, other) is None
        if how == "kill":
            victim = world.rank("prefill", VICTIM, victim.registry_port)
        world.heal(how, victim)
        serves_again(lambda: taken(rank, victim))


@one_host
def test_a_prefill_rank_whose_interpreter_is_held_is_not_lost(world: World) -> None:
    with decode_rank(world.transport) as rank:
        busy = world.rank("prefill", VICTIM)
        busy.ask("hold", room := next(ROOMS))
        use = request(rank, room, busy.address)
        busy.ask("busy", BUSY_S)
        assert taken(rank, busy) is None
        assert use.view.state is RoomState.REQUESTED


# --- a decode rank, as its prefill rank sees it ---


def given(rank: PrefillRank, address: str, decode: RankProcess) -> str | None:
    """One room, from beginning to end; why it failed otherwise."""
    use = rank.side.open_room(room := next(ROOMS), register_dp_rank=False)
    decode.tell("take", room, address)
    until(lambda: use.view.state is not RoomState.OPEN or decode.has_answered(), "it asks")
    if use.view.state is RoomState.READY:
        rank.send(use, SOURCE_PAGES, 0, AUX)
    answer = decode.answer()
    if answer != "taken":
        return answer
    until(lambda: use.view.state is RoomState.DONE, "the room is done")
    return None


@each_harm
@pytest.mark.parametrize("sends", [False, True])
def test_a_lost_decode_rank_is_known_and_others_are_served(
    world: World, how: str, sends: bool
) -> None:
    with prefill_rank(world.transport) as (rank, address):
        victim, other = world.rank("decode", VICTIM), world.rank("decode", OTHER)
        assert given(rank, address, other) is None
        use = rank.side.open_room(room := next(ROOMS), register_dp_rank=False)
        victim.ask("ask", room, address)
        until(lambda: use.view.state is RoomState.READY, "the decode rank asks")
        over = when_over(use)
        harmed_s = world.harm(how, victim)
        if sends:
            rank.send(use, SOURCE_PAGES, 0, AUX)
        served_until(lambda: use.view.over, lambda: given(rank, address, other))
        known_in_time(how, harmed_s, over, use, "" if sends else "to decode rank")
        assert given(rank, address, other) is None
        if how == "kill":
            victim = world.rank("decode", VICTIM)
        world.heal(how, victim)
        serves_again(lambda: given(rank, address, victim))


@one_host
def test_a_decode_rank_whose_interpreter_is_held_is_not_lost(world: World) -> None:
    with prefill_rank(world.transport) as (rank, address):
        busy = world.rank("decode", VICTIM)
        use = rank.side.open_room(room := next(ROOMS), register_dp_rank=False)
        busy.ask("ask", room, address)
        until(lambda: use.view.state is RoomState.READY, "the decode rank asks")
        busy.ask("busy", BUSY_S)
        assert given(rank, address, busy) is None
        assert use.view.state is RoomState.READY
