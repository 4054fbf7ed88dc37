# SPDX-License-Identifier: Apache-2.0
"""The compiled table against a dict, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore._table import Mirror, Reader, Table, digests_of_hex, sole_owner
from kvstore.client.pool import keys_of
from kvstore.objects.changes import (
    ADDED,
    CHANGE,
    LOWER_TIER,
    OWNERS_MAX,
    PLACE,
    REMOVED,
    Found,
    Records,
    fingerprint_of,
    keys_of_digests,
    keys_of_hex,
)
from kvstore.protocol.mapped import Mapped

BOUND_S = 60.0
EVERYBODY = bytes([1]) * OWNERS_MAX
#: Few keys that differ in their last byte alone, so that probes collide and keys meet again.
KEYS = [bytes(15) + bytes([i]) for i in range(12)]


def change(key: bytes, fingerprint: int, slot: int, generation: int, op: int) -> Records:
    return np.array([(np.void(key), fingerprint, slot, generation, op)], CHANGE)


def look(table: Reader, keys: list[bytes], fingerprint: int, ranks: bytes = EVERYBODY) -> Records:
    places = np.empty(len(keys), PLACE)
    found = table.look_up(b"".join(keys), fingerprint, ranks, places)
    assert found == (places["found"] == Found.HERE).sum()
    return places


def cut(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


events = st.tuples(
    st.integers(0, 2),
    st.sampled_from(KEYS),
    st.integers(1, 2),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([ADDED, REMOVED]),
)


@pytest.mark.slow
@given(st.lists(events | st.integers(0, 2), max_size=60))
def test_it_knows_what_a_dict_knows(steps: list[tuple[int, ...] | int]) -> None:
    """A number drops that owner; everything else is a change of one."""
    table = Table()
    mirror = mirror_of(table)
    model: dict[tuple[int, bytes, int], tuple[int, int]] = {}
    seen = table.changes, dict(model)
    for step in steps:
        assert table.changes > seen[0] or model == seen[1]
        assert mirror.changes == table.changes
        seen = table.changes, dict(model)
        if isinstance(step, int):
            gone = [one for one in model if one[0] == step]
            assert table.drop(step) == len(gone)
            for one in gone:
                del model[one]
            continue
        owner, key, fingerprint, slot, generation, op = step
        table.apply(owner, change(key, fingerprint, slot, generation, op))  # type: ignore[arg-type]
        if op == ADDED:
            model[owner, key, fingerprint] = (slot, generation)  # type: ignore[index]
        elif model.get((owner, key, fingerprint)) == (slot, generation):  # type: ignore[arg-type]
            del model[owner, key, fingerprint]  # type: ignore[arg-type]
    assert len(table) == len(model)
    for owner in range(3):
        assert table.count(owner) == sum(one[0] == owner for one in model)
        ranks = bytearray(OWNERS_MAX)
        ranks[owner] = 1
        listed = sorted(key for one, key, _ in model if one == owner)
        assert sorted(cut(table.keys(ranks))) == listed == sorted(cut(mirror.keys(ranks)))
        for fingerprint in (1, 2):
            places = look(table, KEYS, fingerprint, bytes(ranks))
            for key, place in zip(KEYS, places, strict=True):
                here = model.get((owner, key, fingerprint))
                if here is not None:
                    assert (place["slot"], place["generation"]) == here
                    assert (place["found"], place["owner"]) == (Found.HERE, owner)
                else:
                    assert place["found"] != Found.HERE


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_it_grows_and_forgets_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, count = Table(), 5000
    changes = np.zeros(count, CHANGE)
    changes["key"] = rng.integers(0, 256, (count, 16), np.uint8).view("V16").reshape(-1)
    changes["fingerprint"], changes["slot"], changes["op"] = 7, np.arange(count), ADDED
    table.apply(3, changes)
    gone = rng.random(count) < 0.5
    removals = changes[gone].copy()
    removals["op"] = REMOVED
    table.apply(3, removals)
    places = np.empty(count, PLACE)
    assert table.look_up(changes["key"].tobytes(), 7, EVERYBODY, places) == (~gone).sum()
    assert (places["slot"][~gone] == np.flatnonzero(~gone)).all()
    assert (places["found"][gone] == Found.MISSING).all()


def test_many_shards_grow_and_lose_an_owner() -> None:
    """200 entries a shard: each has grown several times, with what was removed in between."""
    table, count = Table(), 200_000
    rng = np.random.default_rng(5)
    changes = np.zeros(count, CHANGE)
    changes["key"] = rng.integers(0, 256, (count, 16), np.uint8).view("V16").reshape(-1)
    changes["fingerprint"], changes["slot"], changes["op"] = 7, np.arange(count), ADDED
    for owner in (1, 2):
        table.apply(owner, changes)
        again = changes[::3].copy()
        again["op"] = REMOVED
        table.apply(owner, again)
        again["op"] = ADDED
        table.apply(owner, again)
    assert len(table) == 2 * count
    assert sorted(cut(table.keys(EVERYBODY))) == sorted(2 * cut(changes["key"].tobytes()))
    assert table.drop(1) == count
    assert (table.count(1), table.count(2), len(table)) == (0, count, count)
    places = np.empty(count, PLACE)
    assert table.look_up(changes["key"].tobytes(), 7, EVERYBODY, places) == count
    assert (places["slot"] == np.arange(count)).all()
    assert set(places["owner"]) == {2}


def test_adding_and_removing_for_ever_takes_no_more_memory() -> None:
    table = Table()
    sizes = set()
    for i in range(40_000):
        if i >= 20_000:
            sizes.add(table.nbytes)
        key = i.to_bytes(16, "little")
        table.apply(0, change(key, 1, i, 1, ADDED))
        if i >= 100:
            table.apply(0, change((i - 100).to_bytes(16, "little"), 1, i - 100, 1, REMOVED))
    assert len(table) == 100
    assert len(sizes) == 1


def test_the_owner_of_the_highest_rank_is_taken_and_none_of_rank_0() -> None:
    table = Table()
    for owner in (1, 2, 3):
        table.apply(owner, change(KEYS[0], 1, owner, 9, ADDED))
    ranks = bytearray(OWNERS_MAX)
    assert look(table, KEYS[:1], 1, bytes(ranks))[0]["found"] == Found.MISSING
    ranks[1], ranks[2], ranks[3] = 1, 3, 2
    assert look(table, KEYS[:1], 1, bytes(ranks))[0]["owner"] == 2
    ranks[2] = 0
    assert look(table, KEYS[:1], 1, bytes(ranks))[0]["owner"] == 3


def test_a_key_under_another_fingerprint_alone_is_told_apart() -> None:
    table = Table()
    table.apply(1, change(KEYS[0], 1, 5, 1, ADDED))
    assert look(table, KEYS[:2], 2)["found"].tolist() == [Found.OTHER, Found.MISSING]
    table.apply(2, change(KEYS[0], 2, 6, 1, ADDED))
    assert look(table, KEYS[:1], 2)["found"].tolist() == [Found.HERE]


def test_an_object_that_has_moved_outlives_the_news_of_its_former_end() -> None:
    table = Table()
    table.apply(1, change(KEYS[0], 1, 5, 1, ADDED))
    table.apply(1, change(KEYS[0], 1, 9, 2, ADDED))
    table.apply(1, change(KEYS[0], 1, 5, 1, REMOVED))
    assert look(table, KEYS[:1], 1)[0]["slot"] == 9


def test_what_is_no_change_is_refused() -> None:
    table = Table()
    with pytest.raises(ValueError, match="33 bytes are no whole number of changes"):
        table.apply(0, bytes(33))
    with pytest.raises(ValueError, match="change 0 has the operation 0"):
        table.apply(0, bytes(32))
    for call in (
        lambda: table.apply(1024, b""),
        lambda: table.drop(1024),
        lambda: table.count(1024),
    ):
        with pytest.raises(ValueError, match="owner 1024 must be below 1024"):
            call()
    with pytest.raises(ValueError, match="17 bytes of keys"):
        table.look_up(bytes(17), 1, EVERYBODY, np.empty(1, PLACE))
    with pytest.raises(ValueError, match="16 bytes of keys, 32 of places"):
        table.look_up(bytes(16), 1, EVERYBODY, np.empty(2, PLACE))
    for call in (
        lambda: table.look_up(bytes(16), 1, bytes(3), np.empty(1, PLACE)),
        lambda: table.keys(bytes(3)),
    ):
        with pytest.raises(ValueError, match="3 ranks, and 1024 are needed"):
            call()


@given(st.lists(st.binary(min_size=16, max_size=40), max_size=5))
def test_digests_are_read_from_hex(digests: list[bytes]) -> None:
    texts = [one.hex() for one in digests]
    assert keys_of_hex(texts).tobytes() == b"".join(one[:16] for one in digests)
    assert keys_of_hex([one.upper() for one in texts]).tobytes() == keys_of_hex(texts).tobytes()
    assert (keys_of_digests(digests) == keys_of_hex(texts)).all()


def test_what_is_no_digest_is_refused() -> None:
    good = "ab" * 32
    for bad in ("ab" * 15, "g" + good[1:], good[:31] + "ü" + good[32:]):
        with pytest.raises(ValueError, match="key 1 is"):
            digests_of_hex([good, bad])
    with pytest.raises(ValueError, match="key 0 is of bytes, not a digest in hex"):
        digests_of_hex([b"ab" * 32])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="has 15 bytes, and needs 16"):
        keys_of_digests([bytes(16), bytes(15)])


def test_forms_depend_on_signature_and_size() -> None:
    fingerprints = {fingerprint_of(bytes([i]) * 16, n) for i in range(10) for n in (1, 2, 1 << 33)}
    assert len(fingerprints) == 30


@given(
    st.lists(
        st.tuples(
            st.sampled_from([3, LOWER_TIER]),
            st.integers(0, 2),
            st.sampled_from([Found.MISSING, Found.HERE, Found.OTHER, Found.SILENT]),
        ),
        max_size=4,
    )
)
def test_one_owner_has_all_of_them_in_memory_or_not(found: list[tuple[int, int, int]]) -> None:
    places = np.array([(slot, 1, owner, one, 1, 0) for slot, owner, one in found], PLACE)
    owners = {owner for slot, owner, one in found if slot != LOWER_TIER and one == Found.HERE}
    all_in_memory = all(slot != LOWER_TIER and one == Found.HERE for slot, _, one in found)
    sole = owners.pop() if all_in_memory and len(owners) == 1 else -1
    assert sole_owner(places) == sole


def mirror_of(table: Table) -> Mirror:
    return Mirror(Mapped(table.fd).memory)


def test_another_process_reads_what_the_table_has() -> None:
    table = Table()
    mirror = mirror_of(table)
    assert look(mirror, KEYS, 1)["found"].tolist() == [Found.MISSING] * len(KEYS)
    for number, key in enumerate(KEYS):
        table.apply(0, change(key, 1, number, 7, ADDED))
    table.set_rank(0, 3)
    assert (look(mirror, KEYS, 1) == look(table, KEYS, 1)).all()
    assert len(mirror) == len(table) == len(KEYS)
    assert mirror.ranks == table.ranks == bytes([3]).ljust(OWNERS_MAX, b"\0")
    table.drop(0)
    assert look(mirror, KEYS, 1)["found"].tolist() == [Found.MISSING] * len(KEYS)
    with pytest.raises(ValueError, match="below"):
        table.set_rank(OWNERS_MAX, 1)


def test_what_is_no_table_is_not_read() -> None:
    with pytest.raises(ValueError, match="no table"):
        Mirror(bytes(100))
    with pytest.raises(ValueError, match="no table of the store"):
        Mirror(bytes(1 << 20))


@pytest.mark.parametrize("field", ["number", "entries", "mask"])
def test_a_shard_whose_owner_died_in_a_change_costs_a_miss(field: str) -> None:
    """Its number is odd, or what it says cannot be. A list without its keys would say that they are
    gone: there is none."""
    table = Table()
    for key in KEYS:
        table.apply(0, change(key, 1, 0, 7, ADDED))
    memory = bytearray(1 << 20)
    memory[:] = memoryview(Mapped(table.fd).memory)[: len(memory)]
    assert (look(Mirror(memory), KEYS, 1)["found"] == Found.HERE).all()
    shards = np.frombuffer(memory, "<u8", 1024 * 8, 8192).reshape(1024, 8)
    used = shards[:, 1] != 0
    at = {"number": 0, "entries": 1, "mask": 2}[field]
    shards[used, at] = {"number": shards[used, 0] + 1, "entries": 1 << 60, "mask": 1 << 40}[field]
    assert (look(Mirror(memory), KEYS, 1)["found"] == Found.MISSING).all()
    assert keys_of(Mirror(memory), EVERYBODY, None) is None
    assert keys_of(table, EVERYBODY, None) is not None


def read_until_the_end(table: Table) -> None:
    """By a process, while another one writes, until that one has set the last rank. A reader waits
    for no writer that has lost its processor in the middle of a change: there it may find nothing,
    and has to find it when it looks again."""
    mirror = mirror_of(table)
    numbers = np.frombuffer(Mapped(table.fd).memory, "<u8", 1024 * 8, 8192).reshape(1024, 8)[:, 0]
    complete_s = time.monotonic()
    while not mirror.ranks[-1]:
        is_changing = bool((numbers & 1).any())
        places = look(mirror, KEYS, 1)
        keys = mirror.keys(EVERYBODY)
        is_changing |= bool((numbers & 1).any())
        assert (places["slot"] == places["generation"]).all()
        assert keys is None or set(KEYS) <= set(cut(keys)), "a list has all or is none"
        if keys is not None and (places["found"] == Found.HERE).all():
            complete_s = time.monotonic()
        else:
            assert is_changing
            assert time.monotonic() < complete_s + BOUND_S


@pytest.mark.slow
def test_it_is_read_while_it_changes() -> None:
    """Objects that stay are found all the time, however often their shards grow. Slot and
    generation are of one change."""
    table = Table()
    for key in KEYS:
        table.apply(0, change(key, 1, 1, 1, ADDED))
    rng = np.random.default_rng(3)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            read_until_the_end(table)
            status = 0
        finally:
            os._exit(status)  # Else it would go on with the tests.
    try:
        for turn in range(2, 12):
            many = np.zeros(20_000, CHANGE)
            many["key"] = rng.integers(0, 256, (len(many), 16), np.uint8).view("V16").reshape(-1)
            many["fingerprint"], many["op"] = 1, ADDED
            table.apply(1, many)
            for key in KEYS:
                table.apply(0, change(key, 1, turn, turn, ADDED))
            table.drop(1)
    finally:
        table.set_rank(OWNERS_MAX - 1, 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


NAME = "kvstore-table"  # of its file


def test_a_core_dump_leaves_it_out() -> None:
    """Else each hole of its file would get a page then."""
    table = Table()
    memory = Mapped(table.fd)
    smaps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after.splitlines()[0].split() for before, after in pairwise(smaps) if NAME in before]
    assert len(flags) >= 2, "the table's own, and the other one's"
    assert all("dd" in one for one in flags)
    del memory


LOCKED = """
import ctypes, os
import numpy as np
from kvstore._table import Table
from kvstore.objects.changes import ADDED, CHANGE
MCL_FUTURE, MCL_ONFAULT = 2, 4
libc = ctypes.CDLL(None, use_errno=True)
if libc.mlockall(MCL_FUTURE | MCL_ONFAULT):
    raise OSError(ctypes.get_errno(), "mlockall")
table = Table()
# Of a shard each: the second one gets the first one's blocks.
for top, count in ((1, 6000), (2, 1500)):
    changes = np.zeros(count, CHANGE)
    key = np.zeros((count, 2), "<u8")
    # The upper bits of (key * constant) say which shard it is: its inverse gives the key.
    inverse = pow(0xD6E8FEB86659FD93, -1, 1 << 64)
    wanted = [(top << 54 | row) * inverse % (1 << 64) for row in range(count)]
    key[:, 0] = wanted
    changes["key"] = key.view("V16")[:, 0]
    changes["slot"] = np.arange(count)
    changes["op"] = ADDED
    table.apply(0, changes)
assert len(table) == 7500 == table.count(0)
"""


def test_memory_that_is_locked_is_used_again_as_zeros() -> None:
    """MADV_REMOVE cannot free it."""
    done = subprocess.run(
        [sys.executable, "-c", LOCKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
