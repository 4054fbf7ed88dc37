# SPDX-License-Identifier: Apache-2.0
"""Which prefixes of a prompt can be loaded, by what the store has of each of its pools. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["all_pages", "run", "trailing_pages"]

Bools = npt.NDArray[np.bool_]


def run(found: Bools) -> int:
    """How many pages are there from the first on. ``found``: shape (pages,)."""
    return len(found) if found.all() else int(found.argmin())


def all_pages(found: Bools) -> Sequence[int]:
    """Of a pool of which every page is needed: the numbers of pages that a prefix can have."""
    return range(1, run(found) + 1)


def trailing_pages(found: Bools, window: int) -> Sequence[int]:
    """Of a pool of which the last ``window`` pages of a prefix are needed, or all of a shorter one:
    the numbers of pages that a prefix can have. There may be gaps between them."""
    missing = np.concatenate([[0], np.cumsum(~found)])
    ends = np.arange(1, len(found) + 1)
    begins = np.maximum(ends - window, 0)
    good: list[int] = ends[missing[ends] == missing[begins]].tolist()
    return good
