# SPDX-License-Identifier: Apache-2.0
"""Who owns the memory of a host, for how long, and who takes it over."""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import te
from bootstrap_server.admission.secret import Keys
from kvstore.config import Config
from kvstore.host import agreement
from kvstore.host.lifetime import (
    ADOPTION_S,
    ENDED_S,
    ENDING_S,
    FIRST_USE_S,
    GIVEN_WAY_S,
    UNTAKEN_S,
    Adoption,
    Attempts,
    HoldOff,
    Presence,
)
from kvstore.host.messages import Farewell, Join, Joined, Refused, decode, encode
from kvstore.host.place import Place
from kvstore.host.telling import TELLER_S, Teller, Told
from kvstore.owner.answering import CLOSE_TIMEOUT_S as LINES_S
from kvstore.owner.card import OwnerStats
from kvstore.owner.owner import DRAIN_S
from kvstore.protocol.users import check_user
from te.engine import CLOSE_TIMEOUT_S as ENGINE_S

LINGER_S = 600.0


def test_an_owner_stays_as_long_as_it_is_used_and_a_while_longer() -> None:
    presence = Presence(LINGER_S, 100.0)
    assert presence.left_s(100.0) == LINGER_S, "the one that has started it may have died"
    presence.came(1)
    presence.came(2)
    presence.went(1, 200.0)
    assert presence.left_s(1e9) == math.inf
    presence.went(1, 300.0)
    presence.went(2, 300.0)
    assert presence.left_s(500.0) == LINGER_S - 200.0
    presence.went(2, 800.0)
    assert presence.left_s(900.0) == 0.0
    short = Presence(0.0, 0.0)
    assert short.left_s(0.0) == FIRST_USE_S, "the one that has started it has yet to come"
    short.came(1)
    short.went(1, 1.0)
    assert short.left_s(1.0) == 0.0
    assert Presence(math.inf, 0.0).left_s(1e12) == math.inf


def test_a_lost_owner_is_looked_for_at_once_and_then_less_and_less() -> None:
    attempts, now_s, pauses = Attempts(0.0), 0.0, list[float]()
    while now_s < 1000.0:
        pauses.append(attempts.pause_s(now_s))
        now_s += pauses[-1]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] == 10.0
    assert attempts.pause_s(now_s, is_awaited=True) < ADOPTION_S, "or its memory was lost"
    refused = Attempts(0.0)
    refused.refused()
    assert refused.pause_s(0.0) == 1.0


def test_one_process_tells_what_an_owner_holds_until_it_asks_no_more() -> None:
    teller, now_s, own = Teller(1), 100.0, OwnerStats(objects=3)
    for _ in range(3):
        now_s += TELLER_S - 1
        assert teller.tell(b"a", own, now_s) == (1, own)
        assert teller.tell(b"b", own, now_s) is None
    now_s += TELLER_S
    assert teller.tell(b"b", own, now_s) == (2, own)
    assert teller.tell(b"a", own, now_s) is None
    teller.keep()
    assert teller.tell(b"b", own, 1e12) is None, "the owner does it itself"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 9))))
def test_all_processes_together_tell_what_an_owner_has_done_once(
    steps: list[tuple[bool, int, int]],
) -> None:
    """Also when its owner is followed by another, and when one has its second turn."""
    owners, now_s, latest = [OwnerStats()], 0.0, dict[int, OwnerStats]()
    teller, processes, counted = Teller(1), [Told(), Told(), Told()], 0
    for is_new, asker, risen in steps:
        now_s += TELLER_S
        if is_new:
            teller, owners = Teller(1000 * len(owners)), [*owners, OwnerStats()]
        last = owners[-1]
        claims = {"granted": last.claims.get("granted", 0) + risen}
        owners[-1] = own = OwnerStats(risen, claims, last.published + risen)
        told = teller.tell(bytes([asker]), own, now_s)
        assert told is not None
        latest[asker] = processes[asker].add(*told)
        counted += risen
        assert latest[asker].objects == risen, "what is now"
        assert sum(one.published for one in latest.values()) == counted
        assert sum(one.claims["granted"] for one in latest.values()) == counted


