# SPDX-License-Identifier: Apache-2.0
"""NIXL's lists of descriptors, what is prepared of them, and which memory ranges cover."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.faces.nixl.descriptors import RegDList, RemoteDList, XferDList
from sglang_mooncake.faces.nixl.names import InvalidParam, NotFound, Segment
from sglang_mooncake.faces.nixl.prepared import (
    BLOCKS_MAX,
    Columns,
    Cover,
    blocks_of,
    columns_of_runs,
)

DRAM = Segment.DRAM_SEG
U64_MAX = (1 << 64) - 1

rows = st.lists(st.tuples(*[st.integers(0, U64_MAX)] * 3), max_size=6)


def columns(*ranges: tuple[int, int]) -> Columns:
    return Columns.of_rows(np.array([(*one, 0) for one in ranges], np.uint64).reshape(-1, 3))


@given(rows)
def test_tuples_and_arrays_make_the_same_list(given_rows: list[tuple[int, int, int]]) -> None:
    of_tuples = XferDList(DRAM, given_rows)
    of_array = XferDList(DRAM, np.array(given_rows, np.uint64).reshape(-1, 3))
    one_by_one = XferDList(DRAM)
    for row in given_rows:
        one_by_one.addDesc(row)
    assert of_tuples == of_array == one_by_one
    assert list(of_tuples) == given_rows
    assert of_array.descCount() == len(given_rows)
    assert pickle.loads(pickle.dumps(of_tuples)) == of_tuples
    assert of_tuples != XferDList(Segment.VRAM_SEG, given_rows)


def test_what_nixls_own_lists_can() -> None:
    descs = [(1000, 105, 0), (2000, 30, 0), (1010, 20, 0)]
    made = XferDList(DRAM, descs)
    assert made.index((1010, 20, 0)) == 2
    made.remDesc(1)
    assert list(made) == [descs[0], descs[2]]
    made[1] = (5, 6, 7)
    assert made[1] == (5, 6, 7)
    with pytest.raises(NotFound, match="NIXL_ERR_NOT_FOUND"):
        made.index((1010, 20, 0))
    with pytest.raises(IndexError):
        made[2]
    with pytest.raises(TypeError):
        made[-1]
    made.clear()
    assert made.isEmpty()
    assert made.getType() is DRAM


def test_a_list_to_register_has_texts_which_trim_takes_off() -> None:
    made = RegDList(DRAM, [(1, 2, 3, "a"), (4, 5, 6, b"\xff")])
    made.append((7, 8, 9, ""))
    assert list(made) == [(1, 2, 3, b"a"), (4, 5, 6, b"\xff"), (7, 8, 9, b"")]
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.trim() == XferDList(DRAM, [(1, 2, 3), (4, 5, 6), (7, 8, 9)])
    assert RegDList(DRAM, 2)[1] == (0, 0, 0, b"")


def test_a_list_of_another_agents_memory_has_its_name() -> None:
    assert RemoteDList(DRAM, [(1, 2, 3, b"other")])[0] == (1, 2, 3, "other")


@pytest.mark.parametrize(
    "descs",
    [
        np.zeros((2, 4), np.uint64),
        np.zeros(3, np.uint64),
        np.zeros((2, 3), np.int32),
        np.zeros((3, 2), np.uint64).T,
        [(1, 2)],
    ],
)
def test_other_shapes_are_refused(descs: object) -> None:
    with pytest.raises(ValueError, match="must"):
        XferDList(DRAM, descs)


@pytest.mark.parametrize("descs", [[[1, 2, 3]], [(1, 2, "3")], [(-1, 2, 3)], [(1, 1 << 64, 0)], {}])
def test_what_are_no_descriptors_is_refused(descs: object) -> None:
    with pytest.raises(TypeError):
        XferDList(DRAM, descs)


def test_changing_a_list_leaves_the_callers_array_alone() -> None:
    array = np.arange(6, dtype=np.uint64).reshape(2, 3)
    made = XferDList(DRAM, array)
    made[0] = (9, 9, 9)
    assert array[0].tolist() == [0, 1, 2]
    array[1] = 7
    assert made[1] == (3, 4, 5)


run = st.tuples(*[st.integers(0, 1000)] * 2, st.just(0), st.integers(0, 99), st.integers(0, 9))


@given(st.lists(run, max_size=5))
def test_runs_are_their_blocks(runs: list[tuple[int, int, int, int, int]]) -> None:
    made = columns_of_runs(np.array(runs, np.uint64).reshape(-1, 5))
    expected = [
        (address + stride * i, nbytes)
        for address, nbytes, _, stride, count in runs
        for i in range(count)
    ]
    assert list(zip(made.starts.tolist(), made.sizes.tolist(), strict=True)) == expected


def test_runs_of_too_many_blocks_are_refused_before_any_is_made() -> None:
    with pytest.raises(ValueError, match="may be"):
        columns_of_runs(np.array([(0, 1, 0, 1, BLOCKS_MAX), (0, 1, 0, 1, U64_MAX)], np.uint64))
    with pytest.raises(ValueError, match="shape"):
        columns_of_runs(np.zeros((1, 5), np.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, list])
def test_indices_of_any_width_select(dtype: type) -> None:
    chosen = [2, 0, 2] if dtype is list else np.array([2, 0, 2], dtype)
    made = columns((10, 1), (20, 2), (30, 3)).selected(chosen)
    assert made.starts.tolist() == [30, 10, 30]
    assert made.sizes.tolist() == [3, 1, 3]


@pytest.mark.parametrize("indices", [[0, 3], [-1], np.array([1 << 40])])
def test_an_index_out_of_range_is_refused(indices: object) -> None:
    with pytest.raises(InvalidParam, match="out of range"):
        columns((10, 1), (20, 2), (30, 3)).selected(indices)


@pytest.mark.parametrize("indices", [np.zeros((1, 1), int), [0.5]])
def test_what_are_no_indices_is_refused(indices: object) -> None:
    with pytest.raises(ValueError, match="integers"):
        columns((10, 1)).selected(indices)


some_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6)


@given(some_ranges, some_ranges)
def test_covered_is_what_lies_in_the_union(
    ranges: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    there = {at for start, nbytes in ranges for at in range(start, start + nbytes)}
    outside = [
        i
        for i, (start, nbytes) in enumerate(asked)
        if not set(range(start, start + nbytes)) <= there
    ]
    cover = Cover(np.array(ranges, np.uint64).reshape(-1, 2))
    assert cover.first_outside(columns(*asked)) == (outside[0] if outside else None)


def test_sums_that_wrap_are_not_covered() -> None:
    cover = Cover(np.array([(100, 50)], np.uint64))
    assert cover.first_outside(columns((100, U64_MAX))) == 0
    assert cover.first_outside(columns((U64_MAX, 10))) == 0
    assert cover.first_outside(columns((100, 50))) is None


def test_both_sides_of_a_transfer_agree() -> None:
    here, there = columns((100, 8), (108, 8), (300, 4)), columns((900, 8), (908, 8), (50, 4))
    read = blocks_of(True, here, there)
    assert read.array.tolist() == [(900, 100, 16), (50, 300, 4)]
    assert blocks_of(False, here, there, is_merged=False).array.tolist() == [
        (100, 900, 8),
        (108, 908, 8),
        (300, 50, 4),
    ]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (columns((1, 2)), columns((1, 2), (3, 4))),
        (columns((1, 2)), columns((1, 3))),
        (columns(), columns()),
        (columns((1, 0)), columns((1, 0))),
        (columns((U64_MAX, 2)), columns((1, 2))),
    ],
)
def test_sides_that_do_not_fit_are_refused(here: Columns, there: Columns) -> None:
    with pytest.raises(InvalidParam):
        blocks_of(True, here, there)
