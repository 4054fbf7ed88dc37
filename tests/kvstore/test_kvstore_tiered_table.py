# SPDX-License-Identifier: Apache-2.0
"""What becomes of objects that are demoted and promoted, and what others hear of it."""

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
from kvstore.objects.changes import LOWER_TIER, OWNERS_MAX, PLACE, Found, Records, fingerprint_of
from kvstore.objects.headers import HEADER, HEADER_BYTES, LIVE
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import PARTS, Demoting, Ledger
from kvstore.rules.object_table import Verdict
from kvstore.rules.stored_objects import TableParts
from kvstore.rules.tiered_table import Promoted, PromotionState, TieredTable
from kvstore.tiers.base import Found as LeftBehind

CHUNKS, CHUNK = 3, 4 * UNIT_BYTES
NAMES = keys(10)
FULL_NAMES = [one.tobytes() + SIG for one in NAMES]
ROWS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
SIZES = st.sampled_from([UNIT_BYTES, 2 * UNIT_BYTES])


def table_of(demoting_bytes_max: int) -> tuple[TieredTable, Records, ChangeLog]:
    slab = Slab(CHUNKS * (CHUNK + 4 * HEADER_BYTES) + UNIT_BYTES, CHUNK)
    headers, log = np.zeros(slab.units, HEADER), ChangeLog(10_000)
    table = TieredTable(TableParts(slab, headers, POLICIES["lru"], log, Ledger(demoting_bytes_max)))
    return table, headers, log


def store(table: TieredTable, rows: list[int], nbytes: int = UNIT_BYTES) -> None:
    claim = table.claim(NAMES[rows], SIG, nbytes, 0.0)
    if claim.slots:
        assert table.take_claim(claim.id) is claim
        table.publish(claim, [slot + 100 for slot in claim.slots])


def seen(table: Table, nbytes: int) -> Records:
    places = np.zeros(len(NAMES), PLACE)
    table.look_up(NAMES, fingerprint_of(SIG, nbytes), b"\1" * OWNERS_MAX, places)
    return places


