# SPDX-License-Identifier: Apache-2.0
"""What is moved: how many blocks of which size, from where to where. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["SHAPES", "Plan", "Shape", "plan"]

WORD_BYTES: Final = 8
BLOCKS_MAX: Final = 10_000_000
MEMORY_BYTES_MAX: Final = 64 << 30


@dataclass(frozen=True)
class Shape:
    """A set of equal blocks and how it is submitted."""

    name: str
    blocks: int
    #: Size of a block in bytes.
    nbytes: int
    #: Submitting threads of the source; each hands over an equal part in one call.
    threads: int = 1
    #: Each block is a call of its own that must have landed before the next.
    sync: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.blocks <= BLOCKS_MAX:
            raise ValueError(f"blocks={self.blocks} must be between 1 and {BLOCKS_MAX}")
        if self.nbytes < 1:
            raise ValueError(f"nbytes={self.nbytes} must be at least 1")
        if not 1 <= self.threads <= min(64, self.blocks):
            raise ValueError(
                f"threads={self.threads} must be between 1 and 64 and at most blocks={self.blocks}"
            )
        if self.total_nbytes > MEMORY_BYTES_MAX:
            raise ValueError(
                f"{self.blocks} blocks of {self.nbytes} bytes are {self.total_nbytes} bytes;"
                f" at most {MEMORY_BYTES_MAX} are possible"
            )

    @property
    def total_nbytes(self) -> int:
        """Payload of one hand-over."""
        return self.blocks * self.nbytes

    def scaled(self, factor: float) -> Shape:
        """The same with ``factor`` times the blocks; a single block gets so much smaller."""
        if not 0 < factor <= 1:
            raise ValueError(f"a scale of {factor} must be above 0 and at most 1")
        if self.blocks == 1:
            return replace(self, nbytes=max(1, round(self.nbytes * factor)))
        return replace(self, blocks=max(self.threads, round(self.blocks * factor)))


SHAPES: Final = {
    shape.name: shape
    for shape in (
        # A request of 4,096 tokens of a 61-layer MLA model: 61 layers of 64 pages of 64 tokens.
        Shape("kv", 3904, 73_728),
        Shape("s256", 32_768, 256),
        Shape("s2k", 16_384, 2048),
        Shape("big", 1, 256 << 20),
        Shape("lat", 2000, 4096, sync=True),
        Shape("thr8", 3904, 73_728, threads=8),
    )
}


@dataclass(frozen=True)
class Plan:
    """A shape laid out: block i goes from slot ``source[i]`` to slot ``destination[i]``."""

    shape: Shape
    #: Slots of the memory on each side; more than there are blocks, so that strays show.
    slots: int
    #: Bytes from one slot to the next: ``nbytes`` rounded up to whole words.
    stride: int
    #: Shape (blocks,), all different, in random order.
    source: npt.NDArray[np.uint64]
    destination: npt.NDArray[np.uint64]

    @property
    def memory_nbytes(self) -> int:
        """Memory each side needs."""
        return self.slots * self.stride

    def addresses(self, base: int, slots: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """First bytes of the slots in memory that begins at ``base``."""
        return slots * np.uint64(self.stride) + np.uint64(base)

    def pieces(self) -> list[npt.NDArray[np.int64]]:
        """Block numbers that each call submits, one list of calls after another by thread."""
        return np.array_split(np.arange(self.shape.blocks), self.shape.threads)


def plan(shape: Shape, seed: int) -> Plan:
    """Random slots for the shape; the same in every process with the same seed."""
    slots = shape.blocks + shape.blocks // 4
    random = np.random.default_rng(seed)
    return Plan(
        shape=shape,
        slots=slots,
        stride=-(-shape.nbytes // WORD_BYTES) * WORD_BYTES,
        source=random.permutation(slots)[: shape.blocks].astype(np.uint64),
        destination=random.permutation(slots)[: shape.blocks].astype(np.uint64),
    )
