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