class Tiered(RuleBasedStateMachine):
    """Objects are stored, evicted, demoted, promoted and removed in any order, some of it in
    parallel; a follower of the log knows at any time where each object lies."""

    def __init__(self) -> None:
        super().__init__()
        self.objects, self.headers, self.log = table_of(3 * UNIT_BYTES)
        self.table, self.number = Table(), 0
        #: What the tier has; who writes and who reads at the moment.
        self.tier: dict[bytes, int] = {}
        self.writing: list[Demoting] = []
        self.promoting: list[tuple[bytes, int]] = []

    @rule(rows=ROWS, nbytes=SIZES)
    def put(self, rows: list[int], nbytes: int) -> None:
        store(self.objects, rows, nbytes)

    @rule(rows=ROWS)
    def touch(self, rows: list[int]) -> None:
        self.objects.touch(NAMES[rows], SIG)

    @rule(low=st.sampled_from([0.0, 0.3, 0.6]))
    def make_room(self, low: float) -> None:
        self.objects.make_room(low, low)

    @rule()
    def demote_all(self) -> None:
        self.objects.demote_all()

    @rule()
    def begin_writing(self) -> None:
        if self.writing:
            return
        unwanted, self.writing = self.objects.ledger.take(2)
        for name in unwanted:
            self.tier.pop(name, None)
        for one in self.writing:
            found = self.objects._objects.get(one.name)
            if found is not None and found.slot == one.slot:
                assert self.headers["state"][one.slot] == LIVE, "it can be read meanwhile"

    @rule(works=st.booleans(), victim=st.integers(0, 9))
    def end_writing(self, works: bool, victim: int) -> None:
        for one in self.writing:
            nbytes, _ = self.objects.content_of(one.slot)
            assert class_of(nbytes) == one.units, "nobody has taken the slot meanwhile"
            if works:
                self.tier[one.name] = nbytes
        written = {one.name for one in self.writing}
        gone = [name for name in FULL_NAMES[victim : victim + 1] if name not in written]
        self.tier = {name: n for name, n in self.tier.items() if name not in gone}
        self.objects.gone_from_tier(gone)
        self.objects.demoted(self.writing, [works] * len(self.writing))
        self.writing = []

    @rule(rows=ROWS, nbytes=SIZES)
    def begin_promotion(self, rows: list[int], nbytes: int) -> None:
        names = [FULL_NAMES[row] for row in rows]
        dropped = self.objects.ledger.counts.dropped
        promoted = self.objects.promote(names, nbytes)
        assert self.objects.ledger.counts.dropped == dropped, "nothing is lost for what can wait"
        for name, one in zip(names, promoted, strict=True):
            if one.state is PromotionState.TAKEN:
                assert name in self.objects.ledger
                assert self.headers["state"][one.slot] != LIVE
                self.promoting.append((name, nbytes))
            elif one.state is PromotionState.HERE:
                assert self.headers["generation"][one.slot] == one.generation

    @rule(works=st.booleans())
    def end_promotion(self, works: bool) -> None:
        if not self.promoting:
            return
        (name, nbytes), self.promoting = self.promoting[0], self.promoting[1:]
        reads = works and self.tier.get(name) == nbytes
        if not works:
            self.tier.pop(name, None)
        (found,) = self.objects.landed([name], nbytes, [7 if reads else None])
        assert found.state in (PromotionState.HERE, PromotionState.GONE)
        assert (found.state is PromotionState.HERE) == (name in self.objects._objects)

    @rule(rows=ROWS, everything=st.booleans())
    def remove(self, rows: list[int], everything: bool) -> None:
        if everything:
            self.objects.clear(SIG)
            rows = list(range(len(NAMES)))
        else:
            self.objects.remove(NAMES[rows], SIG)
        for row in rows:
            assert FULL_NAMES[row] not in self.objects._objects
            assert FULL_NAMES[row] not in self.objects.ledger

    @invariant()
    def followers_know_where_everything_lies(self) -> None:
        fresh = self.log.since(self.number, 1 << 20)
        assert fresh is not None
        self.number += len(fresh)
        self.table.apply(1, np.ascontiguousarray(fresh))
        late = Table()
        for part in range(0, self.objects.parts, 100):  # The first has chunks and others.
            late.apply(1, np.ascontiguousarray(self.objects.snapshot(part, 100)))
        for nbytes in (UNIT_BYTES, 2 * UNIT_BYTES):
            places = seen(self.table, nbytes)
            assert (places == seen(late, nbytes)).all(), "a snapshot says the same"
            for name, place in zip(FULL_NAMES, places, strict=True):
                self._is_right(name, nbytes, place)

    def _is_right(self, name: bytes, nbytes: int, place: np.void) -> None:
        one = self.objects._objects.get(name)
        fingerprint = fingerprint_of(SIG, nbytes)
        if one is not None and one.fingerprint == fingerprint:
            assert (place["slot"], place["generation"]) == (one.slot, one.generation)
            assert self.headers["state"][one.slot] == LIVE
        elif one is None and self.objects.ledger.nbytes(name) == nbytes:
            assert (place["found"], place["slot"]) == (Found.HERE, LOWER_TIER)
        else:
            assert place["found"] != Found.HERE

    @invariant()
    def what_waits_is_counted(self) -> None:
        ledger = self.objects.ledger
        for is_kept, counted in ((True, ledger._kept_bytes), (False, ledger._demoting_bytes)):
            some = [one.units for one in ledger.demoting.values() if one.is_kept is is_kept]
            assert sum(some) * UNIT_BYTES == counted
        assert ledger._kept_bytes <= 3 * UNIT_BYTES

    @invariant()
    def no_unit_has_two_uses(self) -> None:
        live = {one.slot: one.units for one in self.objects._objects.values()}
        held = {one.slot: one.units for one in self.objects.ledger.demoting.values()}
        for slot in live.keys() & held.keys():
            assert live[slot] == held[slot]
        sizes = {FULL_NAMES.index(name): nbytes for name, nbytes in self.promoting}
        up = {
            slot: class_of(sizes[FULL_NAMES.index(name)])
            for name, slot in self.objects.ledger.promoting.items()
        }
        assert not up.keys() & (live | held).keys()
        units = [
            unit for slot, count in (live | held | up).items() for unit in range(slot, slot + count)
        ]
        assert len(units) == len(set(units))


TestTiered = pytest.mark.slow(Tiered.TestCase)
TestTiered.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def all_left(table: TieredTable, works: bool = True) -> None:
    _, demoting = table.ledger.take(64)
    table.demoted(demoting, [works] * len(demoting))


def test_an_object_with_a_copy_below_goes_at_once() -> None:
    table, _, _ = table_of(1 << 20)
    store(table, [0, 1, 2])
    table.demote_all()
    all_left(table)
    assert (len(table), len(table.ledger)) == (0, 3)
    (one,) = table.promote(FULL_NAMES[:1], UNIT_BYTES)
    assert one.state is PromotionState.TAKEN
    table.landed(FULL_NAMES[:1], UNIT_BYTES, [5])
    assert table.make_room(1.0, 1.0) == 1
    assert not table.ledger.demoting
    assert table.ledger.counts.demoted == 3
    assert table.ledger.counts.dropped == 0


def test_an_object_that_is_read_while_it_leaves_stays() -> None:
    table, _, _ = table_of(1 << 20)
    store(table, [0, 1])
    table.demote_all()
    table.touch(NAMES[:1], SIG)
    all_left(table)
    assert list(table._objects) == FULL_NAMES[:1]
    assert len(table.ledger) == 2


