# SPDX-License-Identifier: Apache-2.0
"""Cutting a transfer into segments. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from te.blocks import Blocks

__all__ = ["Segments"]


class Segments:
    """Hands out the blocks of a transfer in order, at most ``max_blocks`` blocks and
    ``max_nbytes`` bytes at a time; adjacent blocks are merged and big ones are split."""

    def __init__(self, blocks: Blocks, max_blocks: int, max_nbytes: int) -> None:
        self._array = blocks.merged().split(max_nbytes).array
        self._ends = np.cumsum(self._array["nbytes"])
        self._max_blocks = max_blocks
        self._max_nbytes = max_nbytes
        self._next = 0
        self._sent = 0

    @property
    def exhausted(self) -> bool:
        """Whether every block was handed out."""
        return self._next == len(self._array)

    def take(self) -> npt.NDArray[np.void]:
        """The next segment's blocks, shape (1..max_blocks,), dtype ``te.blocks.BLOCK``."""
        assert not self.exhausted
        limit = np.uint64(self._sent + self._max_nbytes)
        end = int(np.searchsorted(self._ends, limit, side="right"))
        end = min(end, self._next + self._max_blocks)
        taken = self._array[self._next : end]
        self._next, self._sent = end, int(self._ends[end - 1])
        return taken
