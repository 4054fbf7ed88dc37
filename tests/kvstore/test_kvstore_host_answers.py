# SPDX-License-Identifier: Apache-2.0
"""What the owner of a host does for its users while others change what it holds."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_makers import SIG, Room, config, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, filled, put_all, sees

import kvstore.rate_limited_log
from kvstore.client.pool import OWN
from kvstore.client.puts import Puts
from kvstore.client.writing import OUTCOMES
from kvstore.host.answers import PoolAnswers
from kvstore.host.bringing import Bringing
from kvstore.memory.slab import UNIT_BYTES, class_of
from kvstore.objects.changes import Keys, fingerprint_of
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.owner.claims import CLAIM_IS_OVER
from kvstore.owner.owner import Owner
from kvstore.owning import OwningStore
from kvstore.protocol.messages import (
    Claim,
    Copy,
    Done,
    Granted,
    Greet,
    InMemory,
    Promote,
    Publish,
    Published,
    Refused,
    Stored,
    Take,
)
from kvstore.rules.object_table import Verdict
from kvstore.rules.tiered_table import Promoted, PromotionState
from kvstore.store import StillLanding, Store

pytestmark = pytest.mark.slow


@pytest.fixture
def here(directory: Path) -> Iterator[OwningStore]:
    """Lends a host's memory."""
    with owning(config(directory, 16 * MIB)) as store:
        yield store


@pytest.fixture
def other(directory: Path) -> Iterator[Store]:
    """Lends that of another one."""
    with owning(config(directory, 16 * MIB)) as store:
        yield store


def owner_of(store: Store) -> Owner:
    own = store._owners.own
    assert own is not None
    return own


def answers_of(store: OwningStore) -> PoolAnswers:
    pool, memory, own = store._owners, store._config.memory, owner_of(store)
    parts = (own, pool, store._memory, store.gets, store._copier, memory)
    return PoolAnswers(*parts, store.status, store.teller, lends=store._lends)


def copy_to_two(store: OwningStore) -> None:
    assert answers_of(store)(Copy(KEYS.tobytes(), SIG, NBYTES, 2)) == Done()


@pytest.mark.parametrize("step", ["look_up", "holds", "bring", "look_up again"])
def test_slots_that_get_other_objects_are_not_copied_as_the_former_ones(
    here: OwningStore, other: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """They change behind that it is known which of them lack a copy, behind that the owner knows
    which objects it has, before they are copied, and behind that."""
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "they know each other")
    room, own = put_all(here), owner_of(here)
    later, names = filled(here, seed=3), keys(N, 3)
    slots = {slot for slot, _ in own.places(KEYS, SIG, NBYTES)[1]}

    def change() -> None:
        monkeypatch.undo()
        own.remove(KEYS, SIG)
        assert own.storing.take(names, SIG, later.pieces) == [Verdict.GRANTED] * N

    name, _, is_second = step.partition(" ")
    what: Any = {"holds": own, "bring": own._copier, "look_up": here._owners}[name]
    former, calls = getattr(what, name), itertools.count(0 if is_second else 1)

    def hooked(*args: Any, **more: Any) -> Any:
        is_now = next(calls) == 1
        if step == "bring":
            change()
        result = former(*args, **more)
        if step != "bring" and is_now:
            change()
        return result

    monkeypatch.setattr(what, name, hooked)
    copy_to_two(here)
    assert slots == {slot for slot, _ in own.places(names, SIG, NBYTES)[1]}, "they have changed"
    back = Room(other, N, NBYTES)
    was_copied = bool(is_second)

    def found() -> int:
        return other.get(KEYS, SIG, back.pieces).count(Got.RIGHT)

    if was_copied:  # One copy was missing, so they may be at their former owner again alone.
        until(lambda: found() == N, "the owner's announcements")
    else:
        assert not found()
    assert (back.bytes == room.bytes).all() == was_copied


def test_copies_are_those_that_lie_in_memory(here: OwningStore, other: Store) -> None:
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "they know each other")
    room = put_all(here)
    own = owner_of(here)
    own.remove(KEYS[:3], SIG)
    copy_to_two(here)
    fingerprint = fingerprint_of(SIG, NBYTES)
    until(lambda: (here._owners.look_up(KEYS[3:], fingerprint)["copies"] == 2).all())
    own.remove(KEYS, SIG)
    # What it has not heard to be removed would have moved for it.
    (followed,) = other._owners._following.owners()
    until(lambda: followed._changes == own.changes, "the owner's announcements")
    back = Room(other, N, NBYTES)
    assert other.get(KEYS, SIG, back.pieces) == [Got.MISSING] * 3 + [Got.RIGHT] * (N - 3)
    assert (back.bytes[3:] == room.bytes[3:]).all()


def test_a_copy_of_objects_of_a_size_that_there_is_not_does_nothing(here: OwningStore) -> None:
    put_all(here)
    for nbytes in (NBYTES + 1, 1 << 62):
        assert answers_of(here)(Copy(KEYS.tobytes(), SIG, nbytes, 2)) == Done()
    assert here.put(KEYS, SIG, filled(here).pieces) == [Put.EXISTS] * N


