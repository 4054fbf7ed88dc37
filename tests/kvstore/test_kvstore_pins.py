# SPDX-License-Identifier: Apache-2.0
"""Objects that are pinned: not evicted, for a time, within a bound."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_far import Far
from store_makers import SIG, Room, config, contents, deaf, impatient, keys, until
from store_meeting import owning

from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES, Slab
from kvstore.objects.headers import HEADER, HEADER_BYTES
from kvstore.objects.outcomes import Pinned, Put
from kvstore.owner.card import OwnerStats
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger
from kvstore.rules.pinned_table import PinnedTable
from kvstore.rules.stored_objects import TableParts
from kvstore.store import Store

CHUNK_UNITS = 8
CHUNK = CHUNK_UNITS * UNIT_BYTES
NAMES = keys(24)
MIB = 1 << 20


def table_of(chunks: int, policy: str = "lru") -> PinnedTable:
    slab = Slab(chunks * (CHUNK + CHUNK_UNITS * HEADER_BYTES) + UNIT_BYTES, CHUNK)
    headers = np.zeros(slab.units, HEADER)
    return PinnedTable(TableParts(slab, headers, POLICIES[policy], ChangeLog(1000), Ledger(0)))


def store(table: PinnedTable, rows: list[int], units: int = 1) -> None:
    claim = table.claim(NAMES[rows], SIG, units * UNIT_BYTES, 0.0)
    if claim.slots:
        assert table.take_claim(claim.id) is claim
        table.publish(claim, [0] * len(claim.slots))


class PinnedObjects(RuleBasedStateMachine):
    """Pins of several clients, of whom each has a time, while others store and are evicted."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(3, self.policy)
        self.now_s = 0.0
        #: By row: how many pins, and until when.
        self.pins: dict[int, tuple[int, float]] = {}

    def here(self, row: int) -> bool:
        return NAMES[row].tobytes() + SIG in self.table._objects

    @rule(
        rows=st.lists(st.integers(0, 23), min_size=1, max_size=8, unique=True),
        units=st.sampled_from([1, 2, 3, 8]),
    )
    def store(self, rows: list[int], units: int) -> None:
        store(self.table, rows, units)

    @rule(
        rows=st.lists(st.integers(0, 23), min_size=1, max_size=4, unique=True),
        ttl=st.integers(1, 5),
    )
    def pin(self, rows: list[int], ttl: int) -> None:
        answers, why = self.table.pin(NAMES[rows], SIG, self.now_s + ttl)
        assert bool(why) == (Pinned.REFUSED in answers)
        for row, one in zip(rows, answers, strict=True):
            assert (one is Pinned.MISSING) == (not self.here(row))
            if one is Pinned.PINNED:
                count, until_s = self.pins.get(row, (0, 0.0))
                self.pins[row] = count + 1, max(until_s, self.now_s + ttl)
            else:
                assert one is Pinned.MISSING or row not in self.pins, "who has one gets more"

    @rule(rows=st.lists(st.integers(0, 23), min_size=1, max_size=4, unique=True))
    def unpin(self, rows: list[int]) -> None:
        self.table.unpin(NAMES[rows], SIG)
        for row in rows:
            if row in self.pins:
                count, until_s = self.pins.pop(row)
                if count > 1:
                    self.pins[row] = count - 1, until_s

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds
        over = [row for row, (_, until_s) in self.pins.items() if until_s <= self.now_s]
        assert self.table.unpin_overdue(self.now_s) == len(over)
        for row in over:
            del self.pins[row]

    @rule(rows=st.lists(st.integers(0, 23), min_size=1, max_size=4))
    def remove(self, rows: list[int]) -> None:
        self.table.remove(NAMES[rows], SIG)
        for row in rows:
            self.pins.pop(row, None)

    @rule(rows=st.lists(st.integers(0, 23), max_size=6))
    def touch(self, rows: list[int]) -> None:
        self.table.touch(NAMES[rows], SIG)

    @rule(part=st.sampled_from([0.1, 0.5, 1.0]))
    def make_room(self, part: float) -> None:
        self.table.make_room(part, part)

    @invariant()
    def what_is_pinned_is_here(self) -> None:
        assert all(self.here(row) for row in self.pins)
        assert len(self.table.pins) == len(self.pins)
        units = [self.table._objects[name].units for name in self.table.pins]
        assert sum(units) == self.table.pins.units <= self.table.slab.units // 2

    @invariant()
    def policies_have_each_object_once(self) -> None:
        assert sum(map(len, self.table._policies.values())) == len(self.table)

    def teardown(self) -> None:
        self.table.unpin_overdue(1e9)
        assert not len(self.table.pins)
        self.table.make_room(1.0, 1.0)
        assert not len(self.table), "all can be evicted again"


class PinnedObjectsByArc(PinnedObjects):
    policy = "arc"


