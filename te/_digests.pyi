# SPDX-License-Identifier: Apache-2.0
"""Digests (xxh3-64) of pieces of registered memory, and their bytes."""

import numpy as np
import numpy.typing as npt

from te.blocks import U64
from te.core.engine import Engine

class Bounce:
    """Host memory, which every kind has pinned, through which memory is read that the processor
    cannot read. The caller keeps it; for one thread at a time."""

    def __init__(self, base: int, nbytes: int) -> None: ...
    def settle(self, timeout_s: float) -> bool:
        """Waits, without the lock, for copies that did not end in time; whether none is under way.
        Until then this memory and the regions are in use, and no digest is made."""

def digests(
    engine: Engine,
    bounce: Bounce,
    addresses: U64,
    offsets: U64,
    sizes: U64,
    found: U64,
    timeout_s: float,
    copied: npt.NDArray[np.uint8] | None = None,
) -> tuple[int, int]:
    """Of units of one shape; written to ``found``, shape (n,). Without the lock, but for finding
    the regions (30 ns a unit): no call with many thousands of units.

    Args:
        addresses: of the units, shape (n,), C-contiguous as all of these.
        offsets, sizes: of the pieces of each unit, in bytes, shape (pieces,).
        timeout_s: for copies of a device.
        copied: the bytes of the units, of which the digests are, are written here, shape (n, sum of
            sizes), C-contiguous.

    Returns:
        (0, -1); or (errno, -1) of a copy that failed, ETIMEDOUT of one that did not end; or (0, i)
        where unit i does not lie in one region.
    """
