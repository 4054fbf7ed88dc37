# SPDX-License-Identifier: Apache-2.0
"""Copies of this host's objects at other owners. Each is put out of private memory, where it was
compared with its header and its checksum: a slot may be freed and filled anew at any time."""

from __future__ import annotations

from typing import Final

import numpy as np

import te
from kvstore.client.deadline import Deadline
from kvstore.client.memory import Memory
from kvstore.client.pool import Pool
from kvstore.client.puts import Puts
from kvstore.objects.changes import Keys
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Put
from kvstore.objects.pieces import Pieces
from kvstore.owner.owner import Owner

__all__ = ["Copies"]

ROOM_BYTES: Final = 8 << 20
"""Private memory of one request, or as much as one object has."""


class Copies:
    """All methods are thread-safe."""

    def __init__(self, owner: Owner, pool: Pool, memory: Memory, copier: Copier) -> None:
        self._owner = owner
        self._pool = pool
        self._memory = memory
        self._copier = copier

    def copy(self, keys: Keys, signature: bytes, nbytes: int, copies: int) -> list[Put]:
        """Has so many owners in all have those of the objects that lie in this host's memory; waits
        for it. What is removed meanwhile is not copied, or was copied before. One outcome for each
        key: ``FAILED`` for those that did not lie there whole."""
        outcomes = [Put.FAILED] * len(keys)
        until = Deadline(self._pool.request_timeout_s)
        here = np.flatnonzero(self._owner.holds(keys, signature, nbytes))
        if not len(here):  # Also of a size that no object can have.
            return outcomes
        step = min(max(ROOM_BYTES // nbytes, 1), len(here))
        puts = Puts(self._pool, self._memory, copies, self._copier)
        buffer = te.allocate(step * nbytes)
        region = self._memory.register(buffer)
        try:
            starts = np.uint64(region.address) + np.arange(step, dtype=np.uint64) * np.uint64(
                nbytes
            )
            room = Pieces.whole(starts, nbytes)
            for first in range(0, len(here), step):
                some = here[first : first + step]
                rows = self._owner.bring(keys[some], signature, room.between(0, len(some)))
                found = puts.put(keys[some[rows]], signature, room.of(rows), until)
                for row, one in zip(some[rows].tolist(), found, strict=True):
                    outcomes[row] = one
        finally:
            self._memory.deregister(region)
        return outcomes
