# SPDX-License-Identifier: Apache-2.0
"""Objects of this host at other owners: copies of those that lie here, and those that pass through
this memory on their way there."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import te
from kvstore.client.deadline import Deadline
from kvstore.client.memory import Memory
from kvstore.client.pool import Pool
from kvstore.client.puts import Puts
from kvstore.objects.changes import Keys, fingerprint_of
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Put
from kvstore.objects.pieces import U64
from kvstore.owner.answers import in_row, keys_of
from kvstore.owner.owner import Owner
from kvstore.rate_limited_log import RateLimitedLog
from kvstore.rules.object_table import Claim

__all__ = ["Copies"]

logger = logging.getLogger(__name__)

ROOM_BYTES: Final = 8 << 20
"""Private memory for copies, or as much as one object has."""
_THERE: Final = {Put.STORED, Put.EXISTS}


class Copies:
    """All methods are thread-safe."""

    def __init__(self, owner: Owner, pool: Pool, memory: Memory, copier: Copier) -> None:
        self._owner = owner
        self._pool = pool
        self._memory = memory
        self._copier = copier
        self._log = RateLimitedLog(logger)
        #: Of the private memory: one question at a time, so that all together need no more.
        self._turn = threading.Lock()
        self._buffer: Any = None
        self._region: te.Region | None = None

    def send(self, claim: Claim, checksums: U64, deadline: Deadline) -> list[Put]:
        """Stores objects elsewhere that have come to slots of this memory, out of these: nobody can
        read or free them yet. Waits for it. Those that are stored there can be read here then, and
        the slots of the others are free. One outcome for each granted object."""
        keys = keys_of(b"".join(claim.keys))
        puts = Puts(self._pool, self._memory, 1, self._copier)
        try:
            found = puts.put(keys, claim.signature, self._owner.storing.pieces_of(claim), deadline)
        except BaseException:
            self._owner.storing.drop(claim)
            raise
        self._owner.storing.keep_some(claim, checksums, [one in _THERE for one in found])
        return found

    def copy(self, keys: Keys, signature: bytes, nbytes: int, copies: int) -> list[Put]:
        """Has so many owners in all have those of the objects that lie in this host's memory; waits
        for it. What is removed meanwhile is not copied, or was copied before. One outcome for each
        key: ``FAILED`` for those that did not lie there whole. The log says how many have fewer
        copies now.

        Each is put out of private memory, where it was compared with its header and its checksum: a
        slot may be freed and filled anew at any time.
        """
        until = Deadline(self._pool.request_timeout_s)
        outcomes = [Put.EXISTS] * len(keys)
        fingerprint = fingerprint_of(signature, nbytes)
        known = self._pool.look_up(keys, fingerprint, self._pool.ranks_of_puts)["copies"]
        lacking = np.flatnonzero(known < copies)
        here = self._owner.holds(keys[lacking], signature, nbytes)
        for row in lacking.tolist():
            outcomes[row] = Put.FAILED
        if here.any():
            self._copy(keys, lacking[here], signature, nbytes, copies, until, outcomes)
        late = Counter(outcomes[row].value for row in lacking.tolist())
        del late[Put.STORED.value], late[Put.EXISTS.value]
        if late:
            self._log.warn(
                "%d of %d objects have fewer copies than %d: %s",
                late.total(),
                len(keys),
                copies,
                ", ".join(f"{count} {outcome}" for outcome, count in late.items()),
            )
        return outcomes

    def _copy(
        self,
        keys: Keys,
        rows: npt.NDArray[np.intp],
        signature: bytes,
        nbytes: int,
        copies: int,
        until: Deadline,
        outcomes: list[Put],
    ) -> None:
        """Objects of this host, some at a time; gives them their outcomes."""
        puts = Puts(self._pool, self._memory, copies, self._copier)
        if not self._turn.acquire(timeout=until.left_s):
            for row in rows.tolist():
                outcomes[row] = Put.TIMED_OUT
            return
        try:
            step = max(ROOM_BYTES // nbytes, 1)
            room = in_row(self._room_of(step * nbytes), step, nbytes)
            for first in range(0, len(rows), step):
                some = rows[first : first + step]
                right = self._owner.bring(keys[some], signature, room.between(0, len(some)))
                found = puts.put(keys[some[right]], signature, room.of(right), until)
                for row, one in zip(some[right].tolist(), found, strict=True):
                    outcomes[row] = one
        finally:
            self._turn.release()

    def _room_of(self, nbytes: int) -> int:
        """Where so many bytes of private memory begin; for who has the turn."""
        if self._region is None or self._region.nbytes < nbytes:
            if self._region is not None:
                self._memory.deregister(self._region)
            self._buffer = te.allocate(max(nbytes, ROOM_BYTES))
            self._region = self._memory.register(self._buffer)
        return self._region.address
