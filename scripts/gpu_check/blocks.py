# SPDX-License-Identifier: Apache-2.0
"""Which pieces go where, from a seed that both sides know. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["GUARD", "Pieces", "contents", "image", "pieces"]

#: What destinations are full of.
GUARD: Final = 0xEE

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Offsets from the beginning of each side's memory, and bytes, shape (n,)."""

    source: I64
    target: I64
    nbytes: I64


def pieces(seed: int, memory_nbytes: int, largest: int) -> Pieces:
    """Of 1 to ``largest`` bytes, small and large ones alike, one of each extreme; at odd places, in
    any order, apart from each other at the target, not always at the source."""
    random = np.random.default_rng(seed)
    sizes, room = [1, largest], memory_nbytes - largest - 64
    while True:
        size = int(math.exp(random.uniform(0, math.log(largest))))
        room -= size + 16
        if room < 0 or len(sizes) == 4096:
            break
        sizes.append(size)
    nbytes = np.array(sizes, np.int64)
    gaps = random.integers(1, 12, len(nbytes))
    target = np.cumsum(gaps + nbytes) - nbytes
    order = random.permutation(len(nbytes))
    source = (random.random(len(nbytes)) * (memory_nbytes - nbytes)).astype(np.int64)
    return Pieces(source[order], target[order], nbytes[order])


def contents(seed: int, memory_nbytes: int) -> U8:
    """Of the source."""
    return np.random.default_rng(~seed & 0xFFFFFFFF).integers(0, 256, memory_nbytes, np.uint8)


def image(seed: int, memory_nbytes: int, largest: int) -> U8:
    """The whole target after ``pieces`` of ``contents`` have arrived in ``GUARD``."""
    given, one = pieces(seed, memory_nbytes, largest), contents(seed, memory_nbytes)
    found = np.full(memory_nbytes, GUARD, np.uint8)
    for source, target, nbytes in zip(given.source, given.target, given.nbytes, strict=True):
        found[target : target + nbytes] = one[source : source + nbytes]
    return found