@dataclass
class World:
    """Processes of a host, by the rules. A client is what it holds of the last owner's memory."""

    now_s: float = 0.0
    clients: dict[int, str] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    #: The owner, if there is one: its memory, who uses it, and what it waits for.
    owner: tuple[str, Presence, Adoption] | None = None
    noted: str = ""
    memories: int = 0
    keys: dict[str, int] = field(default_factory=dict)

    def act(self, client: int) -> None:
        """It looks for the owner: starts one, brings what it holds, or joins."""
        if client in self.joined:
            return
        if self.owner is None:  # It gets the lock.
            self.owner = ("", Presence(LINGER_S, self.now_s), Adoption(self.noted, self.now_s))
        memory, presence, adoption = self.owner
        if not memory and adoption.wants(self.clients[client]):
            adoption.took()
            memory = self.clients[client]
        if not memory and adoption.left_s(self.now_s):
            return  # It waits.
        if not memory:
            self.memories += 1
            memory = f"{self.memories:032x}"
            self.keys[memory] = 0
        self.owner, self.noted = (memory, presence, adoption), memory
        presence.came(client)
        self.joined.add(client)
        self.clients[client] = memory
        self.keys[memory] += 1  # It stores something.

    def dies(self, client: int) -> None:
        """One that was killed, or has ended."""
        del self.clients[client]
        self.joined.discard(client)
        if self.owner is not None:
            self.owner[1].went(client, self.now_s)

    def owner_dies(self) -> None:
        self.owner = None
        self.joined.clear()

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        if self.owner is not None and self.owner[1].left_s(self.now_s) == 0.0:
            assert not self.joined, "nobody loses an owner that he uses"
            self.owner, self.noted = None, ""


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["come", "act", "die"]), st.integers(0, 5)),
        st.tuples(st.just("owner dies"), st.just(0)),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.1, ADOPTION_S / 2, 300.0, 700.0])),
    ),
    max_size=60,
)


def play(world: World, events: Any) -> None:
    for what, value in events:
        if what == "come":
            world.clients.setdefault(value, "")
        elif what == "act" and value in world.clients:
            world.act(value)
        elif what == "die" and value in world.clients:
            world.dies(value)
        elif what == "owner dies":
            world.owner_dies()
        elif what == "pass":
            world.passes(value)


@given(EVENTS, st.permutations(range(8)))
def test_what_somebody_holds_is_taken_over_whoever_starts_the_next_owner(
    events: Any, order: list[int]
) -> None:
    """And whoever comes first, as long as all who live come while it is waited for."""
    world = World()
    play(world, events)
    world.owner_dies()
    noted, keys = world.noted, dict(world.keys)
    holders = [one for one, memory in world.clients.items() if memory and memory == noted]
    for one in order:
        world.clients.setdefault(one, "")
        world.act(one)
        world.passes(0.01)
    world.passes(ADOPTION_S)
    for one in order:
        world.act(one)
    assert world.joined == set(world.clients), "everybody has an owner in the end"
    assert world.owner is not None
    assert set(world.clients.values()) == {world.owner[0]}, "the same one"
    if holders:
        assert world.owner[0] == noted
        assert world.keys[noted] > keys[noted], "nothing is lost"


@given(EVENTS)
def test_nobody_takes_over_what_is_older_than_the_last_owner(events: Any) -> None:
    world = World()
    play(world, events)
    if world.owner is not None and world.owner[0]:
        assert world.owner[0] == world.noted
        assert all(world.clients[one] == world.noted for one in world.joined)


def test_an_owner_that_gives_way_has_the_time_that_it_takes_to_end() -> None:
    assert GIVEN_WAY_S > ENDING_S >= 1.4 * (LINES_S + DRAIN_S + ENGINE_S)


def test_behind_an_owner_that_has_given_way_others_start_one_if_nobody_does() -> None:
    hold_off = HoldOff()
    assert hold_off.is_over(0.0, is_free=True)
    hold_off.gave_way(100.0)
    assert not hold_off.is_over(101.0, is_free=False), "it ends still"
    assert not hold_off.is_over(102.0, is_free=True)
    assert not hold_off.is_over(103.0, is_free=False), "the next one has begun"
    assert not hold_off.is_over(110.0, is_free=True), "and has failed"
    assert not hold_off.is_over(110.0 + UNTAKEN_S - 0.1, is_free=True)
    assert hold_off.is_over(110.0 + UNTAKEN_S, is_free=True)
    hold_off.gave_way(200.0)
    assert not hold_off.is_over(200.0 + GIVEN_WAY_S - 0.1, is_free=False)
    assert hold_off.is_over(200.0 + GIVEN_WAY_S, is_free=False)
    hold_off.gave_way(300.0)
    hold_off.end()
    assert hold_off.is_over(300.0, is_free=True)


