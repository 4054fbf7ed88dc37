# SPDX-License-Identifier: Apache-2.0
"""Contents that tell every word of the source and every round apart, and the check. Pure.

Word i of round s is ``i * FACTOR + s * SALT`` modulo 2**64: both factors are odd, so no two words
of a round are equal, and no word of a round equals the same word of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from te_bench.shapes import WORD_BYTES, Plan

__all__ = ["Landing", "check", "fill"]

FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
SALT: Final = 0xD1342543DE82EF95
# 4 Mi words at a time: the check needs no second copy of the memory.
CHUNK_WORDS: Final = 1 << 22

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Landing:
    """What a destination found after a round."""

    #: Blocks with a byte that is not the source's.
    wrong_blocks: int
    #: Slots that nothing was sent to and that are not zero any more.
    stray_slots: int

    @property
    def verified(self) -> bool:
        """Every block arrived, and nothing else did."""
        return not self.wrong_blocks and not self.stray_slots


def _words(index: U64, seed: int) -> U64:
    words: U64 = index * FACTOR + np.uint64(seed * SALT % (1 << 64))
    return words


def fill(memory: U8, seed: int) -> None:
    """Writes round ``seed`` into the source's memory, a whole number of words."""
    words = memory.view(np.uint64)
    for start in range(0, words.size, CHUNK_WORDS):
        part = words[start : start + CHUNK_WORDS]
        part[:] = _words(np.arange(start, start + part.size, dtype=np.uint64), seed)


def check(plan: Plan, memory: U8, seed: int) -> Landing:
    """Compares every byte of every block, and every unused slot, of the destination's memory."""
    words = plan.stride // WORD_BYTES
    slots = memory.view(np.uint64).reshape(plan.slots, words)
    wrong = 0
    chunk = max(1, CHUNK_WORDS // words)
    for start in range(0, plan.shape.blocks, chunk):
        source = plan.source[start : start + chunk].reshape(-1, 1)
        index: U64 = np.add(source * np.uint64(words), np.arange(words, dtype=np.uint64))
        want = _words(index, seed).view(np.uint8)[:, : plan.shape.nbytes]
        have = slots[plan.destination[start : start + chunk]].view(np.uint8)
        wrong += int((want != have[:, : plan.shape.nbytes]).any(axis=1).sum())
    unused = np.setdiff1d(np.arange(plan.slots, dtype=np.uint64), plan.destination)
    return Landing(wrong_blocks=wrong, stray_slots=int(slots[unused].any(axis=1).sum()))
