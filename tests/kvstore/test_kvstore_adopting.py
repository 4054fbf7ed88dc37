# SPDX-License-Identifier: Apache-2.0
"""What an owner finds in memory that another one has left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_makers import SIG, keys

from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES, Slab, class_of
from kvstore.objects.changes import Records, fingerprint_of
from kvstore.objects.headers import HEADER, HEADER_BYTES, LIVE
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger
from kvstore.rules.object_table import ObjectTable, Verdict
from kvstore.rules.stored_objects import TableParts

CHUNK_UNITS = 8
CHUNKS = 3
NAMES = keys(12)
SLAB_BYTES = CHUNKS * CHUNK_UNITS * (UNIT_BYTES + HEADER_BYTES) + UNIT_BYTES


def empty() -> Records:
    return np.zeros(CHUNKS * CHUNK_UNITS, HEADER)


def table_over(headers: Records) -> tuple[ObjectTable, ChangeLog]:
    log = ChangeLog(1000)
    slab = Slab(SLAB_BYTES, CHUNK_UNITS * UNIT_BYTES)
    return ObjectTable(TableParts(slab, headers, POLICIES["arc"], log, Ledger(0))), log


def checksum(slot: int, nbytes: int) -> int:
    """Of the bytes that the tests have in mind."""
    return slot * 1000 + nbytes


def store(table: ObjectTable, rows: list[int], nbytes: int) -> None:
    claim = table.claim(NAMES[rows], SIG, nbytes, 0.0)
    if claim.slots:
        assert table.take_claim(claim.id) is claim
        table.publish(claim, [checksum(slot, nbytes) for slot in claim.slots])


SIZES = st.sampled_from([1, UNIT_BYTES, 2 * UNIT_BYTES, 3 * UNIT_BYTES, 8 * UNIT_BYTES])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "claim", "remove", "make room"]),
        st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True),
        SIZES,
    ),
    max_size=12,
)


@pytest.mark.slow
@given(STEPS, STEPS)
def test_an_owner_goes_on_where_another_one_was_killed(before: Any, after: Any) -> None:
    headers = empty()
    former, _ = table_over(headers)
    play(former, before)
    table, log = table_over(headers)
    assert table.adopt(checksum) == (len(former), 0)
    assert table._objects == former._objects
    told = log.since(0, 1000)
    assert told is not None
    assert sorted(told["slot"].tolist()) == sorted(one.slot for one in table._objects.values())
    play(table, after)
    spans = [set(range(one.slot, one.slot + one.units)) for one in table._objects.values()]
    claimed = [
        set(range(slot, slot + class_of(one.nbytes)))
        for one in table._claims.values()
        for slot in one.slots
    ]
    whole = set().union(*spans, *claimed)
    assert sum(map(len, spans + claimed)) == len(whole), "no unit is in two slots"
    table.clear(SIG)
    assert not (headers["state"] == LIVE).any()


def play(table: ObjectTable, steps: Any) -> None:
    for what, rows, nbytes in steps:
        if what == "store":
            store(table, rows, nbytes)
        elif what == "claim":  # Of a client that is still writing.
            table.claim(NAMES[rows], SIG, nbytes, 0.0)
        elif what == "remove":
            table.remove(NAMES[rows], SIG)
        else:
            table.make_room(0.2, 0.4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("magic", 1),
        ("state", 2),
        ("nbytes", 0),
        ("nbytes", 9 * UNIT_BYTES),
        ("nbytes", 4 * UNIT_BYTES),
        ("nbytes", (1 << 64) - 1),
        ("fingerprint", 5),
        ("checksum", 5),
        ("key", np.void(bytes(16))),  # as the next one's
    ],
)
def test_a_header_that_cannot_be_right_is_dropped(name: str, value: Any) -> None:
    """It says so of the second of four."""
    headers = empty()
    former, _ = table_over(headers)
    store(former, [0, 1, 2, 3], 2 * UNIT_BYTES)
    slots = sorted(one.slot for one in former._objects.values())
    headers[slots[1]][name] = value
    if name == "key":
        headers[slots[0]]["key"] = value
    if name == "nbytes" and 0 < value < 9 * UNIT_BYTES:
        headers[slots[1]]["fingerprint"] = fingerprint_of(SIG, value)
        headers[slots[1]]["checksum"] = checksum(slots[1], value)
    table, _ = table_over(headers)
    assert table.adopt(checksum) == (3, 1)
    assert np.flatnonzero(headers["state"]).tolist() == [slots[0], *slots[2:]]
    claim = table.claim(NAMES[[1]], SIG, 2 * UNIT_BYTES, 0.0)
    assert claim.verdicts == [Verdict.GRANTED]
    assert claim.slots == [slots[1]], "the first that is free"


def test_nothing_was_left_behind() -> None:
    table, log = table_over(empty())
    assert table.adopt(checksum) == (0, 0)
    assert len(log) == 0
