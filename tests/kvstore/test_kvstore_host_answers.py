# SPDX-License-Identifier: Apache-2.0
"""What the owner of a host does for its users while others change what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_makers import SIG, Room, config, keys, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, filled, put_all, sees

from kvstore.client.pool import OWN
from kvstore.client.writing import OUTCOMES
from kvstore.host.answers import PoolAnswers
from kvstore.host.bringing import Bringing
from kvstore.objects.changes import Keys, fingerprint_of
from kvstore.objects.outcomes import Got, Put, Removed
from kvstore.owner.claims import CLAIM_IS_OVER
from kvstore.owner.owner import Owner
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
from kvstore.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def here(directory: Path) -> Iterator[Store]:
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


def answers_of(store: Store) -> PoolAnswers:
    pool, memory, own = store._owners, store._config.memory, owner_of(store)
    parts = (own, pool, store._memory, store.gets, store._copier, memory)
    return PoolAnswers(*parts, store.status, store.teller, lends=store._lends)


def copy_to_two(store: Store) -> None:
    assert answers_of(store)(Copy(KEYS.tobytes(), SIG, NBYTES, 2)) == Done()


@pytest.mark.parametrize("step", ["holds", "bring", "look_up"])
def test_slots_that_get_other_objects_are_not_copied_as_the_former_ones(
    here: Store, other: Store, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """They change behind that the owner knows which objects it has, behind that it knows where
    they lie, and behind that they were copied."""
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "they know each other")
    room, own = put_all(here), owner_of(here)
    later, names = filled(here, seed=3), keys(N, 3)
    slots = {slot for slot, _ in own.places(KEYS, SIG, NBYTES)[1]}

    def change() -> None:
        monkeypatch.undo()
        own.remove(KEYS, SIG)
        assert own.take(names, SIG, later.pieces) == [Verdict.GRANTED] * N

    what: Any = {"holds": own, "bring": own._copier, "look_up": here._owners}[step]
    former = getattr(what, step)

    def hooked(*args: Any, **more: Any) -> Any:
        if step == "bring":
            change()
            return former(*args, **more)
        result = former(*args, **more)
        change()
        return result

    monkeypatch.setattr(what, step, hooked)
    copy_to_two(here)
    assert slots == {slot for slot, _ in own.places(names, SIG, NBYTES)[1]}, "they have changed"
    back = Room(other, N, NBYTES)
    was_copied = step == "look_up"

    def found() -> int:
        return other.get(KEYS, SIG, back.pieces).count(Got.RIGHT)

    if was_copied:  # One copy was missing, so they may be at their former owner again alone.
        until(lambda: found() == N, "the owner's announcements")
    else:
        assert not found()
    assert (back.bytes == room.bytes).all() == was_copied


def test_copies_are_those_that_lie_in_memory(here: Store, other: Store) -> None:
    until(lambda: sum(map(bool, here._owners.ranks)) == 2, "they know each other")
    room = put_all(here)
    own = owner_of(here)
    own.remove(KEYS[:3], SIG)
    copy_to_two(here)
    fingerprint = fingerprint_of(SIG, NBYTES)
    until(lambda: (here._owners.look_up(KEYS[3:], fingerprint)["copies"] == 2).all())
    own.remove(KEYS, SIG)
    back = Room(other, N, NBYTES)
    assert other.get(KEYS, SIG, back.pieces) == [Got.MISSING] * 3 + [Got.RIGHT] * (N - 3)
    assert (back.bytes[3:] == room.bytes[3:]).all()


def test_a_copy_of_objects_of_a_size_that_there_is_not_does_nothing(here: Store) -> None:
    put_all(here)
    for nbytes in (NBYTES + 1, 1 << 62):
        assert answers_of(here)(Copy(KEYS.tobytes(), SIG, nbytes, 2)) == Done()
    assert here.put(KEYS, SIG, filled(here).pieces) == [Put.EXISTS] * N


@pytest.mark.parametrize("is_all", [False, True])
def test_what_is_removed_while_it_is_read_does_not_come_back(
    here: Store, other: Store, monkeypatch: pytest.MonkeyPatch, is_all: bool
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
    assert here.put(KEYS, SIG, filled(here).pieces) == [Put.STORED] * N


def test_what_others_have_not_removed_yet_is_not_read_from_them(here: Store, other: Store) -> None:
    """Who removes has asked this owner, and not the other one yet."""
    put_all(other)
    sees(here)
    owner_of(here).remove(KEYS[:3], SIG)
    assert _promoted(here, KEYS[:3]) == {PromotionState.GONE}
    assert _promoted(here, KEYS[3:]) == {PromotionState.HERE}
    owner_of(here).clear(SIG)
    assert _promoted(here) == {PromotionState.GONE}


def test_what_comes_behind_the_first_look_is_found(
    here: Store, monkeypatch: pytest.MonkeyPatch
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
    here: Store, other: Store, monkeypatch: pytest.MonkeyPatch
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


def _promoted(store: Store, names: Keys = KEYS) -> set[PromotionState]:
    answer = answers_of(store)(Promote(names.tobytes(), SIG, NBYTES, 60_000))
    assert isinstance(answer, InMemory)
    return set(map(PromotionState, answer.states))


def test_of_each_object_in_transit_it_is_told_whether_it_was_stored(
    directory: Path, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that no other host takes cost the others nothing."""
    outcomes = [Put.STORED, Put.EXISTS, Put.NO_SPACE, Put.FAILED, Put.TIMED_OUT, Put.UNREACHABLE]
    names = keys(len(outcomes))
    with owning(config(directory, 8 * MIB), lends=False) as store:
        answers, room = answers_of(store), filled(store, len(outcomes))
        monkeypatch.setattr(answers._copies, "copy", lambda *_: outcomes)
        stored = answers.take(Take(names.tobytes(), SIG, NBYTES), room.bytes.ctypes.data)
        assert isinstance(stored, Stored)
        said = [OUTCOMES.get(Verdict(one), Put.STORED) for one in stored.verdicts]
        assert said == [Put.STORED, *outcomes[1:3], *[Put.UNREACHABLE] * 3]
        writer = Claim(keys(6, 1).tobytes(), SIG, NBYTES, store._memory.engine.id, 1)
        claimed = answers(writer)
        assert isinstance(claimed, Granted)
        arrived = lambda held, _: ("", held.claim)  # noqa: E731
        monkeypatch.setattr(owner_of(store), "end_publishing", arrived)
        published = answers(Publish(claimed.claim_id))
        assert isinstance(published, Published)
        assert published.verdicts == stored.verdicts


def test_a_claim_that_is_over_at_an_owner_that_lends_nothing_is_not_published(
    directory: Path,
) -> None:
    with owning(config(directory, 8 * MIB), lends=False) as store:
        assert answers_of(store)(Publish(1)) == Published(CLAIM_IS_OVER)
        assert isinstance(answers_of(store)(Greet(0)), Refused)