def test_an_operator_has_his_time_to_start_the_next_owner() -> None:
    hold_off = HoldOff()
    hold_off.gave_way(0.0)
    hold_off.ended(0.0)
    assert not hold_off.is_over(1.0, is_free=True)
    assert not hold_off.is_over(ENDED_S - 0.1, is_free=True)
    assert hold_off.is_over(ENDED_S, is_free=True)


# -- what processes must agree on


def test_settings_that_differ_are_named() -> None:
    mine = Config(memory=1 << 30)
    has = agreement.wishes(replace(mine, memory=1 << 24, disk=Path("/d"), disk_size=1 << 30))
    said = agreement.differences(agreement.wishes(mine), has)
    assert said == (
        "memory=16777216 instead of 1073741824, disk='/d' instead of None,"
        " disk_size=1073741824 instead of 0"
    )
    assert agreement.differences(has, has) == ""
    operators = has | {"linger_s": math.inf}
    assert agreement.differences(has, operators) == "", "nothing to wonder about"
    assert agreement.differences(operators, operators) == ""
    assert agreement.wished(mine, has) == replace(
        mine, memory=1 << 24, disk=Path("/d"), disk_size=1 << 30
    )
    assert agreement.wished(mine, {"index": "redis://x", "new": 1}) == mine


