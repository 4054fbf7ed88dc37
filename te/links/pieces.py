# SPDX-License-Identifier: Apache-2.0
"""Cutting a transfer over RDMA into what its rails carry between two marks. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from te import _blocks
from te.plane._core import PIECES_LIMIT

__all__ = ["PIECE", "PIECE_BLOCKS", "PIECE_BYTES", "cut"]

PIECE: Final = np.dtype(
    [
        ("first", "<u8"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("rail", "<u4"),
        ("next", "<u4"),
        ("is_waiting", "<u4"),
        ("padding", "<u4"),
    ]
)
"""``nbytes`` bytes from ``offset`` of the block ``first`` on; struct Piece in
``te/plane/structs.pxi``."""

PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece, the unit that is written again when a rail dies and taken by an idle one."""

PIECE_BLOCKS: Final = 256
"""Blocks of a piece on the average: a mark costs as much as a block."""


def cut(blocks: npt.NDArray[np.void], bounds: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Pieces of blocks, shape (n,), dtype ``te.blocks.BLOCK``; rail r has the blocks
    [bounds[r], bounds[r + 1]). Every byte is in one piece; no piece is empty.
    """
    total = _blocks.total(blocks)
    piece_nbytes = min(PIECE_BYTES, -(-total * PIECE_BLOCKS // len(blocks)))
    piece_nbytes = max(piece_nbytes, -(-total // (PIECES_LIMIT - len(bounds))), 1)
    pieces_max = -(-total // piece_nbytes) + len(bounds)
    found = _blocks.cut(blocks, np.asarray(bounds, np.int64), piece_nbytes, pieces_max)
    return np.frombuffer(found, PIECE)
