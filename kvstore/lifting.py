# SPDX-License-Identifier: Apache-2.0
"""Has owners bring objects into memory that lie below: nobody reads from below but their owner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from kvstore.asking import NoAnswer
from kvstore.changes import BELOW, Found, Keys, Records
from kvstore.deepshelf import LiftState
from kvstore.handles import Handle
from kvstore.owner import CLAIM_OBJECTS_MAX

__all__ = ["lift"]

logger = logging.getLogger(__name__)


def lift(
    handle: Callable[[int], Handle | None],
    keys: Keys,
    signature: bytes,
    nbytes: int,
    places: Records,
    deadline_s: float,
) -> None:
    """Asks each owner once for those of the objects that lie below; blocks.

    Args:
        handle: an owner by its number; None if it cannot be reached.
        keys: shape (n, 16).
        signature: of all of them.
        nbytes: the size of each.
        places: where they were looked up, dtype ``PLACE``. Those that are in memory now get their
            slots, and those that are gone become ``MISSING``; the others stay ``BELOW``.
        deadline_s: of the monotonic clock.
    """
    below = (places["found"] == Found.HERE) & (places["slot"] == BELOW)
    for number in np.unique(places["owner"][below]).tolist():
        rows = np.flatnonzero(below & (places["owner"] == number))[:CLAIM_OBJECTS_MAX]
        owner = handle(number)
        if owner is None:
            continue
        left_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            lifted = owner.lift(keys[rows], signature, nbytes, left_s)
        except NoAnswer as exc:
            logger.warning("objects were not lifted: %s", exc)
            continue
        for row, one in zip(rows.tolist(), lifted, strict=True):
            if one.state is LiftState.HERE:
                places[row]["slot"], places[row]["generation"] = one.slot, one.generation
            elif one.state is LiftState.GONE:
                places[row]["found"] = Found.MISSING
