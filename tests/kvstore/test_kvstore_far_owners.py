# SPDX-License-Identifier: Apache-2.0
"""What a thin client knows of other hosts' owners, and which keys it has read lately."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te
from kvstore.host import far
from kvstore.host.far import LOOK_S, PAUSE_S, PAUSE_S_MAX, FarOwners, ReadLately
from kvstore.protocol.messages import Lender

pytestmark = pytest.mark.fast


class Peer:
    def __init__(self) -> None:
        self.alive = True

    def close(self) -> None:
        self.alive = False


class World:
    """An engine that connects, or does not; the host's owner; and the time."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.works = True
        self.peers: dict[bytes, list[Peer]] = {}
        self.asked = 0
        #: What an engine raises that is made, or that connects.
        self.makes: Exception | None = None
        self.connects: Exception | None = te.ConnectError("it cannot be reached")
        #: Who is lent by, by number, and which of them takes the whole time.
        self.cards = {one: b"card %d" % one for one in (1, 2, 3)}
        self.frozen: set[bytes] = set()
        self.answers = True
        self.meanwhile: Callable[[], None] = lambda: None
        world = self

        class Memory:
            @property
            def engine(self) -> Any:
                if world.makes is not None:
                    raise world.makes
                return SimpleNamespace(connect=world._connect)

        memory: Any = Memory()
        self.owners = FarOwners(memory, 1.0, lambda: self.time_s)

    def _connect(self, card: bytes, timeout_s: float) -> Peer:
        self.meanwhile()
        if card in self.frozen:
            self.time_s += timeout_s
            raise te.ConnectError("it does not answer")
        if not self.works and self.connects is not None:
            raise self.connects
        known = self.peers.setdefault(card, [])
        if not known or not known[-1].alive:  # As te does.
            known.append(Peer())
        return known[-1]

    def lenders(self) -> list[Lender] | None:
        self.asked += 1
        if not self.answers:
            return None
        return [
            Lender(one, card, 1000 * one, 2000 * one, f"{one:032x}", "host", 1)
            for one, card in self.cards.items()
        ]

    def connect(self) -> None:
        self.owners.connect(self.lenders)

    @property
    def readable(self) -> list[int]:
        found: list[int] = np.flatnonzero(self.owners.readable).tolist()
        return found


def test_owners_are_connected_to_that_something_is_wanted_of() -> None:
    world = World()
    world.connect()
    assert world.asked == 0
    assert world.owners.want([2])
    assert world.owners.source(2) is None
    world.connect()
    assert world.readable == [2]
    assert not world.owners.want([2]), "it is connected"
    source = world.owners.source(2)
    assert source is not None
    assert source.is_far
    assert (source.number, source.headers_address, source.slots_address) == (2, 2000, 4000)
    world.connect()
    assert world.asked == 1


def test_who_stores_knows_where_all_are_and_is_told_of_new_ones() -> None:
    world = World()
    assert world.owners.want_all([1, 2])
    world.connect()
    assert set(world.owners.lenders) == {1, 2, 3}
    assert world.readable == [], "nothing is wanted of any"
    assert not world.owners.want_all([1, 2])
    world.cards[4] = b"card 4"
    assert not world.owners.want_all([1, 4]), "it has just been asked"
    world.time_s += PAUSE_S
    assert world.owners.want_all([1, 4])
    world.connect()
    assert set(world.owners.lenders) == {1, 2, 3, 4}
    assert world.asked == 2
    world.time_s += LOOK_S
    assert world.owners.want_all([1]), "numbers are given anew"
    world.owners.close()
    assert not world.owners.want_all([1])


def test_an_owner_that_is_not_reached_is_left_alone_for_a_while() -> None:
    world = World()
    world.works = False
    assert world.owners.want([1, 9])
    world.connect()
    assert not world.owners.want([1, 9]), "not now"
    world.works = True
    world.time_s += PAUSE_S
    assert world.owners.want([1])
    world.connect()
    assert world.readable == [1], "nobody knows of the other"


def test_a_read_that_has_failed_is_not_followed_by_others_for_a_while() -> None:
    world = World()
    world.owners.want([1, 2])
    world.connect()
    assert world.owners.reachable(1)
    assert not world.owners.reachable(3)
    world.owners.pause(1)
    assert not world.owners.reachable(1)
    assert world.owners.reachable(2)
    assert world.readable == [2]
    world.time_s += PAUSE_S
    assert world.readable == [1, 2]


def test_who_stands_still_costs_fewer_and_fewer_reads_their_deadlines() -> None:
    world = World()
    world.owners.want([1])
    world.owners.connect(world.lenders)
    pauses = list[float]()
    while not pauses or pauses[-1] < PAUSE_S_MAX:
        begun_s = world.time_s
        for _ in range(3):  # Reads that were under way at once.
            world.owners.pause(1)
        while not world.owners.readable[1]:
            world.time_s += PAUSE_S / 2
        pauses.append(world.time_s - begun_s)
        world.time_s += 2.0  # The deadline of the next read.
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    world.time_s += LOOK_S
    world.owners.pause(1)
    world.time_s += PAUSE_S
    assert world.owners.readable[1], "was read from in between, or not at all"


def test_a_connection_that_has_ended_is_made_anew() -> None:
    world = World()
    world.owners.want([1])
    world.connect()
    world.peers[b"card 1"][0].alive = False
    assert world.readable == []
    assert world.owners.source(1) is None
    assert world.owners.want([1])
    world.connect()
    assert world.readable == [1]


def test_there_are_no_more_connections_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "CONNECTED_MAX", 2)
    world = World()
    world.owners.want([1, 2, 3])
    world.connect()
    assert world.readable == [1, 2]
    world.peers[b"card 1"][0].alive = False
    world.owners.want([3])
    world.connect()
    assert world.readable == [2, 3], "one that has gone makes room"


