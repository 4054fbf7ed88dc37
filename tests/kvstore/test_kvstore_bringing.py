# SPDX-License-Identifier: Apache-2.0
"""Objects of other hosts that take longer to come than a question may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_makers import SIG, config, until
from store_meeting import owning
from store_objects import KEYS, MIB, NBYTES, N, filled, put_all

from kvstore.client.pool import OWN
from kvstore.host.bringing import IN_TIME, Bringing
from kvstore.objects.changes import fingerprint_of
from kvstore.objects.outcomes import Got, Put
from kvstore.owning import OwningStore
from kvstore.rules.tiered_table import PromotionState

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0


class SlowGets:
    """Reads so many objects in time, whatever is asked for. ``others``: owners that are known to
    be faster or slower."""

    def __init__(self, store: OwningStore, in_time: int, bytes_per_s: float) -> None:
        self._gets, self._in_time, self._bytes_per_s = store.gets, in_time, bytes_per_s
        self.others: dict[int, float] = {}
        self.asked: list[int] = []

    def bytes_per_s(self, owner: int) -> float:
        assert owner != OWN
        return self.others.get(owner, self._bytes_per_s)

    def get(self, keys: Any, *more: Any, **named: Any) -> list[Got]:
        self.asked.append(len(keys))
        if len(keys) > self._in_time:
            return [Got.TIMED_OUT] * len(keys)
        return self._gets.get(keys, *more, **named)


@pytest.fixture
def here(directory: Path) -> Iterator[OwningStore]:
    """Has none of the objects; another host has all."""
    with contextlib.ExitStack() as undo:
        first, second = (undo.enter_context(owning(config(directory, 16 * MIB))) for _ in range(2))
        until(lambda: sum(map(bool, first._owners.ranks)) == 2, "they know each other")
        put_all(second)
        until(lambda: len(first._owners) == N, "it knows of the objects")
        yield first


def bringing(store: OwningStore, gets: SlowGets) -> Bringing:
    own = store._owners.own
    assert own is not None
    return Bringing(own, store._owners, gets, 16 * MIB)  # type: ignore[arg-type]


def test_what_does_not_come_in_time_is_not_gone(here: OwningStore) -> None:
    found = bringing(here, SlowGets(here, 0, 0.0)).bring(KEYS, SIG, NBYTES, 0.5)
    assert {one.state for one in found} == {PromotionState.LATER}


def test_over_a_slow_network_as_many_are_read_at_once_as_come_in_time(here: OwningStore) -> None:
    """And those that have come are there when the next question comes."""
    gets = SlowGets(here, N // 2, IN_TIME * N // 2 * NBYTES / TIMEOUT_S)
    found = bringing(here, gets).bring(KEYS, SIG, NBYTES, TIMEOUT_S)
    assert {one.state for one in found} == {PromotionState.HERE}
    assert max(gets.asked) <= N // 2
    assert sum(gets.asked) == N


def test_one_at_least_is_tried(here: OwningStore) -> None:
    gets = SlowGets(here, 1, 1e-9)
    found = bringing(here, gets).bring(KEYS, SIG, NBYTES, TIMEOUT_S)
    assert {one.state for one in found} == {PromotionState.HERE}
    assert gets.asked == [1] * N


def test_an_owner_that_is_slow_holds_up_no_other(directory: Path) -> None:
    """Of one only the first two come in time; of the other all of its four do, in the same read."""
    slow, fast = N - 4, 4
    with contextlib.ExitStack() as undo:
        first, second, third = (
            undo.enter_context(owning(config(directory, 16 * MIB))) for _ in range(3)
        )
        until(lambda: sum(map(bool, first._owners.ranks)) == 3, "they know each other")
        for store, some in ((second, slice(slow)), (third, slice(slow, N))):
            count = len(KEYS[some])
            assert store.put(KEYS[some], SIG, filled(store, count).pieces) == [Put.STORED] * count
        until(lambda: len(first._owners) == N, "it knows of the objects")
        owners = first._owners.look_up(KEYS, fingerprint_of(SIG, NBYTES))["owner"].tolist()
        assert len(set(owners)) == 2
        gets = SlowGets(first, 2 + fast, IN_TIME * 2.5 * NBYTES / TIMEOUT_S)
        gets.others[owners[-1]] = 1e9
        found = bringing(first, gets).bring(KEYS, SIG, NBYTES, TIMEOUT_S)
        assert {one.state for one in found} == {PromotionState.HERE}
        assert gets.asked[0] == 2 + fast
        assert sum(gets.asked) == N
        assert len(gets.asked) <= 1 + (slow - 2)