TestPinnedObjects = pytest.mark.slow(PinnedObjects.TestCase)
TestPinnedObjectsByArc = pytest.mark.slow(PinnedObjectsByArc.TestCase)


def test_a_chunk_with_a_pinned_object_is_not_emptied_for_another_class() -> None:
    table = table_of(2)
    store(table, list(range(16)))
    assert table.pin(NAMES[[0, 8]], SIG, 1.0)[0] == [Pinned.PINNED] * 2
    assert table.claim(NAMES[[20]], SIG, CHUNK, 0.0).slots == []
    table.make_room(0.0, 0.0)
    assert all(NAMES[row].tobytes() + SIG in table._objects for row in (0, 8))
    table.unpin(NAMES[[8]], SIG)
    assert table.claim(NAMES[[20]], SIG, CHUNK, 0.0).slots == []
    table.make_room(0.0, 0.0)
    assert table.claim(NAMES[[20]], SIG, CHUNK, 0.0).slots, "the other chunk went"
    assert NAMES[0].tobytes() + SIG in table._objects


@pytest.mark.parametrize("by_message", [False, True])
def test_pins_of_a_store(
    directory: Path, caplog: pytest.LogCaptureFixture, by_message: bool
) -> None:
    """In this process's own memory, and in another's: what is pinned outlasts all others."""
    count, nbytes = 8, 1 << 18
    with owning(config(directory, 8 * MIB)) as owner, owning(config(directory)) as guest:
        who = guest if by_message else owner
        room = Room(who, count, nbytes)
        room.bytes[:] = contents(count, nbytes)
        until(lambda: bool(who._owners.usable()), "the owner is known")
        assert who.put(NAMES[:count], SIG, room.pieces) == [Put.STORED] * count
        until(lambda: who.exists(NAMES[:count], SIG, nbytes).all(), "they are announced")
        assert who.pin(NAMES[:count], SIG, 3600.0) == [Pinned.PINNED] * count
        assert who.pin(keys(1, 9), SIG, 1.0) == [Pinned.MISSING]
        assert pinned(owner) == count

        def fill(seed: int) -> list[Put]:
            return who.put(keys(count, seed), SIG, room.pieces)

        evicted = owned(owner).evicted
        for seed in range(100, 140):
            fill(seed)
        until(lambda: fill(141) and owned(owner).evicted > evicted + count, "others were evicted")
        assert who.exists(NAMES[:count], SIG, nbytes).all()
        until(lambda: set(fill(142)) <= {Put.STORED, Put.EXISTS}, "there is room for others")
        more = keys(count, 142)
        until(lambda: who.exists(more, SIG, nbytes).all(), "they are announced")
        refused = who.pin(more, SIG, 3600.0)
        assert Pinned.REFUSED in refused
        assert "an owner's pins take" in caplog.text
        who.unpin(more, SIG)
        who.unpin(NAMES[:count], SIG)
        until(lambda: pinned(owner) == 0, "no pin is left")
        assert who.pin(NAMES[:count], SIG, 0.01) == [Pinned.PINNED] * count
        until(lambda: pinned(owner) == 0, "their time is over")
        seeds = iter(range(1000, 100_000))

        def gone() -> bool:
            fill(next(seeds))
            return not who.exists(NAMES[:count], SIG, nbytes).any()

        until(gone, "they are evicted as all others")


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), 1e6])
def test_times_are_checked(directory: Path, ttl_s: float) -> None:
    with (
        owning(config(directory)) as alone,
        pytest.raises(ValueError, match=r"must be between 0\.001 and 86400 seconds"),
    ):
        alone.pin(NAMES, SIG, ttl_s)


@pytest.mark.slow
def test_an_owner_that_does_not_answer_pins_nothing_and_tells_no_size(
    directory: Path, start_far: Callable[..., Far], caplog: pytest.LogCaptureFixture
) -> None:
    count, nbytes = 4, 20_000
    far = start_far(8 * MIB, count, nbytes)
    with owning(config(directory)) as guest:
        some = keys(count)
        until(lambda: guest.exists(some, SIG, nbytes).all(), "the owner is followed")
        until(lambda: guest.pin(some, SIG, 60.0) == [Pinned.PINNED] * count, "it answers")
        with deaf(guest), impatient(guest):
            far.signal(signal.SIGSTOP)
            assert guest.pin(some, SIG, 1.0) == [Pinned.MISSING] * count
            assert "not all objects were pinned" in caplog.text
            guest.unpin(some, SIG)
            assert "objects were not unpinned" in caplog.text
            assert not guest.sizes(some, SIG).any()
            assert "sizes of objects are not known" in caplog.text
            far.signal(signal.SIGCONT)


def owned(store: Store) -> OwnerStats:
    own = store.status().own
    assert own is not None
    return own


def pinned(store: Store) -> int:
    return owned(store).pinned
