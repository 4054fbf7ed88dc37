# SPDX-License-Identifier: Apache-2.0
"""A tier above another: what is told to be there can be read, whatever either tier does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from store_makers import contents, until

from kvstore.memory.policies import POLICIES
from kvstore.tiers import stacked
from kvstore.tiers.base import Found, Laid, Tier, Usage, Wanted, Written
from kvstore.tiers.bucket import Bucket, BucketError
from kvstore.tiers.disk import Disk
from kvstore.tiers.objects import Objects
from kvstore.tiers.stacked import Stacked

MIB = 1 << 20
N, NBYTES = 40, 100_000
OBJECTS = contents(N, NBYTES)
NAMES = [bytes([i]) * 32 for i in range(N)]
LARGEST = 256 << 10
TIMEOUT_S = 60.0


def laid(row: int) -> Laid:
    raw = OBJECTS[row].tobytes()
    memory = stacked._pages(NBYTES)
    memory[:NBYTES] = raw
    return Laid(NAMES[row], NBYTES, xxhash.xxh3_64_intdigest(raw), memory)


def put(tier: Tier, rows: Any) -> Written:
    return tier.write([laid(row) for row in rows])


def right(tier: Tier, rows: Any) -> list[bool]:
    """Which objects are read; what is has the right bytes."""
    rows = list(rows)
    wanted = [Wanted(NAMES[row], NBYTES, stacked._pages(NBYTES)) for row in rows]
    found = tier.read(wanted)
    for row, one, checksum in zip(rows, wanted, found, strict=True):
        assert checksum is None or bytes(one.memory[:NBYTES]) == OBJECTS[row].tobytes()
    return [one is not None for one in found]


# -- what a stack believes, with tiers that do what they are told to


class FakeTier:
    """A dictionary with room for so many objects, which drops the oldest."""

    batch_max = 3

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[bytes, Laid] = {}
        self.is_broken = False
        self.failed = 0
        self.before_write: Callable[[], None] = lambda: None

    def found(self) -> Sequence[Found]:
        return [Found(one.name, one.nbytes) for one in self.held.values()]

    def write(self, objects: Sequence[Laid]) -> Written:
        assert 0 < len(objects) <= self.batch_max
        hook, self.before_write = self.before_write, lambda: None
        hook()
        if self.is_broken:
            self.failed += 1
            return Written([False] * len(objects), [])
        gone = []
        for one in objects:
            self.held.pop(one.name, None)
            while len(self.held) >= self.capacity:
                oldest = next(iter(self.held))
                del self.held[oldest]
                gone.append(oldest)
            self.held[one.name] = one
        stored = [one.name in self.held for one in objects]
        return Written(stored, [name for name in gone if name not in self.held])

    def read(self, objects: Sequence[Wanted], *, is_use: bool = True) -> Sequence[int | None]:
        found: list[int | None] = []
        for one in objects:
            held = self.held.get(one.name)
            if held is None or self.is_broken:
                self.held.pop(one.name, None)  # As a tier that cannot read it.
                found.append(None)
            else:
                one.memory[:NBYTES] = held.memory[:NBYTES]
                found.append(held.checksum)
        return found

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.held.pop(name, None)

    def usage(self) -> Usage:
        return Usage(
            len(self.held), NBYTES * len(self.held), NBYTES * self.capacity, self.failed, 0
        )

    def close(self) -> None:
        pass


ROWS = st.integers(0, 3)
CALLS = st.one_of(
    st.tuples(st.just("write"), st.lists(ROWS, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("remove"), st.lists(ROWS, max_size=2)),
    st.tuples(st.just("read"), st.lists(ROWS, min_size=1, max_size=3, unique=True)),
)
STEPS = st.one_of(
    CALLS,
    st.tuples(st.just("turn"), st.just([])),
    st.tuples(st.sampled_from(["break", "mend"]), st.sampled_from([["upper"], ["lower"]])),
    # A call while the thread waits for the lower tier.
    st.tuples(st.just("turn with"), CALLS),
)


@pytest.mark.slow
@pytest.mark.pure
@settings(max_examples=500)
@given(st.integers(1, 3), st.integers(1, 5), st.lists(STEPS, max_size=30))
def test_what_is_told_to_be_there_can_be_read(
    upper_holds: int, lower_holds: int, steps: list[tuple[str, Any]]
) -> None:
    upper, lower = FakeTier(upper_holds), FakeTier(lower_holds)
    tiers = {"upper": upper, "lower": lower}
    stack = Stacked(upper, lower)
    told: set[int] = set()
    removed: set[int] = set()

    def call(what: str, rows: list[int]) -> None:
        if what == "write":
            written = put(stack, rows)
            told.difference_update(NAMES.index(name) for name in written.gone)
            for row, is_stored in zip(rows, written.stored, strict=True):
                if is_stored:
                    told.add(row)
                    removed.discard(row)
        elif what == "remove":
            stack.remove([NAMES[row] for row in rows])
            told.difference_update(rows)
            removed.update(rows)
        else:
            found = right(stack, rows)
            told.difference_update(
                row for row, is_found in zip(rows, found, strict=True) if not is_found
            )
            assert not removed & {
                row for row, is_found in zip(rows, found, strict=True) if is_found
            }

    for what, more in steps:
        if what == "turn":
            stack._turn()
        elif what == "turn with":
            lower.before_write = lambda more=more: call(*more)
            stack._turn()
            lower.before_write = lambda: None
        elif what in ("break", "mend"):
            tiers[more[0]].is_broken = what == "break"
        else:
            call(what, more)

    upper.is_broken = lower.is_broken = False
    for _ in range(30):
        stack._turn()
    held = upper.held.keys() | lower.held.keys()
    assert not held & {NAMES[row] for row in removed}, "what was removed is in no tier"
    assert not stack._where.has_waiting
    told.difference_update(NAMES.index(name) for name in stack._where.gone())
    assert {NAMES[row] for row in told} <= held, "what was not told to be gone is there"
    assert right(stack, sorted(told)) == [True] * len(told)


def while_it_is_copied(upper_holds: int, call: Callable[[Stacked], object]) -> Stacked:
    """A stack of which object 1 was being copied during a call."""
    upper, lower = FakeTier(upper_holds), FakeTier(9)
    stack = Stacked(upper, lower)
    put(stack, [1])
    lower.before_write = lambda: call(stack)
    stack._turn()
    return stack


@pytest.mark.pure
def test_what_leaves_the_upper_tier_while_it_is_copied_is_not_gone() -> None:
    stack = while_it_is_copied(1, lambda stack: put(stack, [2]))
    assert stack._where.gone() == []
    assert right(stack, [1, 2]) == [True, True]


@pytest.mark.pure
def test_what_is_removed_while_it_is_copied_is_removed_from_both() -> None:
    stack = while_it_is_copied(9, lambda stack: stack.remove([NAMES[1]]))
    assert right(stack, [1]) == [False]
    stack._turn()
    assert stack._lower.found() == []
    assert len(stack._where) == 0


@pytest.mark.pure
def test_what_is_removed_and_written_again_while_it_is_copied_is_copied_again() -> None:
    def call(stack: Stacked) -> None:
        stack.remove([NAMES[1]])
        put(stack, [1])

    stack = while_it_is_copied(9, call)
    stack._turn()
    assert len(stack._lower.found()) == 1
    assert right(stack, [1]) == [True]


@pytest.mark.pure
def test_what_is_written_again_and_leaves_before_the_copy_is_removed_is_gone() -> None:
    told: list[bytes] = []

    def call(stack: Stacked) -> None:
        stack.remove([NAMES[1]])
        put(stack, [1])
        told.extend(put(stack, [2]).gone)

    stack = while_it_is_copied(1, call)
    assert told == [NAMES[1]]
    stack._turn()
    assert right(stack, [1, 2]) == [False, True]


@pytest.mark.pure
def test_a_copy_is_no_use_and_a_read_is() -> None:
    """Copies would make every object one that was wanted twice."""
    seen: list[bool] = []

    class Watched(FakeTier):
        def read(self, objects: Sequence[Wanted], *, is_use: bool = True) -> Sequence[int | None]:
            seen.append(is_use)
            return super().read(objects, is_use=is_use)

    stack = Stacked(Watched(9), FakeTier(9))
    put(stack, [1, 2])
    stack._turn()
    assert right(stack, [1]) == [True]
    assert seen == [False, True]


@pytest.mark.pure
def test_a_lower_tier_that_stores_nothing_is_asked_again() -> None:
    lower = FakeTier(9)
    stack = Stacked(FakeTier(9), lower)
    lower.is_broken = True
    put(stack, [1, 2])
    assert not stack._turn()
    lower.is_broken = False
    assert stack._turn()
    assert set(lower.held) == {NAMES[1], NAMES[2]}


@pytest.mark.pure
def test_what_is_read_from_below_lies_above_again() -> None:
    upper, lower = FakeTier(2), FakeTier(9)
    stack = Stacked(upper, lower)
    for row in range(4):
        put(stack, [row])
        stack._turn()
    assert set(upper.held) == {NAMES[2], NAMES[3]}
    assert right(stack, [0]) == [True]
    stack._turn()
    assert set(upper.held) == {NAMES[3], NAMES[0]}
    assert len(stack._where) == 4


@pytest.mark.pure
def test_what_is_read_from_below_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "RAISED_BYTES", 2 * NBYTES)
    lower = FakeTier(9)
    for row in range(4):
        lower.held[NAMES[row]] = laid(row)
    stack = Stacked(FakeTier(9), lower)
    stack._where.found([], lower.found())
    assert right(stack, range(4)) == [True] * 4
    assert len(stack._raised) == 2
    stack._turn()
    assert stack._raised_bytes == 0


# -- a real disk above a real object store


@contextmanager
def stack_at(path: Path, store: Any, disk_size: int = 4 * MIB) -> Iterator[Stacked]:
    policy = POLICIES["arc"]
    disk = Disk(path / "disk", disk_size, LARGEST, policy)
    objects = Objects(Bucket(store, TIMEOUT_S), "the store", 32 * MIB, LARGEST, policy)
    stack = Stacked(disk, objects)
    try:
        yield stack
    finally:
        stack.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "LINGER_S", 0.0)
    monkeypatch.setattr(stacked, "RETRY_S", 0.01)


def copied(stack: Stacked) -> bool:
    where = stack._where
    with stack._lock:
        return not (where.has_waiting or any(one & 4 for one in where._where.values()))


def test_what_the_disk_drops_comes_from_the_object_store(tmp_path: Path) -> None:
    with stack_at(tmp_path, MemoryStore()) as stack:
        assert stack.found() == []
        for row in range(N):
            assert put(stack, [row]) == Written([True], [])
            until(lambda: copied(stack), "the copy")
        assert stack._upper.usage().objects < N
        assert stack.usage().objects == stack._lower.usage().objects == N
        assert right(stack, range(N)) == [True] * N
        assert stack.usage().failed == stack.usage().corrupted == 0


def test_a_restart_finds_both_tiers_and_copies_the_rest(tmp_path: Path) -> None:
    store = MemoryStore()
    with stack_at(tmp_path, store) as stack:
        stack.found()
        for row in range(N - 5):
            put(stack, [row])
            until(lambda: copied(stack), "the copy")
        stack.remove(NAMES[:3])
    disk = Disk(tmp_path / "disk", 4 * MIB, LARGEST, POLICIES["arc"])
    disk.found()
    put(disk, range(N - 5, N))  # As by a process that was killed before it copied them.
    disk.close()
    with stack_at(tmp_path, store) as stack:
        found = stack.found()
        assert {one.name for one in found} == set(NAMES[3:])
        assert len(found) == N - 3
        until(lambda: copied(stack), "the copies")
        assert stack._lower.usage().objects == N - 3
    (tmp_path / "disk").rename(tmp_path / "lost")
    with stack_at(tmp_path, store) as stack:
        assert len(stack.found()) == N - 3
        assert right(stack, range(N)) == [False] * 3 + [True] * (N - 3)


def test_an_object_store_that_fails_costs_what_the_disk_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = threading.Event()
    fails.set()

    class Failing(Bucket):
        async def put(self, name: str, data: bytes) -> None:
            if fails.is_set():
                raise BucketError("503")
            await super().put(name, data)

    monkeypatch.setitem(globals(), "Bucket", Failing)
    with stack_at(tmp_path, MemoryStore()) as stack:
        stack.found()
        gone: set[bytes] = set()
        for row in range(N):
            written = put(stack, [row])
            assert written.stored == [True]
            gone |= set(written.gone)

        def is_told() -> bool:
            """What the disk drops while it is copied is gone once that copy has failed."""
            gone.update(stack._where.gone())
            return bool(gone)

        until(is_told, "the disk has dropped some")
        assert len(gone) < N
        fails.clear()
        until(lambda: copied(stack), "the copies")
        gone |= set(stack._where.gone())  # Dropped by the disk while their copies failed.
        there = [row for row in range(N) if NAMES[row] not in gone]
        assert right(stack, there) == [True] * len(there)
        assert stack._lower.usage().objects == len(there)


def test_a_tier_that_raises_is_logged_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lower = FakeTier(9)
    lower.before_write = lambda: (_ for _ in ()).throw(RuntimeError("a bug"))
    stack = Stacked(FakeTier(9), lower)
    stack.found()
    put(stack, [1])
    until(lambda: NAMES[1] in lower.held, "the second attempt")
    stack.close()
    assert "a tier raised" in caplog.text


@pytest.mark.slow
def test_reads_writes_and_removals_beside_each_other(tmp_path: Path) -> None:
    """Whatever is read is right, and what was removed is not read."""
    stop = threading.Event()
    wrong: list[BaseException] = []
    removed_from = N // 2

    def reads(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                right(stack, rng.choice(N, 4, replace=False))
        except BaseException as exc:  # noqa: BLE001 - told by the test's thread
            wrong.append(exc)

    with stack_at(tmp_path, MemoryStore(), 2 * MIB) as stack:
        stack.found()
        readers = [threading.Thread(target=reads, args=(seed,)) for seed in range(2)]
        for one in readers:
            one.start()
        for turn in range(6):
            for row in range(N):
                put(stack, [row])
                if turn % 2:
                    stack.remove([NAMES[(7 * row) % N]])
        stack.remove(NAMES[removed_from:])
        until(lambda: copied(stack) and not stack._where.has_unwanted, "what waits")
        stop.set()
        for one in readers:
            one.join()
        assert not wrong
        assert right(stack, range(removed_from, N)) == [False] * (N - removed_from)
