# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import numpy.typing as npt

def checked_total(blocks: npt.NDArray[np.void]) -> int:
    """Sum of the sizes in bytes, or -1 unless every block has a byte at least and ends on both
    sides at or below 2**63, and the sum is below that. Contiguous, dtype ``te.blocks.BLOCK``."""

def total(blocks: npt.NDArray[np.void]) -> int:
    """Sum of the sizes in bytes, modulo 2**64."""

def locate(blocks: npt.NDArray[np.void], offsets: list[int]) -> list[tuple[int, int]]:
    """For each offset in bytes from the start of them all, ascending: the first block that ends
    there or behind it, or the last one, and where that ends. There is at least one block."""

def cut(
    blocks: npt.NDArray[np.void], bounds: npt.NDArray[Any], piece_nbytes: int, pieces_max: int
) -> bytes:
    """Pieces of ``piece_nbytes`` bytes, of each rail's blocks ``bounds[r]`` to ``bounds[r + 1]``
    (int64); the last of a rail may be smaller. An array of ``te.links.pieces.PIECE``, which must
    not be longer than ``pieces_max``."""
