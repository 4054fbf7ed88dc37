# SPDX-License-Identifier: Apache-2.0
"""Has owners bring objects into memory that lie in the lower tier: nobody reads from there but
their owner."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Final

import numpy as np

from kvstore.client.handles import Handle
from kvstore.client.pool import Pool
from kvstore.objects.changes import LOWER_TIER, Found, Keys, Records, fingerprint_of
from kvstore.owner.claims import CLAIM_OBJECTS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.rules.tiered_table import PromotionState
from kvstore.threads import NoThread, Threads

__all__ = ["promote", "promoted_parts"]

logger = logging.getLogger(__name__)

PART_BYTES: Final = 8 << 20
"""So much is promoted while as much is read."""
AHEAD: Final = 2
"""So many parts are promoted at once. Of one alone nothing would be on its way while its owner
compares checksums."""


def promoted_parts(
    owners: Pool,
    keys: Keys,
    signature: bytes,
    nbytes: int,
    moved: Sequence[bool],
    deadline_s: float,
) -> Generator[tuple[slice, Records], None, None]:
    """Has objects promoted in parts, the next ones while the caller reads the last; blocks.

    Args:
        owners: know where the objects lie.
        keys: shape (n, 16).
        signature: of all of them.
        nbytes: the size of each.
        moved: which of them did not lie where their owner had announced them. It may have put them
            in the lower tier since then, and the announcement may be late: it is asked.
        deadline_s: of the monotonic clock.

    Yields the keys of a part, and where they lie now, as ``promote`` leaves it.
    """
    step = max(PART_BYTES // nbytes, 1)
    parts = [slice(first, first + step) for first in range(0, len(keys), step)]

    def promoted(part: slice) -> Records:
        places = owners.look_up(keys[part], fingerprint_of(signature, nbytes), asks=True)
        places["slot"][np.asarray(moved[part], bool)] = LOWER_TIER
        promote(owners.handle, keys[part], signature, nbytes, places, deadline_s)
        return places

    in_turn = ((part, promoted(part)) for part in parts)
    if len(parts) < 2:
        yield from in_turn
        return
    with Threads(AHEAD, "kvstore-promoting") as threads:
        try:
            coming = deque(threads.submit(promoted, one) for one in parts[:AHEAD])
        except NoThread:
            yield from in_turn
            return
        for part, after in itertools.zip_longest(parts, parts[AHEAD:]):
            places = coming.popleft().result()
            if after is not None:
                coming.append(threads.submit(promoted, after))
            yield part, places


def promote(
    handle: Callable[[int], Handle | None],
    keys: Keys,
    signature: bytes,
    nbytes: int,
    places: Records,
    deadline_s: float,
) -> None:
    """Asks each owner once for those of the objects that lie in the lower tier; blocks.

    Args:
        handle: an owner by its number; None if it cannot be reached.
        keys: shape (n, 16).
        signature: of all of them.
        nbytes: the size of each.
        places: where they were looked up, dtype ``PLACE``. Those that are in memory now get their
            slots, those that are gone become ``MISSING``, and those of owners that have ended or
            cannot be reached become ``SILENT``; the others stay ``LOWER_TIER``.
        deadline_s: of the monotonic clock.
    """
    lower = (places["found"] == Found.HERE) & (places["slot"] == LOWER_TIER)
    for number in np.unique(places["owner"][lower]).tolist():
        rows = np.flatnonzero(lower & (places["owner"] == number))[:CLAIM_OBJECTS_MAX]
        owner = handle(number)
        if owner is None:
            places["found"][rows] = Found.SILENT
            continue
        left_s = max(deadline_s - time.monotonic(), 0.0)
        try:
            promoted = owner.promote(keys[rows], signature, nbytes, left_s)
        except NoAnswer as exc:
            logger.warning("objects were not promoted: %s", exc)
            # Else its disk may have needed the whole time.
            if time.monotonic() < deadline_s or handle(number) is None:
                places["found"][rows] = Found.SILENT
            continue
        for row, one in zip(rows.tolist(), promoted, strict=True):
            if one.state is PromotionState.HERE:
                places[row]["slot"], places[row]["generation"] = one.slot, one.generation
            elif one.state is PromotionState.GONE:
                places[row]["found"] = Found.MISSING
