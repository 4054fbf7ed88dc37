# SPDX-License-Identifier: Apache-2.0
"""Cutting a transfer over RDMA into what its rails carry as a whole. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np

from te import _blocks
from te.blocks import Blocks
from te.core.wire import PIECES_LIMIT
from te.transports.rdma.striping import Mark

__all__ = ["PIECE", "PIECE_BLOCKS", "PIECE_BYTES", "cut"]

PIECE: Final = np.dtype(
    [
        ("first", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("rail", "<u4"),
        ("next", "<u4"),
    ]
)
"""``nbytes`` bytes from ``offset`` of the block ``first`` on; struct Piece in
``te/transports/rdma/state.pxd``."""

PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece, the unit that is written again when a rail dies and taken by an idle one."""

PIECE_BLOCKS: Final = 256
"""Blocks of a piece on the average: a mark costs as much as a block."""


def cut(blocks: Blocks, marks: list[Mark]) -> bytes:
    """Pieces of blocks, of which there is at least one; rail r has the bytes from mark r to mark
    r + 1. An array of ``PIECE``. Every byte is in one piece; no piece is empty.
    """
    rails, total = len(marks) - 1, blocks.total_nbytes
    piece_nbytes = min(PIECE_BYTES, -(-total * PIECE_BLOCKS // len(blocks)))
    piece_nbytes = max(piece_nbytes, -(-total // (PIECES_LIMIT - rails)), 1)
    pieces_max = -(-total // piece_nbytes) + rails
    return _blocks.cut(blocks.array, marks, piece_nbytes, pieces_max)
