# SPDX-License-Identifier: Apache-2.0
"""What becomes of objects on their way down and up, and what others hear of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_makers import SIG, keys

from kvstore._table import Table
from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES, Slab, class_of
from kvstore.objects.changes import BELOW, OWNERS_MAX, PLACE, Found, Records, form_of
from kvstore.objects.headers import HEADER, HEADER_BYTES, LIVE
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import PARTS, Leaving, Ledger
from kvstore.rules.tiered_table import DeepShelf, Lifted, LiftState
from kvstore.tiers.base import Found as LeftBehind

CHUNKS, CHUNK = 3, 4 * UNIT_BYTES
NAMES = keys(10)
FULL_NAMES = [one.tobytes() + SIG for one in NAMES]
ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
SIZES = st.sampled_from([UNIT_BYTES, 2 * UNIT_BYTES])


def shelf_of(leaving_bytes_max: int) -> tuple[DeepShelf, Records, ChangeLog]:
    slab = Slab(CHUNKS * (CHUNK + 4 * HEADER_BYTES) + UNIT_BYTES, CHUNK)
    headers, log = np.zeros(slab.units, HEADER), ChangeLog(10_000)
    shelf = DeepShelf(slab, headers, POLICIES["lru"], log, Ledger(leaving_bytes_max))
    return shelf, headers, log


def store(shelf: DeepShelf, rows: list[int], nbytes: int = UNIT_BYTES) -> None:
    claim = shelf.claim(NAMES[rows], SIG, nbytes, 0.0)
    if claim.slots:
        assert shelf.take_claim(claim.id) is claim
        shelf.publish(claim, [slot + 100 for slot in claim.slots])


def seen(table: Table, nbytes: int) -> Records:
    places = np.zeros(len(NAMES), PLACE)
    table.look_up(NAMES, form_of(SIG, nbytes), b"\1" * OWNERS_MAX, places)
    return places


class Tiered(RuleBasedStateMachine):
    """Objects are stored, evicted, written below, lifted and removed in any order, some of it in
    parallel; a follower of the log knows at any time where each object lies."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf, self.headers, self.log = shelf_of(3 * UNIT_BYTES)
        self.table, self.number = Table(), 0
        #: What the tier has; who writes and who reads at the moment.
        self.tier: dict[bytes, int] = {}
        self.writing: list[Leaving] = []
        self.lifting: list[tuple[bytes, int]] = []

    @rule(rows=ROWS, nbytes=SIZES)
    def put(self, rows: list[int], nbytes: int) -> None:
        store(self.shelf, rows, nbytes)

    @rule(rows=ROWS)
    def touch(self, rows: list[int]) -> None:
        self.shelf.touch(NAMES[rows], SIG)

    @rule(low=st.sampled_from([0.0, 0.3, 0.6]))
    def make_room(self, low: float) -> None:
        self.shelf.make_room(low, low)

    @rule()
    def leave_all(self) -> None:
        self.shelf.leave_all()

    @rule()
    def begin_writing(self) -> None:
        if self.writing:
            return
        unwanted, self.writing = self.shelf.ledger.take(2)
        for name in unwanted:
            self.tier.pop(name, None)
        for one in self.writing:
            found = self.shelf._objects.get(one.name)
            if found is not None and found.slot == one.slot:
                assert self.headers["state"][one.slot] == LIVE, "it can be read meanwhile"

    @rule(works=st.booleans(), victim=st.integers(0, 9))
    def end_writing(self, works: bool, victim: int) -> None:
        for one in self.writing:
            nbytes, _ = self.shelf.content_of(one.slot)
            assert class_of(nbytes) == one.units, "nobody has taken the slot meanwhile"
            if works:
                self.tier[one.name] = nbytes
        written = {one.name for one in self.writing}
        gone = [name for name in FULL_NAMES[victim : victim + 1] if name not in written]
        self.tier = {name: n for name, n in self.tier.items() if name not in gone}
        self.shelf.sunk(gone)
        self.shelf.left(self.writing, [works] * len(self.writing))
        self.writing = []

    @rule(rows=ROWS, nbytes=SIZES)
    def begin_lift(self, rows: list[int], nbytes: int) -> None:
        names = [FULL_NAMES[row] for row in rows]
        dropped = self.shelf.ledger.counts.dropped
        lifted = self.shelf.lift(names, nbytes)
        assert self.shelf.ledger.counts.dropped == dropped, "nothing is lost for what can wait"
        for name, one in zip(names, lifted, strict=True):
            if one.state is LiftState.TAKEN:
                assert name in self.shelf.ledger
                assert self.headers["state"][one.slot] != LIVE
                self.lifting.append((name, nbytes))
            elif one.state is LiftState.HERE:
                assert self.headers["generation"][one.slot] == one.generation

    @rule(works=st.booleans())
    def end_lift(self, works: bool) -> None:
        if not self.lifting:
            return
        (name, nbytes), self.lifting = self.lifting[0], self.lifting[1:]
        reads = works and self.tier.get(name) == nbytes
        if not works:
            self.tier.pop(name, None)
        (found,) = self.shelf.landed([name], nbytes, [7 if reads else None])
        assert found.state in (LiftState.HERE, LiftState.GONE)
        assert (found.state is LiftState.HERE) == (name in self.shelf._objects)

    @rule(rows=ROWS, everything=st.booleans())
    def remove(self, rows: list[int], everything: bool) -> None:
        if everything:
            self.shelf.clear(SIG)
            rows = list(range(len(NAMES)))
        else:
            self.shelf.remove(NAMES[rows], SIG)
        for row in rows:
            assert FULL_NAMES[row] not in self.shelf._objects
            assert FULL_NAMES[row] not in self.shelf.ledger

    @invariant()
    def followers_know_where_everything_lies(self) -> None:
        fresh = self.log.since(self.number, 1 << 20)
        assert fresh is not None
        self.number += len(fresh)
        self.table.apply(1, np.ascontiguousarray(fresh))
        late = Table()
        for part in range(0, self.shelf.parts, 100):  # The first has chunks and others.
            late.apply(1, np.ascontiguousarray(self.shelf.snapshot(part, 100)))
        for nbytes in (UNIT_BYTES, 2 * UNIT_BYTES):
            places = seen(self.table, nbytes)
            assert (places == seen(late, nbytes)).all(), "a snapshot says the same"
            for name, place in zip(FULL_NAMES, places, strict=True):
                self._is_right(name, nbytes, place)

    def _is_right(self, name: bytes, nbytes: int, place: np.void) -> None:
        one = self.shelf._objects.get(name)
        form = form_of(SIG, nbytes)
        if one is not None and one.form == form:
            assert (place["slot"], place["generation"]) == (one.slot, one.generation)
            assert self.headers["state"][one.slot] == LIVE
        elif one is None and self.shelf.ledger.form(name) == form:
            assert (place["found"], place["slot"]) == (Found.HERE, BELOW)
        else:
            assert place["found"] != Found.HERE

    @invariant()
    def what_waits_is_counted(self) -> None:
        ledger = self.shelf.ledger
        for is_kept, counted in ((True, ledger._kept_bytes), (False, ledger._leaving_bytes)):
            some = [one.units for one in ledger.leaving.values() if one.is_kept is is_kept]
            assert sum(some) * UNIT_BYTES == counted
        assert ledger._kept_bytes <= 3 * UNIT_BYTES

    @invariant()
    def no_unit_has_two_uses(self) -> None:
        live = {one.slot: one.units for one in self.shelf._objects.values()}
        held = {one.slot: one.units for one in self.shelf.ledger.leaving.values()}
        for slot in live.keys() & held.keys():
            assert live[slot] == held[slot]
        sizes = {FULL_NAMES.index(name): nbytes for name, nbytes in self.lifting}
        up = {
            slot: class_of(sizes[FULL_NAMES.index(name)])
            for name, slot in self.shelf.ledger.lifting.items()
        }
        assert not up.keys() & (live | held).keys()
        units = [
            unit for slot, count in (live | held | up).items() for unit in range(slot, slot + count)
        ]
        assert len(units) == len(set(units))