def test_memory_is_the_same_with_its_usual_chunks_whether_they_are_said_or_not() -> None:
    usual = Config(memory=1 << 30)
    said = replace(usual, chunk_bytes=usual.chunk_bytes_used)
    other = replace(usual, chunk_bytes=usual.chunk_bytes_used // 2)
    for one in (usual, said):
        assert agreement.is_same_memory(one, agreement.wishes(usual))
        assert agreement.is_same_memory(one, agreement.wishes(said))
        assert not agreement.is_same_memory(one, agreement.wishes(other))
        assert not agreement.is_same_memory(other, agreement.wishes(one))
        assert not agreement.is_same_memory(replace(one, memory=1 << 31), agreement.wishes(one))
        assert not agreement.is_same_memory(one, {"memory": 1 << 30}), "it does not say"


def of_network(memory: int = 0, host: str = "", **engine: Any) -> Config:
    secret = Keys.from_secrets([b"o" * 40])
    settings = te.Config(keys=secret.data, **engine)
    return Config(memory=memory, host=host, index="redis://a:1", keys=secret, engine=settings)


def test_who_says_nothing_of_the_network_does_not_decide_it() -> None:
    """A router that is the first user of its host, say. Its owner gives way to a server's, and the
    next owner has that one's settings, whoever starts it."""
    router = of_network()
    topology = Path("/topology.json")
    server = of_network(host="10.0.0.1", port=20000, port_last=20100, encrypt=True, rails=4)
    other = of_network(topology=topology, transports=("tcp",))
    has = {
        "router": agreement.wishes(router),
        "server": agreement.wishes(server),
        "other": agreement.wishes(other),
    }
    assert agreement.gives_way(has["router"], has["server"])
    assert not agreement.gives_way(has["router"], has["router"])
    assert not agreement.gives_way(has["server"], has["router"])
    assert not agreement.gives_way(has["server"], has["other"]), "or the two would take turns"
    assert agreement.gives_way(has["server"], agreement.wishes(of_network(1 << 30)))
    lends = agreement.wishes(of_network(1 << 30))
    assert not agreement.gives_way(lends, has["server"]), "it has objects"
    assert agreement.wished(router, has["server"]) == server
    assert agreement.wished(server, has["router"]) == router
    assert agreement.wished(server, has["other"]) == other
    assert agreement.wished(server, {"memory": 0}) == server, "of an owner that says nothing of it"
    with pytest.raises(ValueError, match="are no settings of te's engine"):
        agreement.wished(router, {"network": {"port": "x"}})


def test_what_an_owner_has_otherwise_of_the_network_is_said() -> None:
    mine = agreement.wishes(of_network(host="10.0.0.1", nics=("mlx5_0",), stall_timeout_s=1.0))
    has = agreement.wishes(of_network(1 << 30, nics=("mlx5_1",)))
    assert agreement.differences(mine, has) == (
        "nics=['mlx5_1'] instead of ['mlx5_0'], host='' instead of '10.0.0.1'"
    )
    assert agreement.differences(mine, mine) == ""
    assert agreement.differences(agreement.wishes(of_network()), has) == ""


def test_an_owner_that_does_not_encrypt_is_refused_by_who_does() -> None:
    plain, hidden = (agreement.wishes(of_network(encrypt=one)) for one in (False, True))
    assert "one encrypts" in agreement.unencrypted(plain, hidden)
    assert agreement.unencrypted({"memory": 1}, hidden), "also by one that says nothing of it"
    assert not agreement.unencrypted(hidden, plain)
    assert not agreement.unencrypted(hidden, hidden)
    assert not agreement.unencrypted(plain, {"network": "nonsense"})


def test_pools_that_are_not_one() -> None:
    old, new = b"o" * 40, b"n" * 40

    def pool(index: str, *secrets: bytes) -> list[str]:
        return agreement.pool(Config(index=index, keys=Keys.from_secrets(secrets)))

    here, there = pool("redis://a:1", old), pool("redis://b:1", old)
    assert "another index" in agreement.refusal(here, there)
    assert "another index" in agreement.refusal(agreement.pool(Config()), here)
    said = agreement.refusal(here, pool("redis://a:1", new))
    assert "another secret" in said
    assert "--secret-file of commands" in said, "what to set, and where"
    with_secret = agreement.pool(Config(keys=Keys.from_secrets([new])))
    assert agreement.refusal(agreement.pool(Config()), with_secret) == "", "as of a hand-over"
    assert agreement.refusal(pool("redis://a:1", old, new), pool("redis://a:1", new, old)) == ""
    assert agreement.refusal(agreement.pool(Config()), agreement.pool(Config())) == ""


def test_settings_for_a_process_that_is_started_are_whole() -> None:
    config = Config(
        memory=1 << 30,
        linger_s=math.inf,
        file=Path("/f"),
        index="redis://a:1",
        keys=Keys.from_secrets([b"o" * 40]),
    )
    assert agreement.of_bytes(agreement.to_bytes(config)) == config


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("linger_s", -1.0, "0 or more"),
        ("linger_s", math.nan, "0 or more"),
    ],
)
def test_settings_that_cannot_be(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config(**{name: value})


def test_messages_are_what_they_were() -> None:
    for one in (
        Join(5, {"memory": 1, "file": None, "linger_s": math.inf}, ["a"], "0" * 32, {}),
        Joined(17, {"memory": 1}, "", True),
        Refused(17, "no"),
        Farewell(),
    ):
        assert decode(encode(one)) == one
    for raw in (b"", b"\xc1", encode(Refused(1, "x"))[:-1], encode(Join(5, {}, [], "../x"))):
        with pytest.raises(ValueError, match="cannot be read"):
            decode(raw)


def test_the_lock_is_one_process_s_and_remembers_a_memory(directory: Path) -> None:
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    assert place.lock() is None
    assert lock.memory() == ""
    lock.note("a" * 32)
    lock.close()
    again = place.lock()
    assert again is not None
    assert again.memory() == "a" * 32
    again.note("")
    assert again.memory() == ""
    again.close()


def test_a_lock_that_is_closed_in_another_way_names_no_other_file(directory: Path) -> None:
    """As by who closes all descriptors before it forks."""
    lock = Place(directory).lock()
    assert lock is not None
    os.close(lock.fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock.close()
    assert lock.fd == -1
    lock.close()


def test_another_user_s_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        check_user(one)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(ValueError, match=f"a process of the user {user} is at the other end"):
            check_user(one)


def test_a_memory_is_waited_for_only_while_somebody_may_bring_it() -> None:
    adoption = Adoption("a" * 32, 10.0)
    assert adoption.left_s(10.0) == ADOPTION_S
    assert adoption.left_s(10.0 + ADOPTION_S) == 0.0
    assert not adoption.wants("b" * 32)
    assert not adoption.wants("")
    assert adoption.wants("a" * 32)
    adoption.took()
    assert adoption.left_s(10.0) == 0.0
    assert not adoption.wants("a" * 32)
    assert Adoption("", 10.0).left_s(10.0) == 0.0
