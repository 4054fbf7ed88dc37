# SPDX-License-Identifier: Apache-2.0
"""How a transfer over RDMA is cut into pieces."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_compiled import function

from te import Blocks
from te.core.wire import PIECES_LIMIT

pytestmark = pytest.mark.pure

MIB = 1 << 20
CUT_ALIGN = 4096
SIZES = st.lists(
    st.integers(1, 3 * CUT_ALIGN) | st.integers(1, MIB) | st.integers(1, 64 * MIB),
    min_size=1,
    max_size=40,
)


_PIECES, _P, _U32, _U64 = (
    "te.transports.rdma.pieces",
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_uint64,
)
_pieces_for = function(_PIECES, "pieces_for", _U32, _U64, _U64, _U32)
_cut = function(_PIECES, "cut", _U32, _P, _U64, _U64, _U32, _P)


class Piece(ctypes.Structure):
    _fields_ = (
        ("first", _U64),
        ("offset", _U64),
        ("nbytes", _U64),
        ("blocks", _U32),
        ("next", _U32),
    )


def cut(sizes: list[int], rails: int) -> list[tuple[int, int, int, int]]:
    """How a transfer is cut for that many rails of one speed, as its submission does it: of each
    piece its first block, the offset in it, its bytes, and how many blocks it touches."""
    blocks = Blocks.of(0, 0, sizes)
    total = blocks.total_nbytes
    pieces = (Piece * _pieces_for(total, len(sizes), rails))()
    count = _cut(blocks.array.ctypes.data, len(sizes), total, len(pieces), pieces)
    return [(one.first, one.offset, one.nbytes, one.blocks) for one in pieces[:count]]


@given(SIZES, st.integers(1, 16))
def test_every_byte_is_in_one_piece(sizes: list[int], rails: int) -> None:
    ends = [0, *np.cumsum(sizes).tolist()]
    reached = 0
    for first, offset, nbytes, blocks in cut(sizes, rails):
        assert nbytes > 0
        assert 0 <= offset < sizes[first]
        assert ends[first] + offset == reached
        reached += nbytes
        assert ends[first + blocks - 1] < reached <= ends[first + blocks]
    assert reached == ends[-1]


@given(SIZES, st.integers(1, 16))
def test_pieces_are_of_one_size_up_to_a_small_block(sizes: list[int], rails: int) -> None:
    """A mark is moved by half a block that stays whole, or the rest of a page at a cut; and of two
    in one page one goes."""
    total = sum(sizes)
    used = min(rails, -(-total // (128 << 10)))
    most = min(max(used * -(-total // (used * MIB)), -(-len(sizes) // 256)), total)
    pieces = cut(sizes, rails)
    assert len(pieces) <= most
    assert max(nbytes for _, _, nbytes, _ in pieces) <= 1.25 * total / most + 2 * CUT_ALIGN


@given(SIZES, st.integers(1, 16))
def test_small_blocks_stay_whole_and_cuts_are_aligned(sizes: list[int], rails: int) -> None:
    for first, offset, _, _ in cut(sizes, rails):
        assert offset % CUT_ALIGN == 0
        assert offset == 0 or sizes[first] > CUT_ALIGN


@given(st.integers(1, 64 * MIB), st.integers(1, 16))
def test_rails_of_one_speed_get_as_many_pieces_each(total: int, rails: int) -> None:
    """Where there is enough for all of them: one block, which can be cut anywhere."""
    pieces = cut([total], rails)
    used = min(rails, -(-total // (128 << 10)))
    assert len(pieces) <= used * -(-total // (used * MIB))
    if total % (rails * CUT_ALIGN * 1024) == 0:
        assert len(pieces) % rails == 0


def test_a_large_block_is_cut_evenly() -> None:
    quarters = [(0, i * MIB, MIB, 1) for i in range(4)]
    assert cut([4 * MIB], 4) == quarters
    assert cut([4 * MIB], 2) == quarters
    assert cut([512 << 10], 4) == [(0, i * (128 << 10), 128 << 10, 1) for i in range(4)]


def test_little_goes_by_one_rail() -> None:
    assert cut([4096], 8) == [(0, 0, 4096, 1)]
    assert cut([1], 8) == [(0, 0, 1, 1)]
    assert len(cut([128 << 10], 8)) == 1
    assert len(cut([(128 << 10) + 1], 8)) == 2


def test_blocks_of_a_page_of_kv_cache_stay_whole() -> None:
    assert all(offset == 0 for _, offset, _, _ in cut([73_728] * 3904, 4))


def test_many_small_blocks_make_pieces_of_some_hundred() -> None:
    pieces = cut([256] * 32_768, 4)
    assert len(pieces) == 128
    assert {blocks for _, _, _, blocks in pieces} == {256}


def test_no_more_pieces_than_a_message_can_tell() -> None:
    pieces = cut([(1 << 60) + 12_345], 4)
    assert len(pieces) == PIECES_LIMIT
    assert sum(nbytes for _, _, nbytes, _ in pieces) == (1 << 60) + 12_345