TestTiered = pytest.mark.slow(Tiered.TestCase)
TestTiered.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def all_left(shelf: DeepShelf, works: bool = True) -> None:
    _, leaving = shelf.ledger.take(64)
    shelf.left(leaving, [works] * len(leaving))


def test_an_object_with_a_copy_below_goes_at_once() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    store(shelf, [0, 1, 2])
    shelf.leave_all()
    all_left(shelf)
    assert (len(shelf), len(shelf.ledger)) == (0, 3)
    (one,) = shelf.lift(FULL_NAMES[:1], UNIT_BYTES)
    assert one.state is LiftState.TAKEN
    shelf.landed(FULL_NAMES[:1], UNIT_BYTES, [5])
    assert shelf.make_room(1.0, 1.0) == 1
    assert not shelf.ledger.leaving
    assert shelf.ledger.counts.moved_down == 3
    assert shelf.ledger.counts.dropped == 0


def test_an_object_that_is_read_while_it_leaves_stays() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    store(shelf, [0, 1])
    shelf.leave_all()
    shelf.touch(NAMES[:1], SIG)
    all_left(shelf)
    assert list(shelf._objects) == FULL_NAMES[:1]
    assert len(shelf.ledger) == 2


def test_more_than_the_queue_takes_is_dropped_and_counted() -> None:
    shelf, _, _ = shelf_of(2 * UNIT_BYTES)
    store(shelf, list(range(10)))
    assert shelf.make_room(1.0, 1.0) == 8
    assert (len(shelf.ledger.leaving), shelf.ledger.counts.dropped) == (2, 8)
    all_left(shelf, works=False)
    assert (len(shelf), len(shelf.ledger), shelf.ledger.counts.dropped) == (0, 0, 10)