def test_more_than_the_queue_takes_is_dropped_and_counted() -> None:
    table, _, _ = table_of(2 * UNIT_BYTES)
    store(table, list(range(10)))
    assert table.make_room(1.0, 1.0) == 8
    assert (len(table.ledger.demoting), table.ledger.counts.dropped) == (2, 8)
    all_left(table, works=False)
    assert (len(table), len(table.ledger), table.ledger.counts.dropped) == (0, 0, 10)


def test_what_stays_takes_no_place_of_those_that_leave() -> None:
    """A reader wants all objects again and again while the tier is slow: none is lost for it."""
    table, _, _ = table_of(2 * UNIT_BYTES)
    store(table, list(range(10)))
    for demoting in (2, 4, 4):
        assert table.make_room(0.3, 0.34) == 0, "none goes without a copy"
        assert len(table.ledger.demoting) == demoting
        table.touch(NAMES, SIG)
    assert table.ledger.counts.dropped == 0
    all_left(table)
    assert (len(table), len(table.ledger)) == (8, 4), "no more are kept than may leave"


def test_a_promotion_waits_for_the_tier_instead_of_dropping_objects() -> None:
    table, _, _ = table_of(2 * UNIT_BYTES)
    table.adopt_lower_tier([LeftBehind(name, UNIT_BYTES) for name in FULL_NAMES[:4]])
    many = keys(12, seed=1)
    claim = table.claim(many, SIG, UNIT_BYTES, 0.0)
    assert table.take_claim(claim.id) is claim
    table.publish(claim, [1] * 12)
    for _ in range(2):
        assert table.promote(FULL_NAMES[:4], UNIT_BYTES) == [Promoted(PromotionState.LATER)] * 4
    assert (len(table), len(table.ledger.demoting)) == (12, 4)
    assert table.ledger.counts.dropped == 0
    all_left(table)
    assert {one.state for one in table.promote(FULL_NAMES[:4], UNIT_BYTES)} == {
        PromotionState.TAKEN
    }


def test_a_promotion_drops_no_object_whose_former_one_is_being_written() -> None:
    table, _, _ = table_of(1 << 20)
    table.adopt_lower_tier([LeftBehind(name, UNIT_BYTES) for name in FULL_NAMES[2:4]])
    store(table, [1])
    table.demote_all()
    _, writing = table.ledger.take(1)
    table.remove(NAMES[1:2], SIG)
    store(table, [1])
    claim = table.claim(keys(10, seed=1), SIG, UNIT_BYTES, 0.0)
    assert len(claim.slots) == 10, "no slot is free"
    assert table.promote(FULL_NAMES[2:4], UNIT_BYTES) == [Promoted(PromotionState.LATER)] * 2
    assert FULL_NAMES[1] in table._objects
    table.demoted(writing, [True])
    states = [one.state for one in table.promote(FULL_NAMES[2:4], UNIT_BYTES)]
    assert states == [PromotionState.TAKEN, PromotionState.LATER]
    assert FULL_NAMES[1] in table._objects, "it is on its way now"


def test_a_tier_that_is_too_slow_costs_old_objects_and_no_new_ones() -> None:
    table, _, _ = table_of(1 << 20)
    many = keys(13, seed=1)
    claim = table.claim(many[:12], SIG, UNIT_BYTES, 0.0)
    assert table.take_claim(claim.id) is claim
    table.publish(claim, [1] * 12)
    assert table.make_room(0.1, 0.1) == 0, "one leaves"
    assert not table.claim(many[12:], SIG, UNIT_BYTES, 0.0).slots
    assert table.make_room(0.1, 0.1) == 1, "it has not left since: one is dropped"
    assert table.ledger.counts.dropped == 1
    assert table.claim(many[12:], SIG, UNIT_BYTES, 0.0).slots


def test_what_a_promotion_sends_down_does_not_make_the_tier_slow() -> None:
    table, _, _ = table_of(1 << 20)
    many = keys(14, seed=1)
    store(table, [0])
    table.demote_all()
    all_left(table)
    claim = table.claim(many[:12], SIG, UNIT_BYTES, 0.0)
    assert table.take_claim(claim.id) is claim
    table.publish(claim, [1] * 12)
    assert table.promote(FULL_NAMES[:1], UNIT_BYTES) == [Promoted(PromotionState.LATER)]
    assert len(table.ledger.demoting) == 1, "for the promotion"
    assert not table.claim(many[12:], SIG, UNIT_BYTES, 0.0).slots
    assert table.make_room(0.0, 0.0) == 0
    assert table.ledger.counts.dropped == 0, "the tier has had no time to write it"
    all_left(table)
    assert table.promote(FULL_NAMES[:1], UNIT_BYTES)[0].state is PromotionState.TAKEN


