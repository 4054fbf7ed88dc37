# SPDX-License-Identifier: Apache-2.0
"""Descriptors: what they may be, and that merging changes the shape but not the copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te import BLOCK, Blocks

pytestmark = pytest.mark.pure


def mapping(blocks: Blocks) -> list[tuple[int, int]]:
    """(src, dst) address of each byte, in order: the oracle."""
    return [
        (int(src) + offset, int(dst) + offset)
        for src, dst, nbytes in blocks.array
        for offset in range(int(nbytes))
    ]


@st.composite
def some_blocks(draw: st.DrawFn) -> Blocks:
    """Blocks that often continue the one before, on one side or on both."""
    rows: list[tuple[int, int, int]] = []
    for _ in range(draw(st.integers(0, 12))):
        src, dst = draw(st.integers(0, 200)), draw(st.integers(0, 200))
        if rows:
            before = rows[-1]
            src = before[0] + before[2] if draw(st.booleans()) else src
            dst = before[1] + before[2] if draw(st.booleans()) else dst
        rows.append((src, dst, draw(st.integers(1, 20))))
    return Blocks(np.array(rows, BLOCK))


@pytest.mark.slow
@given(some_blocks())
def test_merge_keeps_the_copies_and_leaves_nothing_to_merge(blocks: Blocks) -> None:
    merged = blocks.merged()
    assert mapping(merged) == mapping(blocks)
    assert merged.total_nbytes == blocks.total_nbytes
    for one, two in zip(merged.array[:-1], merged.array[1:], strict=True):
        joined = [int(one[side]) + int(one["nbytes"]) == int(two[side]) for side in ("src", "dst")]
        assert not all(joined)


@pytest.mark.slow
@given(st.lists(some_blocks(), max_size=4))
def test_concat_keeps_order(parts: list[Blocks]) -> None:
    joined = Blocks.concat(parts)
    assert mapping(joined) == [pair for part in parts for pair in mapping(part)]
    assert joined.total_nbytes == sum(part.total_nbytes for part in parts)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=4),
    st.lists(st.tuples(*[st.integers(0, 50)] * 2, st.integers(1, 9)), max_size=5),
    st.booleans(),
)
def test_a_grid_is_every_base_with_every_offset(
    bases: list[tuple[int, int]], offsets: list[tuple[int, int, int]], scalar: bool
) -> None:
    if scalar:
        offsets = [(src, dst, 7) for src, dst, _ in offsets]
    blocks = Blocks.grid(
        [base[0] for base in bases],
        [offset[0] for offset in offsets],
        [base[1] for base in bases],
        [offset[1] for offset in offsets],
        7 if scalar else [offset[2] for offset in offsets],
    )
    expected = [
        (base[0] + offset[0], base[1] + offset[1], offset[2])
        for base in bases
        for offset in offsets
    ]
    assert blocks.array.tolist() == expected
    assert blocks.total_nbytes == sum(row[2] for row in expected)


EDGES = st.sampled_from([0, 1, 2, 2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])


@pytest.mark.slow
@given(st.lists(st.tuples(EDGES, EDGES, EDGES), max_size=4))
def test_blocks_at_the_edges_of_64_bits_are_valid_or_refused(rows: list[tuple[int, ...]]) -> None:
    array = np.array(rows, BLOCK) if rows else np.empty(0, BLOCK)
    valid = sum(row[2] for row in rows) < 2**63 and all(
        nbytes >= 1 and max(src, dst) < 2**63 and max(src, dst) + nbytes <= 2**63
        for src, dst, nbytes in rows
    )
    if valid:
        assert Blocks(array).total_nbytes == sum(row[2] for row in rows)
    else:
        with pytest.raises(ValueError, match=r"block \d+: |in total"):
            Blocks(array)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([1, 2], [0], [1], [0], 1), r"src and dst must be 1-d and of one length, not \(2,\)"),
        (([1], [0, 1], [1], [0], 1), "src_offsets and dst_offsets and nbytes must be 1-d"),
        (([1], [0], [1], [0], [1, 1]), "src_offsets and dst_offsets and nbytes must be 1-d"),
        ((1, [0], 1, [0], 1), "src and dst must be 1-d"),
        (([1], [0, 5], [1], [0, 5], [1, 0]), "offset 1 has 0 bytes"),
        (([1], [0], [1 << 62], [1 << 62], 1), "dst: 1 bytes 4611686018427387904 bytes from"),
        (([2**63 - 9], [0], [1], [0], 10), "src: 10 bytes 0 bytes from 0x7ffffffffffffff7"),
        (([1], [2**63], [1], [0], 2**63), "src: .* end beyond"),
        (([1] * 4, [0], [1] * 4, [0], 1 << 61), "in total; fewer than"),
    ],
)
def test_a_grid_that_is_no_grid_of_blocks_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Blocks.grid(*arguments)


def test_a_grid_may_end_at_the_limit_and_may_be_empty() -> None:
    assert Blocks.grid([2**63 - 9], [0], [1], [0], 9).total_nbytes == 9
    assert len(Blocks.grid([], [0], [], [0], 1)) == len(Blocks.grid([1], [], [1], [], 1)) == 0


@pytest.mark.slow
def test_of_takes_scalars_and_nothing() -> None:
    assert Blocks.of(1, 2, 3).array.tolist() == [(1, 2, 3)]
    assert Blocks.of([1, 9], 2, 3).array.tolist() == [(1, 2, 3), (9, 2, 3)]
    assert len(Blocks.of([], [], [])) == 0
    assert len(Blocks.concat([])) == 0


def test_concat_copies_nothing_where_one_part_alone_has_blocks() -> None:
    nothing, one = Blocks.concat([]), Blocks.of([1, 9], 2, 3)
    assert Blocks.concat([nothing, one, nothing]) is one


def test_blocks_do_not_change_afterwards() -> None:
    source = np.array([(1, 2, 3)], BLOCK)
    blocks = Blocks(source)
    source["src"] = 99
    assert blocks.array.tolist() == [(1, 2, 3)]
    with pytest.raises(ValueError, match="read-only"):
        blocks.array["src"] = 5


def test_an_array_is_taken_over_without_a_copy() -> None:
    source = np.array([(1, 2, 3), (4, 5, 6), (0, 0, 0)], BLOCK)
    blocks = Blocks.taking(source[:2])
    assert np.shares_memory(blocks.array, source)
    assert (len(blocks), blocks.total_nbytes) == (2, 9)
    with pytest.raises(ValueError, match="read-only"):
        blocks.array["src"] = 5
    with pytest.raises(ValueError, match="block 2: src 0x0 with 0 bytes"):
        Blocks.taking(source)


@pytest.mark.parametrize(
    ("src", "dst", "nbytes", "says"),
    [
        (-1, 0, 1, "src must not be negative: -1"),
        (0, 0, 0, "block 0: src 0x0 with 0 bytes"),
        ([1, 2], [1], [1, 1], "one length, not 2, 1, 2"),
        (1 << 63, 0, 1, "src 0x8000000000000000"),
        (0, (1 << 64) - 1, 1, "dst 0xffffffffffffffff"),
        ((1 << 63) - 4, 0, 5, "src 0x7ffffffffffffffc with 5 bytes"),
        (0, 0, 1 << 64, "nbytes must be integers that fit 64 bits"),
        (1.5, 0, 1, "src must be integers"),
        ([[1]], 0, 1, "1-d"),
        ([0, 0], [0, 0], [1 << 62, 1 << 62], "in total"),
    ],
)
def test_of_refuses(src: object, dst: object, nbytes: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Blocks.of(src, dst, nbytes)  # type: ignore[arg-type]


def test_arrays_need_their_dtype() -> None:
    with pytest.raises(ValueError, match="dtype"):
        Blocks(np.zeros(3, np.uint64))  # type: ignore[arg-type]