def test_what_stays_takes_no_place_of_those_that_leave() -> None:
    """A reader wants all objects again and again while the tier is slow: none is lost for it."""
    shelf, _, _ = shelf_of(2 * UNIT_BYTES)
    store(shelf, list(range(10)))
    for leaving in (2, 4, 4):
        assert shelf.make_room(0.3, 0.34) == 0, "none goes without a copy"
        assert len(shelf.ledger.leaving) == leaving
        shelf.touch(NAMES, SIG)
    assert shelf.ledger.counts.dropped == 0
    all_left(shelf)
    assert (len(shelf), len(shelf.ledger)) == (8, 4), "no more are kept than may leave"


def test_a_lift_waits_for_the_tier_instead_of_dropping_objects() -> None:
    shelf, _, _ = shelf_of(2 * UNIT_BYTES)
    shelf.adopt_below([LeftBehind(name, UNIT_BYTES) for name in FULL_NAMES[:4]])
    many = keys(12, seed=1)
    claim = shelf.claim(many, SIG, UNIT_BYTES, 0.0)
    assert shelf.take_claim(claim.id) is claim
    shelf.publish(claim, [1] * 12)
    for _ in range(2):
        assert shelf.lift(FULL_NAMES[:4], UNIT_BYTES) == [Lifted(LiftState.LATER)] * 4
    assert (len(shelf), len(shelf.ledger.leaving)) == (12, 4)
    assert shelf.ledger.counts.dropped == 0
    all_left(shelf)
    assert {one.state for one in shelf.lift(FULL_NAMES[:4], UNIT_BYTES)} == {LiftState.TAKEN}


def test_a_lift_drops_no_object_whose_former_one_is_being_written() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    shelf.adopt_below([LeftBehind(name, UNIT_BYTES) for name in FULL_NAMES[2:4]])
    store(shelf, [1])
    shelf.leave_all()
    _, writing = shelf.ledger.take(1)
    shelf.remove(NAMES[1:2], SIG)
    store(shelf, [1])
    claim = shelf.claim(keys(10, seed=1), SIG, UNIT_BYTES, 0.0)
    assert len(claim.slots) == 10, "no slot is free"
    assert shelf.lift(FULL_NAMES[2:4], UNIT_BYTES) == [Lifted(LiftState.LATER)] * 2
    assert FULL_NAMES[1] in shelf._objects
    shelf.left(writing, [True])
    states = [one.state for one in shelf.lift(FULL_NAMES[2:4], UNIT_BYTES)]
    assert states == [LiftState.TAKEN, LiftState.LATER]
    assert FULL_NAMES[1] in shelf._objects, "it is on its way now"


def test_a_tier_that_is_too_slow_costs_old_objects_and_no_new_ones() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    many = keys(13, seed=1)
    claim = shelf.claim(many[:12], SIG, UNIT_BYTES, 0.0)
    assert shelf.take_claim(claim.id) is claim
    shelf.publish(claim, [1] * 12)
    assert shelf.make_room(0.1, 0.1) == 0, "one leaves"
    assert not shelf.claim(many[12:], SIG, UNIT_BYTES, 0.0).slots
    assert shelf.make_room(0.1, 0.1) == 1, "it has not left since: one is dropped"
    assert shelf.ledger.counts.dropped == 1
    assert shelf.claim(many[12:], SIG, UNIT_BYTES, 0.0).slots


