# SPDX-License-Identifier: Apache-2.0
"""The life of slots, against a model; and what is announced of it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from store_makers import SIG, keys

from kvstore._table import Table
from kvstore.client.handles import of_each
from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES, Slab
from kvstore.objects.changes import CHANGE, OWNERS_MAX, PLACE, Found, Keys, fingerprint_of
from kvstore.objects.headers import HEADER, HEADER_BYTES, LIVE, expected, tell_apart
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger
from kvstore.rules.object_table import Claim, ObjectTable, Verdict, texts_of
from kvstore.rules.stored_objects import TableParts

CHUNK = 8 * UNIT_BYTES
NAMES = keys(12)
OTHER = bytes(16)


def table_of(
    chunks: int, kept: int = 1000, policy: str = "lru"
) -> tuple[ObjectTable, np.ndarray, ChangeLog]:
    slab = Slab(chunks * (CHUNK + 8 * HEADER_BYTES) + UNIT_BYTES, CHUNK)
    headers, log = np.zeros(slab.units, HEADER), ChangeLog(kept)
    return ObjectTable(TableParts(slab, headers, POLICIES[policy], log, Ledger(0))), headers, log


def store(
    table: ObjectTable, some: Keys, nbytes: int = UNIT_BYTES, signature: bytes = SIG
) -> Claim:
    claim = table.claim(some, signature, nbytes, 0.0)
    if claim.slots:
        assert table.take_claim(claim.id) is claim
        table.publish(claim, [11] * len(claim.slots))
    return claim


class Objects(RuleBasedStateMachine):
    """Claims, publications, evictions in any order; a follower hears of all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.objects, self.headers, self.log = table_of(3)
        self.claims: list[Claim] = []
        self.live: dict[tuple[bytes, int], int] = {}
        self.table = Table()
        self.heard = 0

    @rule(
        rows=st.lists(st.integers(0, 11), min_size=1, max_size=6),
        units=st.sampled_from([1, 2, 8, 9]),
        signature=st.sampled_from([SIG, OTHER]),
        brings=st.booleans(),
    )
    def claim(self, rows: list[int], units: int, signature: bytes, brings: bool) -> None:
        nbytes = units * UNIT_BYTES
        claim = self.objects.claim(NAMES[rows], signature, nbytes, 5.0, brings=brings)
        assert len(claim.verdicts) == len(rows)
        assert claim.verdicts.count(Verdict.GRANTED) == len(claim.slots) == len(claim.keys)
        if units > 8:
            assert set(claim.verdicts) == {Verdict.TOO_LARGE}
        if claim.slots:
            self.claims.append(claim)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), publishes=st.booleans())
    def end_a_claim(self, data: st.DataObject, publishes: bool) -> None:
        claim = self.claims.pop(data.draw(st.integers(0, len(self.claims) - 1)))
        assert self.objects.take_claim(claim.id) is claim
        assert self.objects.take_claim(claim.id) is None, "it ends once"
        if publishes:
            self.objects.publish(claim, [slot + 100 for slot in claim.slots])
        else:
            self.objects.abandon(claim)

    @rule(low=st.floats(0.0, 0.5), more=st.floats(0.0, 0.5))
    def make_room(self, low: float, more: float) -> None:
        before = len(self.objects)
        gone = self.objects.make_room(low, low + more)
        assert len(self.objects) == before - gone

    @rule(rows=st.lists(st.integers(0, 11), max_size=6), removes=st.booleans())
    def touch_or_remove(self, rows: list[int], removes: bool) -> None:
        before = len(self.objects)
        if removes:
            unique = sorted(set(rows))
            gone = self.objects.remove(NAMES[unique], SIG)
            assert sum(gone) == before - len(self.objects)
        else:
            self.objects.touch(NAMES[rows], SIG)

    @rule(signature=st.sampled_from([SIG, OTHER]))
    def clear(self, signature: bytes) -> None:
        before = set(self.objects._objects)
        left = {name for name in before if name[16:] != signature}
        assert self.objects.clear(signature) == len(before) - len(left)
        assert set(self.objects._objects) == left

    @invariant()
    def headers_and_announcements_agree(self) -> None:
        changes = self.log.since(self.heard, 1000)
        assert changes is not None
        self.table.apply(1, changes)
        self.heard += len(changes)
        live = np.flatnonzero(self.headers["state"] == LIVE)
        assert len(live) == len(self.objects) == len(self.table)
        snapshot = self.objects.snapshot(0, 99)
        assert sorted(snapshot["slot"].tolist()) == live.tolist()
        for slot in live:
            header = self.headers[slot]
            assert header["checksum"] in (slot + 100, 11)
            places = np.empty(1, PLACE)
            self.table.look_up(
                header["key"].tobytes(), int(header["fingerprint"]), bytes([1]) * OWNERS_MAX, places
            )
            assert places["found"][0] == Found.HERE
            assert (places["slot"][0], places["generation"][0]) == (slot, header["generation"])

    @invariant()
    def claimed_slots_are_nobody_elses(self) -> None:
        claimed = [slot for one in self.claims for slot in one.slots]
        assert len(claimed) == len(set(claimed))
        assert not (self.headers["state"][claimed] == LIVE).any()


