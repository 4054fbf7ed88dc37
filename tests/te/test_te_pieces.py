# SPDX-License-Identifier: Apache-2.0
"""How a transfer over RDMA is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from te.blocks import BLOCK
from te.links.pieces import PIECE_BYTES, cut


@given(
    st.lists(st.integers(1, 3 * PIECE_BYTES), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_every_byte_is_in_one_piece_of_its_rail(sizes: list[int], cuts: list[int]) -> None:
    blocks = np.zeros(len(sizes), BLOCK)
    blocks["nbytes"] = sizes
    bounds = np.array([0, *sorted(min(one, len(sizes)) for one in cuts), len(sizes)])
    pieces = cut(blocks, bounds)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    rail_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    reached = 0
    for piece in pieces:
        first, offset, nbytes = int(piece["first"]), int(piece["offset"]), int(piece["nbytes"])
        assert 0 < nbytes <= PIECE_BYTES
        assert 0 <= offset < sizes[first]
        assert starts[first] + offset == reached
        last = int(np.searchsorted(ends, reached + nbytes - 1, side="right"))
        assert set(rail_of[first : last + 1]) == {piece["rail"]}
        reached += nbytes
    assert reached == ends[-1]


def test_many_small_blocks_make_pieces_of_some_hundred() -> None:
    blocks = np.zeros(32_768, BLOCK)
    blocks["nbytes"] = 256
    assert 100 <= len(cut(blocks, np.array([0, 32_768]))) <= 200