def test_what_a_lift_sends_down_does_not_make_the_tier_slow() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    many = keys(14, seed=1)
    store(shelf, [0])
    shelf.leave_all()
    all_left(shelf)
    claim = shelf.claim(many[:12], SIG, UNIT_BYTES, 0.0)
    assert shelf.take_claim(claim.id) is claim
    shelf.publish(claim, [1] * 12)
    assert not shelf.claim(many[12:], SIG, UNIT_BYTES, 0.0).slots
    assert shelf.lift(FULL_NAMES[:1], UNIT_BYTES) == [Lifted(LiftState.LATER)]
    assert len(shelf.ledger.leaving) == 1, "for the lift"
    assert shelf.make_room(0.0, 0.0) == 0
    assert shelf.ledger.counts.dropped == 0, "the tier has had no time to write it"
    all_left(shelf)
    assert shelf.lift(FULL_NAMES[:1], UNIT_BYTES)[0].state is LiftState.TAKEN


def test_two_who_lift_one_object_get_one_slot() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    store(shelf, [0])
    shelf.leave_all()
    all_left(shelf)
    (first,) = shelf.lift(FULL_NAMES[:1], UNIT_BYTES)
    assert shelf.lift(FULL_NAMES[:1], UNIT_BYTES) == [Lifted(LiftState.LATER)]
    landed = shelf.landed(FULL_NAMES[:1], UNIT_BYTES, [5])
    assert landed == shelf.lift(FULL_NAMES[:1], UNIT_BYTES)
    assert landed[0].slot == first.slot
    assert shelf.lift(FULL_NAMES[1:2], UNIT_BYTES) == [Lifted(LiftState.GONE)]
    assert shelf.lift(FULL_NAMES[:1], UNIT_BYTES + 1) == [Lifted(LiftState.GONE)]


def test_what_is_removed_while_it_is_lifted_does_not_come_back() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    store(shelf, [0, 1])
    shelf.leave_all()
    all_left(shelf)
    free = shelf.slab.free_slots(1)
    shelf.lift(FULL_NAMES[:2], UNIT_BYTES)
    shelf.remove(NAMES[:1], SIG)
    shelf.sunk(FULL_NAMES[1:2])  # The tier needed its place.
    assert shelf.landed(FULL_NAMES[:2], UNIT_BYTES, [5, 6]) == [Lifted(LiftState.GONE)] * 2
    assert len(shelf) == 0
    assert shelf.slab.free_slots(1) == free, "the slots are free again"


def test_what_is_removed_while_it_is_written_is_forgotten_below() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    store(shelf, [0, 1])
    free = shelf.slab.free_slots(1)
    shelf.leave_all()
    _, leaving = shelf.ledger.take(64)
    shelf.remove(NAMES[:2], SIG)
    assert shelf.slab.free_slots(1) == free, "the tier still reads the slots"
    shelf.left(leaving, [True, False])
    assert shelf.slab.free_slots(1) == free + 2
    assert len(shelf.ledger) == 0
    assert shelf.ledger.take(64) == (FULL_NAMES[:1], []), "the other one was not written"


def test_a_class_without_memory_gets_some_to_lift_to() -> None:
    shelf, _, _ = shelf_of(1 << 20)
    shelf.adopt_below([LeftBehind(FULL_NAMES[9], 4 * UNIT_BYTES)])
    store(shelf, list(range(9)))
    extra = shelf.claim(keys(3, seed=1), SIG, UNIT_BYTES, 0.0)
    assert len(extra.slots) == 3
    assert shelf.lift(FULL_NAMES[9:], 4 * UNIT_BYTES) == [Lifted(LiftState.LATER)]
    shelf.make_room(0.0, 0.0)
    all_left(shelf)
    assert shelf.lift(FULL_NAMES[9:], 4 * UNIT_BYTES)[0].state is LiftState.TAKEN


def test_a_shelf_without_a_tier_has_no_parts_for_it() -> None:
    shelf, _, _ = shelf_of(0)
    assert shelf.parts == CHUNKS
    assert shelf_of(1)[0].parts == CHUNKS + PARTS
    store(shelf, [0])
    shelf.leave_all()
    assert not shelf.ledger.leaving
    assert shelf.make_room(1.0, 1.0) == 1
    assert shelf.ledger.counts.dropped == 0


def test_what_is_too_large_for_the_memory_stays_below_unseen() -> None:
    shelf, _, log = shelf_of(1 << 20)
    left = [LeftBehind(FULL_NAMES[0], CHUNK + 1), LeftBehind(FULL_NAMES[1], CHUNK)]
    assert shelf.adopt_below(left) == 1
    assert len(log) == 1
    assert shelf.lift(FULL_NAMES[:1], CHUNK + 1) == [Lifted(LiftState.GONE)]
