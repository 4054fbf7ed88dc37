# SPDX-License-Identifier: Apache-2.0
"""The compiled copies and checksums, against numpy and Python's xxhash."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shlex
import subprocess
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from store_makers import without_more_threads

import te
from kvstore import _bytes
from kvstore.objects.changes import ADDED, CHANGE, LOWER_TIER, PLACE, fingerprint_of
from kvstore.objects.copying import SHARED_BYTES, Copier
from kvstore.objects.headers import HEADER, HEADER_BYTES, LIVE, MAGIC, expected, expected_at
from kvstore.objects.pieces import Pieces
from te.transports.samehost.reach import NonceMemory

#: Around every border of the hash and of the copies.
LENGTHS = sorted(
    {1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 144, 239, 240, 241, 304, 320}
    | {1024 * n + more for n in (1, 2, 3, 32, 64) for more in (-1, 0, 1, 63, 64, 65)}
)
SIG = bytes(16)


def random_bytes(count: int, nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, nbytes]).integers(0, 256, (count, nbytes), np.uint8)


def rows_of(memory: np.ndarray, sizes: list[int]) -> Pieces:
    """Each row of an array, cut into pieces."""
    starts = memory.ctypes.data + np.arange(len(memory)) * memory.strides[0]
    offsets = np.cumsum([0, *sizes[:-1]])
    return Pieces(starts[:, None].astype(np.uint64) + offsets.astype(np.uint64), np.array(sizes))


def digests(memory: np.ndarray) -> list[int]:
    return [xxhash.xxh3_64_intdigest(row.tobytes()) for row in memory]


cuts = st.lists(st.integers(1, 3000), min_size=1, max_size=6)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_checksums_are_xxh3(nbytes: int) -> None:
    memory = random_bytes(3, nbytes + 5)[:, 3:-2]
    found = np.zeros(3, np.uint64)
    pieces = rows_of(memory, [nbytes])
    _bytes.checksums(pieces.addresses, pieces.nbytes, found)
    assert found.tolist() == digests(memory)


@given(cuts, st.integers(0, 40))
def test_of_pieces_and_on_the_way_into_a_slot_and_out_of_it(sizes: list[int], shift: int) -> None:
    memory = random_bytes(2, sum(sizes))
    copier, pieces = Copier(), rows_of(memory, sizes)
    assert copier.checksums(pieces).tolist() == digests(memory)
    slots = np.zeros((2, memory.shape[1] + shift), np.uint8)[:, shift:]
    places = rows_of(slots, [memory.shape[1]]).addresses.reshape(-1)
    assert copier.take(places, pieces).tolist() == digests(memory)
    assert (slots == memory).all()
    back = np.zeros_like(memory)
    headers = expected(np.zeros((2, 16), np.uint8), SIG, memory.shape[1], [1, 1])
    headers["checksum"] = digests(memory)
    at = rows_of(headers.view(np.uint8).reshape(2, -1), [HEADER_BYTES]).addresses.reshape(-1)
    for verify in (True, False):
        back[:] = 0
        codes = copier.bring(places, at, headers, rows_of(back, sizes[::-1]), verify)
        assert codes.tolist() == [_bytes.RIGHT] * 2
        assert (back == memory).all()


@pytest.mark.parametrize(
    ("field", "code"),
    [("checksum", _bytes.CORRUPTED)]
    + [(one, _bytes.MOVED) for one in HEADER.names or () if one != "checksum"],
)
@pytest.mark.parametrize("verify", [True, False])
def test_each_field_of_a_header_is_compared(field: str, code: int, verify: bool) -> None:
    memory, back = random_bytes(2, 5000), np.zeros((2, 5000), np.uint8)
    wanted = expected(np.zeros((2, 16), np.uint8), SIG, 5000, [1, 1])
    headers = wanted.copy()
    headers["checksum"] = digests(memory)
    raw = headers.view(np.uint8).reshape(2, -1)
    raw[1, HEADER.fields[field][1]] ^= 1  # type: ignore[index]
    at = rows_of(raw, [HEADER_BYTES]).addresses.reshape(-1)
    places = rows_of(memory, [5000])
    copier = Copier()
    codes = copier.bring(places.addresses.reshape(-1), at, wanted, rows_of(back, [5000]), verify)
    if field == "checksum" and not verify:
        code = _bytes.RIGHT
    assert codes.tolist() == [_bytes.RIGHT, code]
    back[:] = memory
    assert copier.judge(headers, wanted, rows_of(back, [5000]), verify).tolist() == codes.tolist()


def test_who_copies_much_does_so_alone_where_there_is_no_thread_to_help() -> None:
    memory = random_bytes(5, SHARED_BYTES // 4)
    copier = Copier()
    with without_more_threads():
        assert copier.checksums(rows_of(memory, [SHARED_BYTES // 4])).tolist() == digests(memory)
    copier.close()
    with pytest.raises(RuntimeError, match="were ended"):
        copier.checksums(rows_of(memory, [SHARED_BYTES // 4]))


def test_what_has_another_header_is_not_read_to_be_judged() -> None:
    """Nor is anything without checksums: it may be a GPU's memory."""
    wanted = expected(np.zeros((2, 16), np.uint8), SIG, 5000, [1, 1])
    nowhere = Pieces.whole([4096, 8192], 5000)
    assert Copier().judge(wanted, wanted, nowhere, False).tolist() == [_bytes.RIGHT] * 2
    other = expected(np.zeros((2, 16), np.uint8), SIG, 5000, [2, 2])
    assert Copier().judge(other, wanted, nowhere, True).tolist() == [_bytes.MOVED] * 2


