# SPDX-License-Identifier: Apache-2.0
"""Which object lies where in segment files, and what their heads tell of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES
from kvstore.tiers.heads import (
    PLACE_HEAD,
    place_head,
    places_of,
    segment_head,
    segment_of_head,
    told,
)
from kvstore.tiers.segments import Place, Segments, place_units

SEGMENTS, UNITS = 3, 12
SIZES = st.sampled_from([1, UNIT_BYTES, 2 * UNIT_BYTES, 5 * UNIT_BYTES, 11 * UNIT_BYTES])
NAMES = st.integers(0, 15).map(lambda i: bytes([i]) * 32)


class Files(RuleBasedStateMachine):
    """Objects are written, read and removed, and the process is started anew; a model of the files'
    heads is all that is left then."""

    def __init__(self) -> None:
        super().__init__()
        self.segments = Segments(SEGMENTS, UNITS, POLICIES["lru"])
        #: What a scan finds: by segment, and by slot.
        self.heads: dict[int, tuple[int, int]] = {}
        self.places: dict[int, tuple[bytes, Place]] = {}
        self.removed: set[bytes] = set()

    @rule(
        names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
        nbytes=SIZES,
        works=st.booleans(),
    )
    def write(self, names: list[bytes], nbytes: int, works: bool) -> None:
        taken = [(name, self.segments.take(nbytes)) for name in names]
        for _, one in taken:
            if one.fresh is not None:
                self.heads[one.fresh] = self.segments.head(one.fresh)
            for gone in one.gone:
                assert self.segments.place(gone) is None
        slots = [one.place.slot for _, one in taken if one.place is not None]
        assert len(set(slots)) == len(slots)
        for name, one in taken:
            if one.place is None:
                continue
            if works:
                self.places[one.place.slot] = name, one.place
                self.segments.store(name, one.place)
                self.removed.discard(name)
            else:
                self.segments.release(one.place)

    @rule(name=NAMES)
    def read(self, name: bytes) -> None:
        if self.segments.place(name) is not None:
            self.segments.touch(name)

    @rule(name=NAMES)
    def remove(self, name: bytes) -> None:
        place = self.segments.remove(name)
        if place is not None:
            self.places.pop(place.slot)  # Its head is wiped.
            self.segments.release(place)
            assert self.segments.remove(name) is None

    @rule()
    def restart(self) -> None:
        found: dict[bytes, Place] = {}
        for slot, (name, place) in self.places.items():
            segment = slot // UNITS
            units, serial = self.heads.get(segment, (0, 0))
            believed = place.serial == serial and place_units(place.nbytes) == units
            if believed and (name not in found or found[name].sequence < place.sequence):
                found[name] = place
        before = dict(self.segments._places)
        self.segments = Segments(SEGMENTS, UNITS, POLICIES["lru"])
        self.segments.adopt(self.heads, found)
        assert before.items() <= found.items(), "what was there is there again"

    @invariant()
    def no_unit_has_two_objects(self) -> None:
        used: set[int] = set()
        total = 0
        for name, place in self.segments._places.items():
            assert self.segments.place(name) is place
            segment, unit = self.segments.segment_of(place)
            units = place_units(place.nbytes)
            assert unit + units <= UNITS
            assert self.segments.head(segment) == (units, place.serial)
            span = set(range(place.slot, place.slot + units))
            assert not span & used
            used |= span
            total += place.nbytes
        assert (len(self.segments), self.segments.nbytes) == (len(self.segments._places), total)


TestFiles = Files.TestCase
TestFiles.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_what_was_read_longest_ago_goes() -> None:
    segments = Segments(1, 4, POLICIES["lru"])  # Two places for objects of one unit.
    for i in (1, 2):
        place = segments.take(1).place
        assert place is not None
        segments.store(bytes([i]) * 32, place)
    segments.touch(bytes([1]) * 32)
    taken = segments.take(1)
    assert taken.place is not None
    assert taken.gone == [bytes([2]) * 32]
    assert taken.fresh is None, "the segment keeps its class"


def test_a_class_without_a_segment_gets_one() -> None:
    segments = Segments(2, 4, POLICIES["lru"])
    for i in range(3):
        place = segments.take(1).place
        assert place is not None
        segments.store(bytes([i]) * 32, place)
    busy, free = 0, 1
    taken = segments.take(3 * UNIT_BYTES)
    assert taken.place is not None
    assert taken.place.slot // 4 == free
    assert taken.fresh == free
    assert taken.gone == [bytes([2]) * 32]
    assert segments.head(free)[1] > segments.head(busy)[1]


def test_what_is_too_large_gets_nothing() -> None:
    segments = Segments(2, 4, POLICIES["lru"])
    assert segments.take(4 * UNIT_BYTES).place is None, "there is the head, too"


def test_a_segment_whose_head_was_not_written_is_fresh_again() -> None:
    segments = Segments(1, 4, POLICIES["lru"])
    first = segments.take(1)
    assert first.fresh == 0
    segments.release(first.place)
    segments.head_failed(0)
    assert segments.take(1).fresh == 0


NAME = bytes(range(32))
PLACE = Place(slot=6, nbytes=5000, serial=3, sequence=9)


def head_with(change: Callable[[np.ndarray], None]) -> list[bytes]:
    """The names that are believed of a segment of four places."""
    units = place_units(PLACE.nbytes)
    heads = np.zeros(4, PLACE_HEAD)
    heads[2] = np.frombuffer(place_head(NAME, PLACE, 77), PLACE_HEAD)[0]
    change(heads[2:3])
    return [name for _, name, _ in places_of(heads, units, PLACE.serial)]


def test_a_head_tells_what_was_written() -> None:
    assert head_with(lambda _: None) == [NAME]
    raw = place_head(NAME, PLACE, 77)
    assert told(raw, NAME, PLACE) == 77
    assert told(raw, bytes(32), PLACE) is None
    assert told(raw, NAME, Place(6, 5000, 3, 10)) is None, "of another write"


@pytest.mark.parametrize(
    "field", ["magic", "name", "nbytes", "checksum", "serial", "sequence", "own", "unused"]
)
def test_a_head_that_cannot_be_right_is_left_out(field: str) -> None:
    def change(head: np.ndarray) -> None:
        head[field] = np.void(bytes(32)) if field == "name" else head[field] + 1

    assert head_with(change) == []


@given(st.integers(0, 47), st.integers(1, 255))
def test_a_segments_head_with_another_byte_is_none(at: int, change: int) -> None:
    raw = segment_head(1 << 20, 6, 3)
    assert segment_of_head(raw, 1 << 20) == (6, 3)
    assert segment_of_head(raw, 1 << 21) is None
    if at < len(raw):
        wrong = raw[:at] + bytes([raw[at] ^ change]) + raw[at + 1 :]
        assert segment_of_head(wrong, 1 << 20) is None


def test_a_segment_that_is_being_written_goes_to_no_other_class() -> None:
    segments = Segments(1, 4, POLICIES["lru"])
    written = segments.take(1).place
    taken = segments.take(3 * UNIT_BYTES)
    assert taken.place is None
    segments.release(written)
    assert segments.take(3 * UNIT_BYTES).place is not None