TestObjects = pytest.mark.slow(Objects.TestCase)


def test_the_first_claim_of_a_key_wins() -> None:
    table, _, _ = table_of(2)
    first = table.claim(NAMES[[0, 0, 1]], SIG, 100, 5.0)
    assert first.verdicts == [Verdict.GRANTED, Verdict.BEING_STORED, Verdict.GRANTED]
    assert table.claim(NAMES[:1], SIG, 100, 5.0).verdicts == [Verdict.BEING_STORED]
    assert table.claim(NAMES[:1], OTHER, 100, 5.0).verdicts == [Verdict.GRANTED]
    table.take_claim(first.id)
    table.publish(first, [1, 2])
    assert table.claim(NAMES[:1], SIG, 100, 5.0).verdicts == [Verdict.EXISTS]
    assert table.counts.published == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_being_brought_can_be_stored_and_is_there_once(is_first: bool) -> None:
    """What brings it may fail; and whoever else wants it brought does not read it again."""
    table, headers, _ = table_of(2)
    bringing = table.claim(NAMES[:2], SIG, 100, 5.0, brings=True)
    assert table.claim(NAMES[:1], SIG, 100, 5.0, brings=True).verdicts == [Verdict.BEING_STORED]
    storing = table.claim(NAMES[:1], SIG, 100, 5.0)
    assert storing.verdicts == [Verdict.GRANTED]
    assert table.claim(NAMES[:1], SIG, 100, 5.0, brings=True).verdicts == [Verdict.BEING_STORED]
    for claim in (bringing, storing) if is_first else (storing, bringing):
        table.take_claim(claim.id)
        table.publish(claim, [7] * len(claim.slots))
    slots = [storing.slots[0], bringing.slots[1]]
    assert np.flatnonzero(headers["state"] == LIVE).tolist() == sorted(slots)
    table.remove(NAMES[:2], SIG)
    assert table.claim(NAMES[:2], SIG, 100, 5.0).verdicts == [Verdict.GRANTED] * 2
    table.abandon(table.claim(NAMES[2:4], SIG, 100, 5.0, brings=True))
    assert table.claim(NAMES[2:4], SIG, 100, 5.0, brings=True).verdicts == [Verdict.GRANTED] * 2


def test_claims_are_overdue_after_their_deadline() -> None:
    table, _, _ = table_of(1)
    claim = table.claim(NAMES[:1], SIG, 100, 5.0)
    table.claim(NAMES[1:2], SIG, 100, 9.0)
    assert table.overdue(5.0) == []
    assert [one.id for one in table.overdue(5.1)] == [claim.id]


def test_a_slot_that_is_used_again_has_another_generation() -> None:
    table, headers, _ = table_of(1)
    seen = set()
    for i in range(5):
        claim = store(table, NAMES[i : i + 1], CHUNK)
        seen.add((claim.slots[0], int(headers[claim.slots[0]]["generation"])))
        table.remove(NAMES[i : i + 1], SIG)
    assert len(seen) == 5


def test_room_is_made_up_to_the_high_mark_and_the_oldest_go() -> None:
    table, _, _ = table_of(4)
    store(table, keys(30, 1))
    table.touch(keys(30, 1)[:3], SIG)
    assert table.make_room(0.05, 0.25) == 0, "2 of 32 slots are free, which is more than 5 %"
    assert table.make_room(0.1, 0.25) == 6
    kept = [
        key.tobytes() in {row["key"].tobytes() for row in table.snapshot(0, 9)}
        for key in keys(30, 1)
    ]
    assert kept == [True] * 3 + [False] * 6 + [True] * 21
    assert table.counts.evicted == 6


def test_a_put_makes_the_room_that_it_needs() -> None:
    table, headers, _ = table_of(4)
    store(table, keys(32, 1))
    pins = keys(32, 1)[:2]
    table.touch(pins, SIG)
    claim = store(table, np.concatenate([keys(20, 2), keys(3, 1)[:2]]))
    assert claim.verdicts == [Verdict.GRANTED] * 20 + [Verdict.EXISTS] * 2
    assert len(table) == 32
    assert all(table.sizes(np.concatenate([pins, keys(20, 2)]), SIG)), "the oldest have left"
    assert table.counts.evicted == 20
    assert (headers["state"] == LIVE).sum() == 32


