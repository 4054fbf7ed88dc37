# SPDX-License-Identifier: Apache-2.0
"""Slots: no two overlap, none is lost, whatever is taken and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.memory.slab import UNIT_BYTES, Slab, class_of
from kvstore.objects.headers import HEADER_BYTES

CHUNK = 32 * UNIT_BYTES


@given(st.integers(1, 1 << 32))
def test_a_slot_fits_its_object_and_wastes_little(nbytes: int) -> None:
    slot = class_of(nbytes) * UNIT_BYTES
    assert slot >= nbytes
    assert slot < nbytes + UNIT_BYTES or slot <= nbytes * 1.125
    assert class_of(slot) * UNIT_BYTES == slot, "a class holds objects of its own size"


@given(st.integers(1, 1 << 24), st.integers(0, 1 << 24))
def test_larger_objects_get_no_smaller_slots(nbytes: int, more: int) -> None:
    assert class_of(nbytes) <= class_of(nbytes + more)


def test_sizes_of_kv_pages_waste_nothing() -> None:
    for nbytes in (65536, 1 << 20, 3 << 20, 5 << 20, 16 << 20):
        assert class_of(nbytes) * UNIT_BYTES == nbytes


@pytest.mark.parametrize("chunks", [1, 3, 16])
def test_headers_and_slots_fill_the_memory_that_was_given(chunks: int) -> None:
    given_bytes = chunks * (CHUNK + 32 * HEADER_BYTES) + UNIT_BYTES
    slab = Slab(given_bytes, CHUNK)
    assert slab.chunks == chunks
    assert slab.nbytes <= given_bytes
    assert slab.slots_offset >= slab.units * HEADER_BYTES
    assert slab.slots_offset % UNIT_BYTES == 0


def test_too_little_memory_and_odd_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4096 bytes are too few .* give at least 137216"):
        Slab(4096, CHUNK)
    with pytest.raises(ValueError, match="chunk_bytes=5000 must be a multiple of 4096"):
        Slab(1 << 20, 5000)


class Slots(RuleBasedStateMachine):
    """Against a list of who has which units."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(4 * (CHUNK + 32 * HEADER_BYTES) + UNIT_BYTES, CHUNK)
        self.taken: dict[int, int] = {}

    @rule(units=st.sampled_from([1, 3, 8, 20, 32]))
    def take(self, units: int) -> None:
        free = self.slab.free_slots(units)
        slot = self.slab.take(units)
        assert (slot is not None) == (free > 0)
        if slot is not None:
            self.taken[slot] = units
            assert self.slab.free_slots(units) == free - 1

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        units = self.taken.pop(slot)
        free = self.slab.free_slots(units)
        self.slab.give_back(slot)
        assert self.slab.free_slots(units) == free + 1

    @invariant()
    def no_unit_belongs_to_two(self) -> None:
        units = [unit for slot, n in self.taken.items() for unit in range(slot, slot + n)]
        assert len(units) == len(set(units))
        assert all(0 <= unit < self.slab.units for unit in units)
        for slot, n in self.taken.items():
            chunk = slot // 32
            assert slot in self.slab.slots_of(chunk)
            assert (slot + n - 1) // 32 == chunk
        assert self.slab.used_bytes == sum(self.taken.values()) * UNIT_BYTES

    @invariant()
    def a_chunk_to_empty_has_something_in_it_of_another_class(self) -> None:
        for units in (1, 32):
            chunk = self.slab.chunk_to_empty(units)
            if chunk is not None:
                assert (
                    self.slab.slots_of(chunk).step != units or len(self.slab.slots_of(chunk)) == 1
                )


TestSlots = pytest.mark.slow(Slots.TestCase)