def test_two_who_promote_one_object_get_one_slot() -> None:
    table, _, _ = table_of(1 << 20)
    store(table, [0])
    table.demote_all()
    all_left(table)
    (first,) = table.promote(FULL_NAMES[:1], UNIT_BYTES)
    assert table.promote(FULL_NAMES[:1], UNIT_BYTES) == [Promoted(PromotionState.LATER)]
    landed = table.landed(FULL_NAMES[:1], UNIT_BYTES, [5])
    assert landed == table.promote(FULL_NAMES[:1], UNIT_BYTES)
    assert landed[0].slot == first.slot
    assert table.promote(FULL_NAMES[1:2], UNIT_BYTES) == [Promoted(PromotionState.GONE)]
    assert table.promote(FULL_NAMES[:1], UNIT_BYTES + 1) == [Promoted(PromotionState.GONE)]


def test_what_is_removed_while_it_is_promoted_does_not_come_back() -> None:
    table, _, _ = table_of(1 << 20)
    store(table, [0, 1])
    table.demote_all()
    all_left(table)
    free = table.slab.free_slots(1)
    table.promote(FULL_NAMES[:2], UNIT_BYTES)
    table.remove(NAMES[:1], SIG)
    table.gone_from_tier(FULL_NAMES[1:2])  # The tier needed its place.
    assert table.landed(FULL_NAMES[:2], UNIT_BYTES, [5, 6]) == [Promoted(PromotionState.GONE)] * 2
    assert len(table) == 0
    assert table.slab.free_slots(1) == free, "the slots are free again"


def test_what_is_removed_while_it_is_written_is_forgotten_below() -> None:
    table, _, _ = table_of(1 << 20)
    store(table, [0, 1])
    free = table.slab.free_slots(1)
    table.demote_all()
    _, demoting = table.ledger.take(64)
    table.remove(NAMES[:2], SIG)
    assert table.slab.free_slots(1) == free, "the tier still reads the slots"
    table.demoted(demoting, [True, False])
    assert table.slab.free_slots(1) == free + 2
    assert len(table.ledger) == 0
    assert table.ledger.take(64) == (FULL_NAMES[:1], []), "the other one was not written"


def test_a_class_without_memory_gets_some_to_promotion_to() -> None:
    table, _, _ = table_of(1 << 20)
    table.adopt_lower_tier([LeftBehind(FULL_NAMES[9], 4 * UNIT_BYTES)])
    store(table, list(range(9)))
    extra = table.claim(keys(3, seed=1), SIG, UNIT_BYTES, 0.0)
    assert len(extra.slots) == 3
    assert table.promote(FULL_NAMES[9:], 4 * UNIT_BYTES) == [Promoted(PromotionState.LATER)]
    table.make_room(0.0, 0.0)
    all_left(table)
    assert table.promote(FULL_NAMES[9:], 4 * UNIT_BYTES)[0].state is PromotionState.TAKEN


def test_a_table_without_a_tier_has_no_parts_for_it() -> None:
    table, _, _ = table_of(0)
    assert table.parts == CHUNKS
    assert table_of(1)[0].parts == CHUNKS + PARTS
    store(table, [0])
    table.demote_all()
    assert not table.ledger.demoting
    assert table.make_room(1.0, 1.0) == 1
    assert table.ledger.counts.dropped == 0


def test_what_is_too_large_for_the_memory_stays_below_unseen() -> None:
    table, _, log = table_of(1 << 20)
    left = [LeftBehind(FULL_NAMES[0], CHUNK + 1), LeftBehind(FULL_NAMES[1], CHUNK)]
    assert table.adopt_lower_tier(left) == 1
    assert len(log) == 1
    assert table.promote(FULL_NAMES[:1], CHUNK + 1) == [Promoted(PromotionState.GONE)]


def test_a_put_waits_for_the_tier_instead_of_dropping_objects() -> None:
    """What it finds no slot for is refused, and finds one when others have been written."""
    table, _, _ = table_of(2 * UNIT_BYTES)
    old, new = keys(12, seed=1), keys(8, seed=2)
    for some, refused in ((old, 0), (new, 8), (new, 8)):
        claim = table.claim(some, SIG, UNIT_BYTES, 0.0)
        assert claim.verdicts.count(Verdict.NO_SPACE) == refused
        table.take_claim(claim.id)
        table.publish(claim, [1] * len(claim.slots))
    assert (len(table), len(table.ledger.demoting)) == (12, 8), "asked again, no more leave"
    all_left(table)
    claim = table.claim(new, SIG, UNIT_BYTES, 0.0)
    assert claim.verdicts == [Verdict.GRANTED] * 8
    assert (len(table.ledger), table.ledger.counts.dropped) == (8, 0)