def test_a_put_whose_own_objects_are_the_oldest_is_stored_whole() -> None:
    """Room is made of them, too: they are stored anew."""
    table, _, _ = table_of(4)
    store(table, keys(32, 1))
    again = np.concatenate([keys(20, 2), keys(32, 1)[:6]])
    claim = store(table, again)
    assert Verdict.NO_SPACE not in claim.verdicts
    assert all(table.sizes(again, SIG))
    assert len(table) == 32


def test_what_is_brought_makes_no_room_and_no_put_takes_slots_under_way() -> None:
    table, _, _ = table_of(1)
    under_way = table.claim(keys(6, 1), SIG, UNIT_BYTES, 5.0)
    store(table, keys(2, 2))
    brought = table.claim(keys(2, 3), SIG, UNIT_BYTES, 5.0, brings=True)
    assert brought.verdicts == [Verdict.NO_SPACE] * 2
    found = store(table, keys(4, 4))
    assert found.verdicts == [Verdict.GRANTED] * 2 + [Verdict.NO_SPACE] * 2
    assert not set(found.slots) & set(under_way.slots)
    assert len(table) == table.counts.evicted == 2


def test_a_class_without_a_slot_gets_the_chunk_with_the_least_in_it() -> None:
    table, _, _ = table_of(2)
    store(table, keys(11, 1))  # 8 in one chunk, 3 in the other
    assert store(table, keys(1, 2), CHUNK).verdicts == [Verdict.NO_SPACE]
    assert table.make_room(0.0, 0.0) == 3
    assert store(table, keys(1, 2), CHUNK).verdicts == [Verdict.GRANTED]
    assert len(table) == 9


@pytest.mark.parametrize("name", [one for one in HEADER.names or () if one != "checksum"])
def test_a_header_that_differs_in_anything_is_another(name: str) -> None:
    wanted = expected(NAMES[:2], SIG, 4096, [7, 8])
    found = wanted.copy()
    found["checksum"] = [1, 2]
    assert tell_apart(found, wanted).tolist() == [True, True]
    raw = found.view(np.uint8).reshape(2, -1)
    dtype, offset = HEADER.fields[name][:2]  # type: ignore[index]
    raw[1, offset + dtype.itemsize - 1] ^= 1
    assert tell_apart(found, wanted).tolist() == [True, False]


@given(st.integers(1, 1 << 40))
def test_what_a_table_writes_is_what_a_reader_expects(nbytes: int) -> None:
    size = nbytes % CHUNK + 1
    table, headers, log = table_of(1)
    claim = store(table, NAMES[:1], size)
    changes = log.since(0, 10)
    assert changes is not None
    assert changes.dtype == CHANGE
    assert changes["fingerprint"][0] == fingerprint_of(SIG, size)
    wanted = expected(NAMES[:1], SIG, size, changes["generation"])
    assert tell_apart(headers[claim.slots].copy(), wanted).all()


@given(st.lists(st.sampled_from(Verdict), max_size=4))
@example([])
@example([Verdict.EXISTS] * 3)
def test_verdicts_come_out_of_a_message_as_they_went_in(verdicts: list[Verdict]) -> None:
    said = texts_of(verdicts)
    assert said == [one.value for one in verdicts]
    assert of_each(keys(len(verdicts), 1), said, Verdict) == verdicts
    with pytest.raises(ValueError, match=f"{len(verdicts)} answers for {len(verdicts) + 1}"):
        of_each(keys(len(verdicts) + 1, 1), said, Verdict)
    with pytest.raises(ValueError, match="'' is not a valid Verdict"):
        of_each(keys(len(verdicts) + 1, 1), [*said, ""], Verdict)


@given(st.lists(st.sampled_from([1, 5000, CHUNK + 1]), max_size=4))
def test_each_verdict_is_counted(sizes: list[int]) -> None:
    table, _, _ = table_of(1)
    verdicts = [
        one for n, nbytes in enumerate(sizes) for one in store(table, keys(2, n), nbytes).verdicts
    ]
    verdicts += store(table, keys(3, 0), 1).verdicts
    assert +table.counts.verdicts == Counter(one.value for one in verdicts)


def test_nobody_guesses_the_id_of_a_claim() -> None:
    """Whoever names one may end it."""
    table, _, _ = table_of(3)
    ids = [table.claim(keys(1, seed), SIG, 100, 1.0).id for seed in range(20)]
    assert len(set(ids)) == len(ids)
    assert all(0 < one < 1 << 63 for one in ids)
    assert max(ids) > 1 << 55, "they are not counted"