def test_a_header_is_expected_as_it_is_written() -> None:
    keys = random_bytes(3, 16)
    made = expected(keys, b"s" * 16, 77, [5, 6, 1 << 31])
    for one, key, generation in zip(made, keys, (5, 6, 1 << 31), strict=True):
        assert one.item() == (
            MAGIC,
            LIVE,
            key.tobytes(),
            b"s" * 16,
            77,
            generation,
            fingerprint_of(b"s" * 16, 77),
            0,
        )
    with pytest.raises(ValueError, match="a signature of 3 bytes, and 16 are needed"):
        expected(keys, b"sss", 77, [5, 6, 7])


def test_slots_are_those_of_the_look_up() -> None:
    keys, places = random_bytes(3, 16), np.zeros(3, PLACE)
    places["slot"], places["generation"] = [9, 0, (1 << 32) - 2], [5, 6, 1 << 31]
    headers, slots = expected_at(keys, SIG, 77, places)
    assert slots.tolist() == [9, 0, (1 << 32) - 2]
    assert (headers == expected(keys, SIG, 77, [5, 6, 1 << 31])).all()
    every_other, alone = expected_at(keys[::2], SIG, 77, places[::2])
    assert alone.tolist() == [9, (1 << 32) - 2], "also of arrays with gaps"
    assert (every_other == headers[::2]).all()


def test_headers_are_filled_as_they_are_expected() -> None:
    keys, sums = random_bytes(2, 16), np.array([7, 1 << 63], np.uint64)
    headers, changes = np.zeros(4, HEADER), np.empty(2, CHANGE)
    headers["generation"] = [3, 4, 5, (1 << 32) - 1]
    before = headers.copy()

    def fill(signature: bytes = SIG, slots: tuple[int, int] = (3, 1)) -> None:
        at, fingerprint = np.array(slots, np.uint64), fingerprint_of(SIG, 77)
        raw = keys.tobytes()
        _bytes.fill(headers, at, raw, signature, 77, fingerprint, MAGIC, LIVE, sums, changes)

    for bad, why in (((3, 4), "slot 4 of 4"), ((1 << 63, 0), f"slot {1 << 63} of 4")):
        with pytest.raises(ValueError, match=why):
            fill(slots=bad)
    with pytest.raises(ValueError, match="a signature of 2 bytes, and 16 are needed"):
        fill(b"ab")
    assert (headers == before).all(), "nothing is written then"
    fill()
    wanted = expected(keys, SIG, 77, [0, 5])
    wanted["checksum"] = sums
    assert (headers[[3, 1]] == wanted).all()
    assert (headers[[0, 2]] == before[[0, 2]]).all()
    for change, key, slot, generation in zip(changes, keys, (3, 1), (0, 5), strict=True):
        told = (key.tobytes(), fingerprint_of(SIG, 77), slot, generation, ADDED)
        assert change.item() == told


