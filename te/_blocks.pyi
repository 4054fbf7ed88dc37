# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

def checked_total(blocks: npt.NDArray[np.void]) -> int:
    """Sum of the sizes in bytes, or -1 unless every block has a byte at least and ends on both
    sides at or below 2**63, and the sum is below that. Contiguous, dtype ``te.blocks.BLOCK``."""

def fill(
    blocks: npt.NDArray[np.void],
    src: npt.NDArray[np.uint64],
    dst: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.uint64],
) -> int:
    """Makes the blocks from their columns, each contiguous, of one number for each block or one for
    all; then as ``checked_total``."""

def locate(blocks: npt.NDArray[np.void], offsets: list[int]) -> list[tuple[int, int, int]]:
    """For each offset in bytes from the start of them all, ascending: the first block that ends
    there or behind it, or the last one; where that ends; and its size. There is at least one
    block."""

def cut(
    blocks: npt.NDArray[np.void],
    marks: list[tuple[int, int]],
    piece_nbytes: int,
    pieces_max: int,
) -> bytes:
    """Pieces of ``piece_nbytes`` bytes, of rail r from ``marks[r]`` to ``marks[r + 1]``, each the
    index of a block and an offset in it; the last of a rail may be smaller. An array of
    ``te.transports.rdma.pieces.PIECE``, which must not be longer than ``pieces_max``."""