@pytest.mark.parametrize("is_all", [False, True])
def test_what_is_removed_while_it_is_read_does_not_come_back(
    here: OwningStore, other: Store, monkeypatch: pytest.MonkeyPatch, is_all: bool
) -> None:
    put_all(other)
    sees(here)
    own, former = owner_of(here), here.gets.get

    def get(*args: Any, **more: Any) -> Any:
        outcomes = former(*args, **more)
        monkeypatch.undo()
        assert outcomes == [Got.RIGHT] * N
        if is_all:
            assert here.clear(SIG) == N
        else:
            assert here.remove(KEYS, SIG) == [Removed.REMOVED] * N
        return outcomes

    monkeypatch.setattr(here.gets, "get", get)
    used = own.stats().bytes_used
    assert _promoted(here) == {PromotionState.GONE}
    for store in (here, other):
        assert owner_of(store).stats().objects == 0
    assert own.stats().bytes_used == used, "its slots are free again"
    until(lambda: not here.exists(KEYS, SIG, NBYTES).any(), "the other one's announcement")
    assert here.put(KEYS, SIG, filled(here).pieces) == [Put.STORED] * N


def test_slots_of_a_read_that_does_not_stop_are_free_once_nothing_lands_there(
    here: OwningStore, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(other)
    sees(here)
    own, held = owner_of(here), list[int]()
    used = own.stats().bytes_used

    class Landing(StillLanding):
        def wait(self, *_: object) -> None:
            held.append(own.stats().bytes_used)

    def late(*_: object, **__: object) -> None:
        raise Landing([])

    with monkeypatch.context() as patch:
        patch.setattr(here.gets, "get", late)
        assert _promoted(here) == {PromotionState.GONE}
    assert held[0] > used == own.stats().bytes_used
    assert _promoted(here) == {PromotionState.HERE}, "their names are not kept either"


def test_what_does_not_come_from_another_host_can_be_stored_meanwhile(
    here: OwningStore, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner may be dying: who has computed a page would not store it a second time."""
    room = put_all(other)
    sees(here)
    answers, said = answers_of(here), list[object]()

    def get(*_: object, **__: object) -> list[Got]:
        said.append(take(answers, room, KEYS))
        return [Got.UNREACHABLE] * N

    with monkeypatch.context() as patch:
        patch.setattr(here.gets, "get", get)
        assert _promoted(here) == {PromotionState.GONE}
    assert said == [[Put.STORED] * N]
    assert owner_of(here).holds(KEYS, SIG, NBYTES).all()


def test_what_others_have_not_removed_yet_is_not_read_from_them(
    here: OwningStore, other: Store
) -> None:
    """Who removes has asked this owner, and not the other one yet."""
    put_all(other)
    sees(here)
    owner_of(here).remove(KEYS[:3], SIG)
    assert _promoted(here, KEYS[:3]) == {PromotionState.GONE}
    assert _promoted(here, KEYS[3:]) == {PromotionState.HERE}
    owner_of(here).clear(SIG)
    assert _promoted(here) == {PromotionState.GONE}


def test_what_comes_behind_the_first_look_is_found(
    here: OwningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may publish it before the pool is asked."""
    put_all(here)
    former, looked = Bringing._here, list[int]()

    def look(bringing: Bringing, keys: Keys, signature: bytes, nbytes: int) -> list[Promoted]:
        looked.append(len(keys))
        if len(looked) == 1:
            return [Promoted(PromotionState.LATER)] * len(keys)
        return former(bringing, keys, signature, nbytes)

    monkeypatch.setattr(Bringing, "_here", look)
    assert _promoted(here) == {PromotionState.HERE}
    assert looked == [N]
    places = owner_of(here).promote(keys(N + 3), SIG, NBYTES, 0.0)
    assert [one.state for one in places] == [PromotionState.HERE] * N + [PromotionState.GONE] * 3
    said = [(one.slot, one.generation) for one in places[:N]]
    assert said == owner_of(here).places(KEYS, SIG, NBYTES)[1]


def test_what_was_evicted_and_is_not_told_yet_is_read_from_another_host(
    here: OwningStore, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(other)
    sees(here)
    assert _promoted(here) == {PromotionState.HERE}
    own, former = owner_of(here), here._owners.look_up
    stale = former(KEYS, fingerprint_of(SIG, NBYTES))
    assert set(stale["owner"]) == {OWN}
    with own._lock:
        own._table.make_room(1.0, 1.0)
    own.tell()
    assert not own.holds(KEYS, SIG, NBYTES).any()
    told = [stale]
    monkeypatch.setattr(
        here._owners, "look_up", lambda *what: told.pop() if told else former(*what)
    )
    assert _promoted(here) == {PromotionState.HERE}
    assert own.holds(KEYS, SIG, NBYTES).all()


def _promoted(store: OwningStore, names: Keys = KEYS) -> set[PromotionState]:
    answer = answers_of(store)(Promote(names.tobytes(), SIG, NBYTES, 60_000))
    assert isinstance(answer, InMemory)
    return set(map(PromotionState, answer.states))


OUTCOMES_OF_COPIES = [
    Put.STORED,
    Put.EXISTS,
    Put.NO_SPACE,
    Put.FAILED,
    Put.TIMED_OUT,
    Put.UNREACHABLE,
]


@pytest.fixture
def transit(directory: Path) -> Iterator[OwningStore]:
    """Lends nothing: what its users put is stored at other hosts."""
    with owning(config(directory, 8 * MIB), lends=False) as store:
        yield store


def take(answers: PoolAnswers, room: Room, names: Keys) -> list[Put]:
    question = Take(names.tobytes(), SIG, NBYTES, 60_000)
    stored = answers.take(question, room.bytes.ctypes.data)
    assert isinstance(stored, Stored)
    return [OUTCOMES.get(Verdict(one), Put.STORED) for one in stored.verdicts]


def test_of_each_object_in_transit_it_is_told_whether_it_was_stored(
    transit: OwningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that no other host takes cost the others nothing, and no memory here."""
    names, own = keys(len(OUTCOMES_OF_COPIES)), owner_of(transit)
    answers, room = answers_of(transit), filled(transit, len(names))
    monkeypatch.setattr(Puts, "put", lambda *_: OUTCOMES_OF_COPIES)
    said = [*OUTCOMES_OF_COPIES[:3], *[Put.UNREACHABLE] * 3]
    assert take(answers, room, names) == said
    assert own.holds(names, SIG, NBYTES).tolist() == [True, True, *[False] * 4]
    later = keys(6, 1)
    claimed = answers(Claim(later.tobytes(), SIG, NBYTES, transit._memory.engine.id, 1))
    assert isinstance(claimed, Granted)
    monkeypatch.setattr(
        own.storing, "filled", lambda held, _: ("", held.claim, np.ones(len(names), np.uint64))
    )
    published = answers(Publish(claimed.claim_id))
    assert isinstance(published, Published)
    assert [OUTCOMES.get(Verdict(one), Put.STORED) for one in published.verdicts] == said
    assert own.holds(later, SIG, NBYTES).tolist() == [True, True, *[False] * 4]
    assert own._slab.used_bytes == 4 * class_of(NBYTES) * UNIT_BYTES


def test_what_lies_in_transit_memory_already_is_stored_at_another_host_too(
    transit: OwningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came from a host that may have lost it since."""
    names, answers, room = keys(2), answers_of(transit), filled(transit, 2)
    monkeypatch.setattr(Puts, "put", lambda *_: [Put.STORED])
    assert take(answers, room, names[:1]) == [Put.STORED]
    assert take(answers, room, names) == [Put.STORED] * 2


def test_a_put_that_cannot_be_passed_on_leaves_no_slot_taken(
    transit: OwningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, room = answers_of(transit), filled(transit, N)

    def fail(*_: Any) -> None:
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(Puts, "put", fail)
    with pytest.raises(RuntimeError, match="no thread"):
        take(answers, room, KEYS)
    monkeypatch.undo()
    assert owner_of(transit)._slab.used_bytes == 0
    assert take(answers, room, KEYS) == [Put.UNREACHABLE] * N, "the claims are over, too"


def test_objects_with_fewer_copies_than_wanted_are_told_of(
    here: OwningStore,
    other: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "they know each other")
    put_all(here)
    found = [Put.STORED] * (N - 3) + [Put.NO_SPACE] + [Put.TIMED_OUT] * 2
    monkeypatch.setattr(Puts, "put", lambda *_: found)
    monkeypatch.setattr(kvstore.rate_limited_log, "LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.WARNING):
        copy_to_two(here)
    assert f"3 of {N} objects have fewer copies than 2: 1 no space, 2 timed out" in caplog.text


def test_who_cannot_have_the_private_memory_in_time_copies_nothing(
    here: OwningStore, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All questions together take no more of it than one."""
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "they know each other")
    put_all(here)
    copies = answers_of(here)._copies
    monkeypatch.setattr(type(here._owners), "request_timeout_s", 0.0)
    with copies._turn:
        assert copies.copy(KEYS, SIG, NBYTES, 2) == [Put.TIMED_OUT] * N
    monkeypatch.undo()
    assert copies.copy(KEYS, SIG, NBYTES, 2) == [Put.STORED] * N
    assert copies.copy(KEYS, SIG, NBYTES, 2) == [Put.EXISTS] * N


def test_a_claim_that_is_over_at_an_owner_that_lends_nothing_is_not_published(
    transit: OwningStore,
) -> None:
    assert answers_of(transit)(Publish(1)) == Published(CLAIM_IS_OVER)
    assert isinstance(answers_of(transit)(Greet(0)), Refused)
