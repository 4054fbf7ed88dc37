# SPDX-License-Identifier: Apache-2.0
"""Which object lies in which bundle, and what a bundle tells of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.memory.policies import POLICIES
from kvstore.tiers import bundleheads
from kvstore.tiers.base import Laid
from kvstore.tiers.bundleheads import (
    HEAD_BYTES_MAX,
    PAGES_MAX,
    bundle_head,
    pages_of,
    removed_head,
    removed_of,
)
from kvstore.tiers.bundles import Bundle, Bundles, Page, grouped

CAPACITY = 1000
NAMES = st.integers(0, 9).map(lambda i: bytes([i]) * 32)


def laid(number: int, nbytes: int) -> Laid:
    return Laid(bytes([number % 256, number // 256]) * 16, nbytes, number, memoryview(b""))


def bundle_of(number: int, sizes: dict[bytes, int], head_bytes: int = 10) -> Bundle:
    pages, offset = {}, head_bytes
    for name, nbytes in sizes.items():
        pages[name] = Page(name, nbytes, 7, offset)
        offset += nbytes
    return Bundle(number.to_bytes(16, "big"), offset, pages)


class ObjectStore(RuleBasedStateMachine):
    """Bundles are written, read, removed from and evicted; requests fail; and the process is
    started anew, with what is in the object store then."""

    def __init__(self) -> None:
        super().__init__()
        self.bundles = Bundles(CAPACITY, POLICIES["arc"]())
        #: What is in the object store, in order; and what it tells of removed objects.
        self.stored: dict[bytes, Bundle] = {}
        self.told: dict[bytes, set[bytes]] = {}
        #: Names that were removed, and not written again since.
        self.removed: set[bytes] = set()
        self.number = 0

    def settle(self, works: bool) -> None:
        for one in self.bundles.to_delete:
            if works:
                self.stored.pop(one, None)
                self.told.pop(one, None)
                self.bundles.deleted(one)

    @rule(
        names=st.lists(NAMES, min_size=1, max_size=4, unique=True),
        nbytes=st.sampled_from([1, 60, 200, 500]),
        deletes=st.booleans(),
        outcome=st.sampled_from(["works", "fails", "is late"]),
    )
    def write(self, names: list[bytes], nbytes: int, deletes: bool, outcome: str) -> None:
        self.number += 1
        bundle = bundle_of(self.number, dict.fromkeys(names, nbytes))
        before = {page.name for page in self.bundles.pages()}
        gone = self.bundles.make_room(min(bundle.nbytes, CAPACITY))
        assert len(set(gone)) == len(gone)
        assert {page.name for page in self.bundles.pages()} == before - set(gone)
        self.settle(deletes)
        if not self.bundles.reserve(bundle.nbytes):
            assert bundle.nbytes > CAPACITY or not deletes
            return
        if outcome != "fails":
            self.stored[bundle.id] = bundle
        if outcome == "works":
            self.bundles.store(bundle)
            self.removed -= set(names)
            for name in names:
                found = self.bundles.find(name)
                assert found == (bundle, bundle.pages[name])
        else:
            self.bundles.fail(bundle)

    @rule(name=NAMES)
    def read(self, name: bytes) -> None:
        if self.bundles.find(name) is not None:
            self.bundles.touch(name)

    @rule(name=NAMES)
    def cannot_be_read(self, name: bytes) -> None:
        found = self.bundles.find(name)
        if found is not None:
            assert self.bundles.forget(name, found[0])
            assert not self.bundles.forget(name, found[0])
            assert self.bundles.find(name) is None

    @rule(names=st.lists(NAMES, min_size=1, max_size=3), deletes=st.booleans())
    def remove(self, names: list[bytes], deletes: bool) -> None:
        for one in self.bundles.remove(names):
            self.told[one.id] = set(one.removed)
        self.removed |= set(names)
        if deletes:
            self.settle(works=True)

    @rule()
    def restart(self) -> None:
        """Once everything was settled; else removed objects may be there again."""
        self.settle(works=True)
        before = {page.name for page in self.bundles.pages()}
        self.bundles = Bundles(CAPACITY, POLICIES["arc"]())
        for one in self.stored.values():
            told = self.told.get(one.id, set())
            self.bundles.adopt(Bundle(one.id, one.nbytes, one.pages, removed=set(told)))
        found = {page.name for page in self.bundles.pages()}
        assert before <= found, "what was there is there again"
        assert not found & self.removed, "and nothing that was removed"

    @invariant()
    def sums_are_right(self) -> None:
        stored = sum(one.nbytes for one in self.stored.values())
        assert stored <= self.bundles.used_bytes <= CAPACITY
        pages = list(self.bundles.pages())
        assert (len(self.bundles), self.bundles.nbytes) == (
            len(pages),
            sum(page.nbytes for page in pages),
        )
        for page in pages:
            found = self.bundles.find(page.name)
            assert found is not None
            assert found[0].id in self.stored
            assert found[0].id not in self.bundles.to_delete
            assert found[0].live


TestObjectStore = pytest.mark.slow(ObjectStore.TestCase)
TestObjectStore.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_the_bundle_that_was_read_longest_ago_goes() -> None:
    bundles = Bundles(100, POLICIES["lru"]())
    for i in (1, 2):
        assert bundles.reserve(50)
        bundles.store(bundle_of(i, {bytes([i]) * 32: 40}))
    bundles.touch(bytes([1]) * 32)
    assert bundles.make_room(50) == [bytes([2]) * 32]
    assert not bundles.reserve(50), "it is not deleted yet"
    assert bundles.make_room(50) == [], "one is enough"
    bundles.deleted((2).to_bytes(16, "big"))
    assert bundles.reserve(50)


def test_a_bundle_that_is_read_no_more_says_nothing_of_the_next_one() -> None:
    """An object was removed and written again while it was read from its former bundle."""
    bundles, name = Bundles(500, POLICIES["lru"]()), b"n" * 32
    old, new = bundle_of(1, {name: 40, b"o" * 32: 40}), bundle_of(2, {name: 40})
    for one in (old, new):
        assert bundles.reserve(one.nbytes)
        bundles.store(one)
    assert not bundles.forget(name, old)
    assert bundles.find(name) == (new, new.pages[name])
    assert bundles.forget(name, new)
    assert bundles.to_delete == [new.id]


def test_a_smaller_store_keeps_the_newest_bundles() -> None:
    bundles = Bundles(100, POLICIES["lru"]())
    for i in range(4):
        bundles.adopt(bundle_of(i, {bytes([i]) * 32: 40}))
    bundles.adopt(bundle_of(9, {bytes([9]) * 32: 400}))
    assert [page.name[0] for page in bundles.pages()] == [2, 3]
    assert [one[-1] for one in bundles.to_delete] == [0, 1, 9]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_runs_have_all_objects_in_order(sizes: list[int], bytes_max: int) -> None:
    objects = [laid(i, nbytes) for i, nbytes in enumerate(sizes)]
    runs = [objects[one] for one in grouped(objects, bytes_max)]
    assert [one for run in runs for one in run] == objects
    for i, run in enumerate(runs):
        after = runs[i + 1] if i + 1 < len(runs) else []
        nbytes = sum(one.nbytes for one in run)
        assert run
        assert nbytes <= bytes_max or len(run) == 1
        assert not after or nbytes + after[0].nbytes > bytes_max


@pytest.mark.parametrize("count", [1, 2, PAGES_MAX])
def test_a_head_tells_what_the_bundle_has(count: int) -> None:
    objects = [laid(i, 100 + i) for i in range(count)]
    head, pages = bundle_head(objects)
    nbytes = len(head) + sum(one.nbytes for one in objects)
    assert len(head) <= HEAD_BYTES_MAX
    raw = head + bytes(5)
    assert pages_of(raw, nbytes) == pages
    assert list(pages) == [one.name for one in objects]
    assert pages[objects[0].name].offset == len(head)
    last = pages[objects[-1].name]
    assert last.offset + last.nbytes == nbytes
    assert pages_of(raw, nbytes - 1) is None, "it was cut short"
    assert pages_of(head[:-1], nbytes) is None


HEAD = bundle_head([laid(i, 100) for i in range(3)])[0]
REMOVED = removed_head(b"i" * 16, [b"a" * 32, b"b" * 32])


@given(st.data(), st.integers(1, 255))
def test_another_byte_is_noticed(data: Any, change: int) -> None:
    nbytes = len(HEAD) + 300
    at = data.draw(st.integers(0, len(HEAD) - 1))
    assert pages_of(HEAD, nbytes) is not None
    assert pages_of(HEAD[:at] + bytes([HEAD[at] ^ change]) + HEAD[at + 1 :], nbytes) is None
    at = data.draw(st.integers(0, len(REMOVED) - 1))
    wrong = REMOVED[:at] + bytes([REMOVED[at] ^ change]) + REMOVED[at + 1 :]
    assert removed_of(wrong, b"i" * 16) is None


@pytest.mark.parametrize(
    ("nbytes", "offset", "fits"),
    [(100, 80, True), (101, 80, False), (100, 81, False), (2**64 - 1, 200, False)],
)
def test_an_object_lies_within_its_bundle(nbytes: int, offset: int, fits: bool) -> None:
    entry = np.array([(b"n" * 32, nbytes, 7, offset)], bundleheads._ENTRY).tobytes()
    raw = bundleheads._sealed(bundleheads._FIELDS.pack(bundleheads._BUNDLE, 1, 180), entry)
    assert (pages_of(raw, 180) is not None) == fits


def test_removed_objects_are_told() -> None:
    assert removed_of(REMOVED, b"i" * 16) == {b"a" * 32, b"b" * 32}
    assert removed_of(REMOVED, b"j" * 16) is None, "of another bundle"
    assert removed_of(REMOVED[:-1], b"i" * 16) is None
    assert removed_of(b"", b"i" * 16) is None
    assert pages_of(REMOVED, len(REMOVED)) is None