@given(st.lists(st.tuples(st.sampled_from([0, 7, LOWER_TIER]), st.integers(0, 2)), max_size=6))
def test_additions_are_of_what_is_there(places: list[tuple[int, int]]) -> None:
    keys, changes = random_bytes(len(places), 16), np.empty(len(places), CHANGE)
    both = np.array(places, "<u4").reshape(-1, 2)
    slots, generations = both[:, 0].tobytes(), both[:, 1].tobytes()
    count = _bytes.additions(keys, 9, slots, generations, LOWER_TIER, changes)
    assert [one.item() for one in changes[:count]] == [
        (key.tobytes(), 9, slot, generation, ADDED)
        for key, (slot, generation) in zip(keys, places, strict=True)
        if generation or slot == LOWER_TIER
    ]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
    st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_copies_between_slots_and_pieces(
    places: list[int], sizes: list[int], offset: int, to_slots: bool
) -> None:
    """Byte by byte they are what the shapes say, and no two of them could be one."""
    step = sum(sizes)
    slots = np.array(places, np.uint64) * np.uint64(step) + np.uint64(10_000)
    near = np.arange(len(places), dtype=np.uint64) * np.uint64(step) + np.uint64(500)
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    pieces = Pieces(near[:, None] + 2 * starts, np.array(sizes))
    blocks = pieces.blocks(slots, offset, to_slots=to_slots)
    wanted = [
        (int(slot) + offset + int(start) + i, int(row[k]) + i)
        for slot, row in zip(slots, pieces.addresses, strict=True)
        for k, (start, size) in enumerate(zip(starts, sizes, strict=True))
        for i in range(size)
    ]
    far, here = ("dst", "src") if to_slots else ("src", "dst")
    array = blocks.array
    made = [
        (int(one[far]) + i, int(one[here]) + i) for one in array for i in range(int(one["nbytes"]))
    ]
    assert made == wanted
    for one, after in itertools.pairwise(array):
        assert any(one[side] + one["nbytes"] != after[side] for side in ("src", "dst"))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True),
    st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=4),
)
def test_headers_and_a_label_come_behind_their_objects(
    numbers: list[int], sizes: list[int]
) -> None:
    count, step, at = len(numbers), sum(sizes), np.array(numbers, np.uint64)
    near = np.arange(count, dtype=np.uint64) * np.uint64(2 * step) + np.uint64(500)
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
    pieces = Pieces(near[:, None] + starts, np.array(sizes))
    blocks = pieces.blocks_and_headers(at, 10_000, step, 90_000, 70_000)
    objects = pieces.blocks(at * np.uint64(step) + np.uint64(10_000), 0, to_slots=False)
    headers = [
        (90_000 + HEADER_BYTES * n, 70_000 + HEADER_BYTES * i) for i, n in enumerate(numbers)
    ]
    assert blocks.array[: len(objects)].tolist() == objects.array.tolist()
    assert blocks.array[len(objects) :].tolist() == [(*one, HEADER_BYTES) for one in headers]
    into = pieces.blocks(at * np.uint64(step) + np.uint64(10_000), 0, to_slots=True)
    more = pieces.blocks_and_one(at, 10_000, step, 70_000, 90_000, 3)
    assert more.array.tolist() == [*into.array.tolist(), (70_000, 90_000, 3)]


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=3), st.integers(0, 1 << 63))
@example([], 0)
@example([1], 0)
def test_objects_of_one_piece_are_what_objects_of_several_are(starts: list[int], n: int) -> None:
    if n == 0:
        with pytest.raises(ValueError, match="each at least one byte"):
            Pieces.whole(starts, n)
        return
    for nbytes in (n, np.uint64(n)):
        whole = Pieces.whole(starts, nbytes)  # type: ignore[arg-type]
        other = Pieces(np.array(starts, np.uint64).reshape(-1, 1), [nbytes])
        assert whole.addresses.tolist() == other.addresses.tolist() == [[one] for one in starts]
        assert whole.nbytes.tolist() == other.nbytes.tolist() == [n]
        assert (type(whole.object_bytes), whole.object_bytes) == (int, other.object_bytes)
    with pytest.raises(ValueError, match="read-only"):
        whole.nbytes[0] = 1


def test_copies_need_room() -> None:
    pieces, slots = Pieces.whole([1, 2], 1), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="2 blocks do not fit 1"):
        _bytes.lay(np.empty(1, te.BLOCK), slots, 1, 0, pieces.addresses, pieces.nbytes, True)
    room, shape = np.empty(3, te.BLOCK), (pieces.addresses, pieces.nbytes)
    with pytest.raises(ValueError, match="3 blocks do not fit 2"):
        _bytes.lay(np.empty(2, te.BLOCK), slots, 1, 0, *shape, True, (1, 2, 3))
    with pytest.raises(ValueError, match="4 blocks do not fit 3"):
        _bytes.lay_reads(room, slots, 0, 1, 0, pieces.addresses, pieces.nbytes, 0)


