# SPDX-License-Identifier: Apache-2.0
"""How a transfer over RDMA is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te import Blocks
from te.transports.rdma.pieces import PIECE, PIECE_BYTES, cut

pytestmark = pytest.mark.pure


@given(
    st.lists(st.integers(1, 3 * PIECE_BYTES), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3 * PIECE_BYTES)), max_size=5),
)
def test_every_byte_is_in_one_piece_of_its_rail(
    sizes: list[int], cuts: list[tuple[int, int]]
) -> None:
    blocks = Blocks.of(0, 0, sizes)
    ends = [0, *np.cumsum(sizes).tolist()]
    inside = sorted(
        (block, offset % sizes[block]) if block < len(sizes) else (len(sizes), 0)
        for block, offset in cuts
    )
    marks = [(0, 0), *inside, (len(sizes), 0)]
    reached = 0
    for piece in np.frombuffer(cut(blocks, marks), PIECE):
        first, offset, nbytes = int(piece["first"]), int(piece["offset"]), int(piece["nbytes"])
        assert 0 < nbytes <= PIECE_BYTES
        assert 0 <= offset < sizes[first]
        assert ends[first] + offset == reached
        reached += nbytes
        (before, at), (behind, until) = marks[piece["rail"]], marks[piece["rail"] + 1]
        assert ends[before] + at <= reached - nbytes
        assert reached <= ends[behind] + until
    assert reached == ends[-1]


def test_many_small_blocks_make_pieces_of_some_hundred() -> None:
    pieces = cut(Blocks.of(0, 0, [256] * 32_768), [(0, 0), (32_768, 0)])
    assert 100 <= len(np.frombuffer(pieces, PIECE)) <= 200
