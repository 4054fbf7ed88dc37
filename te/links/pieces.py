# SPDX-License-Identifier: Apache-2.0
"""Cutting a transfer over RDMA into what its rails carry between two marks. Pure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
    ends = np.cumsum(blocks["nbytes"])
    total = int(ends[-1])
    piece_nbytes = min(PIECE_BYTES, -(-total * PIECE_BLOCKS // len(blocks)))
    piece_nbytes = max(piece_nbytes, -(-total // (PIECES_LIMIT - len(bounds))), 1)
    parts = []
    for rail in range(len(bounds) - 1):
        low, high = int(bounds[rail]), int(bounds[rail + 1])
        if low == high:
            continue
        begin, end = int(ends[low] - blocks["nbytes"][low]), int(ends[high - 1])
        starts = np.arange(begin, end, piece_nbytes, dtype=np.uint64)
        part = np.zeros(len(starts), PIECE)
        part["first"] = np.searchsorted(ends, starts, side="right")
        first = part["first"].astype(np.int64)
        part["offset"] = starts - (ends[first] - blocks["nbytes"][first])
        part["nbytes"] = np.minimum(piece_nbytes, end - starts)
        part["rail"] = rail
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