@given(
    st.lists(st.integers(1, 50), min_size=0, max_size=6),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=5),
)
def test_pieces_lie_in_ranges_or_not(steps: list[int], pieces: list[tuple[int, int]]) -> None:
    edges = np.cumsum(steps[: len(steps) // 2 * 2]).astype(np.uint64)
    starts, ends = np.ascontiguousarray(edges[::2]), np.ascontiguousarray(edges[1::2])
    for address, nbytes in pieces:
        one = Pieces.whole([address], nbytes)
        fits = any(
            start <= address and address + nbytes <= end
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )
        assert _bytes.covers(starts, ends, one.addresses, one.nbytes) == fits
    far = Pieces.whole([(1 << 64) - 5], 10)  # Its end would wrap.
    assert not _bytes.covers(starts, ends, far.addresses, far.nbytes)


@pytest.mark.parametrize("is_busy", [False, True])
def test_two_threads_copy_much_and_one_if_the_other_has_something_to_do(is_busy: bool) -> None:
    copier = Copier()
    memory = random_bytes(5, SHARED_BYTES // 4)
    slots = np.zeros_like(memory)
    places = rows_of(slots, [memory.shape[1]]).addresses.reshape(-1)
    if is_busy:
        end = threading.Event()
        copier._helper.submit(end.wait, 60.0)
    found = copier.take(places, rows_of(memory, [memory.shape[1]]))
    if is_busy:
        end.set()
    assert found.tolist() == digests(memory)
    assert (slots == memory).all()
    copier.close()


def test_what_does_not_fit_together_is_an_error() -> None:
    one, two = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
    with pytest.raises(ValueError, match="a buffer of 8 bytes, and 16 are needed"):
        _bytes.take(one, two, np.ones(1, np.uint64), np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="a piece of 0 bytes"):
        _bytes.checksums(one, np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="not C-contiguous"):
        _bytes.checksums(np.zeros(4, np.uint64)[::2], np.ones(1, np.uint64), two)


@pytest.mark.slow
def test_processors_without_avx2_find_the_same(tmp_path: Path) -> None:
    """Their way is not taken on most machines that run this."""
    source, library = tmp_path / "pairs.c", tmp_path / "pairs.so"
    header = Path(te.__file__).parent / "xxh3.h"
    source.write_text(
        f'#include "{header}"\n'
        "uint64_t of(const uint8_t *p, uint8_t *to, uint64_t n) {\n"
        "    xxh3_state state;\n"
        "    xxh3_begin(&state);\n"
        "    xxh3_pairs(&state, p, to, (n - 1) / XXH3_BLOCK);\n"
        "    return xxh3_end(&state, p + (n - 1) / XXH3_BLOCK * XXH3_BLOCK, n);\n"
        "}\n"
    )
    compiler = shlex.split(sysconfig.get_config_var("CC"))
    flags = ["-O2", "-shared", "-fPIC", "-Wno-unused-function"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True, timeout=60)
    of = ctypes.CDLL(str(library)).of
    of.restype, of.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
    for nbytes in (one for one in LENGTHS if one > 240):
        memory, to = random_bytes(1, nbytes), np.zeros((1, nbytes), np.uint8)
        for address in (None, to.ctypes.data):
            assert of(memory.ctypes.data, address, nbytes) == digests(memory)[0]
        whole = (nbytes - 1) // 1024 * 1024
        assert (to[:, :whole] == memory[:, :whole]).all()


@pytest.mark.parametrize("sizes", [[100], [64 << 10], [1, 4096, 70_000], [7] * 300, [200_000, 3]])
def test_another_process_s_memory_is_read_as_this_one_s(sizes: list[int]) -> None:
    memory = NonceMemory()
    nonce, source = memory.nonce, random_bytes(5, sum(sizes))
    came = np.zeros_like(source)
    slots, pieces = rows_of(came, [sum(sizes)]).addresses[:, 0], rows_of(source, sizes)
    found, failed = np.zeros(5, np.uint64), np.ones(5, np.uint32)

    def fetch(data: bytes) -> list[int]:
        where = np.ascontiguousarray(slots), pieces.addresses, pieces.nbytes
        _bytes.fetch(os.getpid(), nonce.address, data, *where, found, failed)
        return list(failed.tolist())

    assert fetch(nonce.data) == [0] * 5
    assert (came == source).all()
    assert found.tolist() == digests(source)
    pieces.addresses[2, -1] = 1
    assert fetch(nonce.data) == [0, 0, errno.EFAULT, 0, 0]
    assert fetch(bytes(len(nonce.data)))[:2] == [errno.ESRCH] * 2
    with pytest.raises(ValueError, match="a nonce of 0 bytes"):
        fetch(b"")
