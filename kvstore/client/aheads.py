# SPDX-License-Identifier: Apache-2.0
"""Slots that an owner has claimed for this process before it needs them, so that a put of what
fits them asks once. Pure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from kvstore.owner.claims import Grant
from kvstore.protocol.messages import Ahead

__all__ = ["Aheads", "Claimed"]

USED_PART: Final = 0.5
"""A claim ahead is used within this part of its time: the write takes a while, too."""


class Claimed(NamedTuple):
    """One claim, which has no verdicts yet."""

    grant: Grant
    #: Of each object.
    nbytes: int
    #: By the clock: not used from then on.
    until_s: float


class Aheads:
    """The claim ahead that one owner has granted last. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._claimed: Claimed | None = None

    def keep(self, ahead: Ahead, nbytes: int, asked_s: float) -> None:
        """For objects of a size; ``asked_s``: when the owner was asked for it, by the clock.
        ``ValueError`` for what cannot be a claim."""
        if not 0 < ahead.tag < 1 << 64 or len(ahead.slots) % 4 or not ahead.slots:
            raise ValueError(f"tag {ahead.tag} and {len(ahead.slots)} bytes of slots are no claim")
        slots = np.frombuffer(ahead.slots, "<u4").tolist()
        grant = Grant(ahead.claim_id, ahead.tag, (), slots, ahead.label)
        with self._lock:
            self._claimed = Claimed(grant, nbytes, asked_s + ahead.ms / 1000 * USED_PART)

    def take(self) -> Claimed | None:
        """The claim, which nobody else gets any more; None if there is none that can be used."""
        with self._lock:
            claimed, self._claimed = self._claimed, None
        return claimed if claimed is not None and self._clock() < claimed.until_s else None

    def drop(self) -> None:
        """The owner has been started anew."""
        with self._lock:
            self._claimed = None
