# SPDX-License-Identifier: Apache-2.0
"""Which requests, and which of their cells, are digested: pure.

The choice is made for what lies between two ranks, which are trusted themselves: who computes a
wrong cache makes the digest of the wrong one. So it suffices that whatever moves the bytes cannot
know it. Whether a request is digested is drawn with its last write; which of its cells, once that
write is in the engine's hands.
"""

from __future__ import annotations

import enum

import numpy as np

from sglang_mooncake.layout.indices import Indices

__all__ = [
    "SAMPLE_CELLS_MIN",
    "SAMPLE_NBYTES",
    "SAMPLE_ROOMS",
    "Verify",
    "chosen_cells",
    "is_chosen",
    "sample_size",
]

#: Of so many requests a pair of ranks digests one, and of its cells one of so many is drawn: a page
#: that is wrong in 16 buffers is found there 98 times of 100, as long as the pair copies less than
#: four times `SAMPLE_NBYTES`, beyond which the part is smaller. That is 1/1024 of all bytes, or
#: less, and a core makes digests several times as fast as TCP moves bytes.
SAMPLE_ROOMS = 256
SAMPLE_PART = 4
#: At least so many cells, and about so many bytes at most: they take a core some milliseconds.
SAMPLE_CELLS_MIN = 64
SAMPLE_NBYTES = 16 << 20


class Verify(enum.IntEnum):
    """How much of what is handed over is digested. Of two sides the stricter one counts."""

    OFF = 0
    SAMPLE = 1
    ALL = 2


def is_chosen(verify: Verify, random: int) -> bool:
    """Whether a request is digested. random: 64 bits."""
    return verify is Verify.ALL or (verify is Verify.SAMPLE and random % SAMPLE_ROOMS == 0)


def sample_size(verify: Verify, cells: int, nbytes: int) -> int:
    """How often a cell is drawn of so many, which have so many bytes in all; 0: each is digested,
    without drawing."""
    if verify is not Verify.SAMPLE or cells <= SAMPLE_CELLS_MIN:
        return 0
    of_bytes = cells * SAMPLE_NBYTES // max(nbytes, 1)
    return max(min(cells // SAMPLE_PART, of_bytes), SAMPLE_CELLS_MIN)


def chosen_cells(seed: int, drawn: int, cells: int) -> Indices | range:
    """The numbers of the cells that are digested of `cells`, rising: all, as a range, since they
    are 10^8 of a long prompt with pages of one token; or those that are drawn, of which some come
    twice.

    Args:
        seed: 64 bits, of which both sides make the same choice.
        drawn: see `sample_size`.
    """
    if not drawn or not cells:
        return range(cells)
    # Raw words of PCG64, which all releases of numpy make alike.
    random = np.random.PCG64(seed).random_raw(drawn) >> np.uint64(32)
    return np.unique((random * np.uint64(cells)) >> np.uint64(32)).astype(np.int64)