def test_who_is_never_reached_is_tried_less_and_less_often() -> None:
    world, tries = World(), list[float]()
    world.works = False
    for _ in range(300):
        if world.owners.want([1]):
            tries.append(world.time_s)
            world.connect()
        world.time_s += PAUSE_S
    pauses = np.diff(tries)
    assert pauses[0] == PAUSE_S
    assert (pauses[1:] >= pauses[:-1]).all()
    assert pauses[-1] == PAUSE_S_MAX


@pytest.mark.parametrize("makes", [True, False])
@pytest.mark.parametrize("raised", [OSError(24, "too many open files"), KeyError("a bug")])
def test_whatever_fails_is_tried_less_and_less_often(raised: Exception, makes: bool) -> None:
    """The thread that connects would say so ten times a second."""
    world = World()
    world.works = False
    world.makes, world.connects = (raised, None) if makes else (None, raised)
    world.owners.want([1, 2])
    world.connect()
    assert not world.owners.want([1, 2])
    world.works, world.makes = True, None
    world.time_s += PAUSE_S
    assert world.owners.want([1, 2])
    world.connect()
    assert world.readable == [1, 2]


def test_who_was_never_tried_does_not_wait_for_those_that_do_not_answer() -> None:
    """As each takes the whole time."""
    world = World()
    world.frozen = {world.cards[1], world.cards[2]}
    world.owners.want([1, 2, 3])
    for _ in range(3):
        world.connect()
        world.time_s += PAUSE_S
    assert world.readable == [3]


def test_a_number_that_is_another_owners_now_leads_to_that_one() -> None:
    """Numbers are given anew. The former owner may live all the same, and have nothing of it."""
    world = World()
    world.owners.want([1, 2])
    world.connect()
    world.cards = {1: b"a new owner", 2: world.cards[2], 5: world.cards[1]}
    world.time_s += LOOK_S
    world.connect()
    assert not world.peers[b"card 1"][0].alive
    assert world.peers[b"card 2"][0].alive
    assert world.readable == [1, 2]
    source: Any = world.owners.source(1)
    assert source.link is world.peers[b"a new owner"][0]
    assert world.asked == 2
    world.connect()
    assert world.asked == 2, "not all the time"


def test_an_owner_with_two_numbers_keeps_its_connection_as_long_as_it_has_one() -> None:
    """te has one connection to it, whichever number it was asked by."""
    world = World()
    world.owners.want([1])
    world.connect()
    world.cards[5] = world.cards[1]
    world.owners.want([5])
    world.connect()
    del world.cards[1]
    world.time_s += LOOK_S
    world.connect()
    assert world.readable == [5]


def test_who_lends_nothing_any_more_is_left() -> None:
    """It may stand still, with a connection that looks alive."""
    world = World()
    world.owners.want([1, 2])
    world.connect()
    del world.cards[1]
    world.time_s += LOOK_S
    world.connect()
    assert not world.peers[b"card 1"][0].alive
    assert world.readable == [2]
    world.cards[1] = b"card 1"
    world.time_s += LOOK_S
    world.owners.want([1])
    world.connect()
    assert world.readable == [1, 2]


def test_one_that_comes_back_elsewhere_is_not_left_alone_for_the_former_ones_failures() -> None:
    world = World()
    world.works = False
    for _ in range(100):
        world.owners.want([1])
        world.connect()
        world.time_s += PAUSE_S
    world.works = True
    world.cards[1] = b"the next one"
    world.time_s += LOOK_S
    world.connect()
    assert world.readable == [1]


def test_one_that_was_not_known_yet_is_not_left_alone_once_it_is() -> None:
    world = World()
    there = world.cards.pop(1)
    for _ in range(100):
        world.owners.want([1])
        world.connect()
        world.time_s += PAUSE_S
    world.cards[1] = there
    world.time_s += LOOK_S
    world.connect()
    assert world.readable == [1]


def test_a_silent_owner_of_this_host_says_nothing_against_the_others() -> None:
    world = World()
    world.owners.want([1])
    world.connect()
    world.answers = False
    world.owners.want([2])
    world.connect()
    assert world.readable == [1], "that one is read on"
    assert not world.owners.want([2]), "it is not asked all the time"
    world.connect()
    assert world.asked == 2
    world.answers = True
    world.time_s += PAUSE_S
    assert world.owners.want([2])
    world.connect()
    assert world.readable == [1, 2]


def test_the_end_ends_connecting_to_others() -> None:
    world = World()
    world.owners.want([1, 2, 3])
    world.meanwhile = world.owners.close
    world.connect()
    assert list(world.peers) == [b"card 1"]
    assert not world.peers[b"card 1"][0].alive


def test_behind_its_end_nothing_is_connected() -> None:
    world = World()
    world.owners.want([1])
    world.connect()
    world.owners.close()
    assert not world.peers[b"card 1"][0].alive
    assert not world.owners.want([1])
    assert world.readable == []
    assert world.owners.source(1) is None


@given(st.lists(st.integers(0, 40), max_size=120), st.integers(1, 16))
def test_the_keys_that_were_read_last_are_remembered(read: list[int], most: int) -> None:
    lately = ReadLately(most)
    for one in read:
        lately.add(np.full((1, 16), one, np.uint8))
    every = np.repeat(np.arange(41, dtype=np.uint8)[:, None], 16, axis=1)
    found = set(np.flatnonzero(lately.has(every)).tolist())
    latest = list(dict.fromkeys(reversed(read)))
    assert set(latest[:most]) <= found <= set(read)
    assert len(found) <= 2 * most
