# SPDX-License-Identifier: Apache-2.0
"""More sizes of objects than there are chunks: they share slots, and memory goes where it is
wanted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_makers import SIG

from kvstore.config import Config
from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES, Slab, class_of, class_of_left, classes_up_to
from kvstore.objects.headers import HEADER, HEADER_BYTES
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger
from kvstore.rules.object_table import ObjectTable, Verdict
from kvstore.rules.stored_objects import TableParts

MIB = 1 << 20
LOW, HIGH = Config.free_low, Config.free_high
CHUNK_UNITS = 64
"""Of small slabs: seven powers of two are classes that others share."""


def slab_of(chunks: int, chunk_units: int = CHUNK_UNITS) -> Slab:
    chunk = chunk_units * UNIT_BYTES
    return Slab(chunks * (chunk + chunk_units * HEADER_BYTES) + UNIT_BYTES, chunk)


def table_of(slab: Slab) -> ObjectTable:
    headers = np.zeros(slab.units, HEADER)
    return ObjectTable(TableParts(slab, headers, POLICIES["lru"], ChangeLog(1000), Ledger(0)))


def key_of(number: int) -> np.ndarray:
    return np.frombuffer(number.to_bytes(16, "big"), np.uint8).reshape(1, 16)


def is_there(table: ObjectTable, number: int) -> bool:
    return key_of(number).tobytes() + SIG in table._objects


def store(table: ObjectTable, number: int, nbytes: int) -> Verdict:
    claim = table.claim(key_of(number), SIG, nbytes, 0.0)
    if claim.slots:
        table.take_claim(claim.id)
        table.publish(claim, [1])
    return claim.verdicts[0]


def replay(memory: int, sizes: Sequence[int], asked: Sequence[int]) -> tuple[float, float]:
    """The part of requests that are hits: of a table, and of one list of all objects that were used
    last and fit the same memory without any waste. ``asked``: objects; their sizes take turns."""
    slab = Slab(memory, Config(memory=memory).chunk_bytes_used)
    table = table_of(slab)
    ideal: OrderedDict[int, int] = OrderedDict()
    hits = ideal_hits = used = 0
    for turn, number in enumerate(asked):
        nbytes = sizes[number % len(sizes)]
        if is_there(table, number):
            hits += 1
            table.touch(key_of(number), SIG)
        else:
            store(table, number, nbytes)
        if turn % 4 == 3:
            table.make_room(LOW, HIGH)
        if number in ideal:
            ideal_hits += 1
            ideal.move_to_end(number)
            continue
        ideal[number] = nbytes
        used += nbytes
        while used > memory * (1 - HIGH):
            used -= ideal.popitem(last=False)[1]
    return hits / len(asked), ideal_hits / len(asked)


def popular(objects: int, requests: int) -> list[int]:
    """Few objects are asked for often, and many seldom."""
    parts = 1 / np.arange(1, objects + 1) ** 0.9
    chosen = np.random.default_rng(1).choice(objects, requests, p=parts / parts.sum())
    return [int(one) for one in chosen]


@pytest.mark.parametrize(
    ("count", "smallest", "largest"),
    [(40, 64 << 10, 2 * MIB), (40, 256 << 10, 8 * MIB), (14, 64 << 10, 2 * MIB), (1, MIB, MIB)],
)
def test_hits_are_nearly_those_of_one_list(count: int, smallest: int, largest: int) -> None:
    """256 MiB have 15 chunks. With a chunk for each class, 40 classes took them from each other,
    and had a quarter of these hits."""
    sizes = [int(one) for one in np.geomspace(smallest, largest, count)]
    objects = len(sizes) * (600 * MIB // sum(sizes))
    hits, ideal = replay(256 * MIB, sizes, popular(objects, 4000))
    assert ideal > 0.5
    assert hits > 0.85 * ideal


def test_memory_goes_to_the_size_that_is_wanted_now() -> None:
    """As after a change of the model: nobody asks for the former pages any more."""
    sizes = [5 * UNIT_BYTES, 9 * UNIT_BYTES]
    table = table_of(slab_of(15))
    for number in range(400):
        store(table, number, sizes[0])
        table.make_room(LOW, HIGH)
    for number in range(1000, 3000):
        store(table, number, sizes[1])
        table.make_room(LOW, HIGH)
    there = sum(is_there(table, number) for number in range(1000, 3000))
    assert there > 0.7 * table.slab.capacity(9) > 0.7 * 13 * (CHUNK_UNITS // 9)


def test_two_small_classes_do_not_take_one_chunk_from_each_other() -> None:
    table = table_of(slab_of(4))
    for number in range(3 * CHUNK_UNITS):
        assert store(table, number, UNIT_BYTES) is Verdict.GRANTED
    assert store(table, 1000, 20 * UNIT_BYTES) is Verdict.GRANTED
    assert store(table, 1001, 30 * UNIT_BYTES) is Verdict.NO_SPACE
    table.make_room(0.0, 0.0)
    assert store(table, 1001, 30 * UNIT_BYTES) is Verdict.GRANTED
    assert is_there(table, 1000), "its chunk had least in it, and is its only one"


@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(
    st.lists(st.integers(1, CHUNK_UNITS), min_size=1, max_size=300),
    st.sampled_from([8, 9, 12, 15]),
)
def test_each_size_gets_a_slot_and_keeps_one_chunk(wanted: list[int], chunks: int) -> None:
    """With more chunks than powers of two: whoever waits for room gets it, and after all sizes had
    theirs nobody takes a last chunk from those that others share."""
    table = table_of(slab_of(chunks))
    shared = {1 << power for power in range(7)}
    for number, units in enumerate(wanted):
        had = {one for one in shared if table.slab.has_chunk(one)}
        if store(table, number, units * UNIT_BYTES) is Verdict.NO_SPACE:
            table.make_room(0.0, 0.0)
            assert store(table, number, units * UNIT_BYTES) is Verdict.GRANTED
        assert all(table.slab.has_chunk(one) for one in had)


@given(st.integers(1, 1 << 14))
def test_classes_are_those_of_all_sizes(units: int) -> None:
    classes = classes_up_to(units)
    assert classes == sorted(set(classes))
    assert all(class_of(one * UNIT_BYTES) == one for one in classes)
    assert classes[-1] <= units < class_of(classes[-1] * UNIT_BYTES + 1)


@given(st.integers(1, 200), st.data())
def test_a_chunk_that_was_left_behind_is_cut_as_it_was(
    chunk_units: int, data: st.DataObject
) -> None:
    """Or in another way in which the same objects lie in slots."""
    units = data.draw(st.sampled_from([*classes_up_to(chunk_units - 1), chunk_units]))
    slots = range(0, chunk_units // units * units, units)
    some = data.draw(st.lists(st.sampled_from(slots), unique=True, min_size=1))
    sizes = [data.draw(st.integers(1, units)) for _ in some]
    lying = [(at, class_of(one * UNIT_BYTES)) for at, one in zip(some, sizes, strict=True)]
    found, kept = class_of_left(lying, chunk_units)
    assert kept == list(range(len(some)))
    assert all(not at % found and found >= one for at, one in zip(some, sizes, strict=True))
    assert max(some) + found <= chunk_units


def test_an_object_that_cannot_lie_beside_the_others_is_left_out() -> None:
    assert class_of_left([(0, 4), (8, 4), (13, 4), (12, 2)], 64) == (4, [0, 1, 3])


def left_behind(table: ObjectTable, slab: Slab) -> ObjectTable:
    """The next owner of the same memory."""
    headers = table._headers.copy()
    new = ObjectTable(TableParts(slab, headers, POLICIES["lru"], ChangeLog(1000), Ledger(0)))
    new.adopt(lambda slot, nbytes: int(headers["checksum"][slot]))
    return new


@settings(max_examples=100)  # also in the fast layer: see tests/conftest.py
@given(st.lists(st.integers(1, CHUNK_UNITS), min_size=1, max_size=200))
def test_the_next_owner_of_the_memory_has_all_objects(wanted: list[int]) -> None:
    table = table_of(slab_of(8))
    for number, units in enumerate(wanted):
        store(table, number, units * UNIT_BYTES)
        table.make_room(LOW, HIGH)
    new = left_behind(table, slab_of(8))
    assert {name: one.slot for name, one in new._objects.items()} == {
        name: one.slot for name, one in table._objects.items()
    }
    new.make_room(0.5, 0.5)
    for number, units in enumerate(wanted):
        store(new, number, units * UNIT_BYTES)
    slots = sorted((one.slot, one.units) for one in new._objects.values())
    assert all(slot + units <= after for (slot, units), (after, _) in pairwise(slots))


@pytest.mark.parametrize("chunk_units", [63, 100, 1000])
def test_the_largest_object_of_an_odd_chunk_gets_all_of_it(chunk_units: int) -> None:
    table = table_of(slab_of(3, chunk_units))
    for number in range(3):
        assert store(table, number, chunk_units * UNIT_BYTES) is Verdict.GRANTED
    assert store(table, 3, chunk_units * UNIT_BYTES) is Verdict.GRANTED
    assert not is_there(table, 0), "the oldest has left for it"
    assert left_behind(table, slab_of(3, chunk_units))._objects.keys() == table._objects.keys()


def test_a_chunk_that_is_promised_goes_over_with_its_last_object() -> None:
    slab = slab_of(1)
    slots = [slab.take(8) for _ in range(3)]
    slab.promise(0, 16)
    assert slab.take(8) is None
    assert slab.take(16) is None
    assert slab.capacity(16) == CHUNK_UNITS // 16
    assert slab.capacity(8) == 0
    for slot in slots:
        assert slot is not None
        assert slab.is_promised(16)
        slab.give_back(slot)
    assert not slab.promised
    assert slab.free_slots(16) == CHUNK_UNITS // 16
    assert slab.take(16) is not None
    assert slab.take(8) is None
