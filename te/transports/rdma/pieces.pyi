# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

def pieces_of(
    blocks: npt.NDArray[np.void], total: int, rails: int
) -> list[tuple[int, int, int, int]]:
    """How a transfer is cut for that many rails of one speed, as its submission does it: of each
    piece its first block, the offset in it in bytes, its bytes, and how many blocks it touches.
    There is at least one block, of dtype ``te.blocks.BLOCK``; ``total`` is their bytes."""
