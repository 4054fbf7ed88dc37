# SPDX-License-Identifier: Apache-2.0
"""Brings objects into the memory of this host, wherever they lie: in the owner's lower tier, or at
owners of other hosts. What comes from there is an object of this host like any other, and is
evicted like any other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.client.gets import Gets
from kvstore.client.pool import OWN, Pool
from kvstore.client.reading import StillLanding
from kvstore.objects.changes import LOWER_TIER, Found, Keys, Records, fingerprint_of
from kvstore.objects.outcomes import Got
from kvstore.owner.owner import Owner
from kvstore.rules.object_table import Verdict
from kvstore.rules.tiered_table import Promoted, PromotionState

__all__ = ["Bringing"]

Rows: TypeAlias = npt.NDArray[np.intp]

POLL_S: Final = 0.02
"""How long who waits for a slot, or for somebody else's read, sleeps when nothing wakes it."""
PART: Final = 8
"""1/8 of the memory is brought for one question at most, so that it does not push out itself."""

_GONE: Final = Promoted(PromotionState.GONE)
_LATER: Final = Promoted(PromotionState.LATER)
_COMING: Final = {Got.RIGHT, Got.NOT_PROMOTED, Got.TIMED_OUT}
"""Outcomes of a read after which it is looked again. Others have been tried twice."""
IN_TIME: Final = 2
"""What is read at once of an owner is expected to take 1/2 of the time that is left: over a slow
network not all of what is asked for comes before the question is answered, and what has come is
kept."""


class Bringing:
    """All methods are thread-safe."""

    def __init__(self, owner: Owner, pool: Pool, gets: Gets, memory_bytes: int) -> None:
        """``memory_bytes``: of the owner."""
        self._owner = owner
        self._pool = pool
        self._gets = gets
        self._bytes_max = memory_bytes // PART
        #: Notified when objects have come, or have not.
        self._landed = threading.Condition()

    def bring(
        self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float
    ) -> Sequence[Promoted]:
        """Has objects in this host's memory; waits for it. ``LATER`` for those that are not there
        in time: ask again. Several that want the same objects at once have them read once."""
        deadline_s = time.monotonic() + timeout_s
        results = [_LATER] * len(keys)
        rows = np.arange(len(keys), dtype=np.intp)
        room = max(self._bytes_max // nbytes, 1)
        while len(rows):
            found = self._here(keys[rows], signature, nbytes)
            for row, one in zip(rows.tolist(), found, strict=True):
                results[row] = one
            rows = rows[[one.state is not PromotionState.HERE for one in found]]
            if not len(rows) or time.monotonic() >= deadline_s or room <= 0:
                break
            some = rows[:room]
            room -= self._fetch(keys, some, signature, nbytes, results, deadline_s)
            rows = rows[[results[row].state is PromotionState.LATER for row in rows.tolist()]]
        return results

    def _here(self, keys: Keys, signature: bytes, nbytes: int) -> list[Promoted]:
        """``LATER`` for those that are not in memory."""
        _, places = self._owner.places(keys, signature, nbytes)
        return [
            Promoted(PromotionState.HERE, slot, generation)
            if generation and slot != LOWER_TIER
            else _LATER
            for slot, generation in places
        ]

    def _fetch(
        self,
        keys: Keys,
        rows: Rows,
        signature: bytes,
        nbytes: int,
        results: list[Promoted],
        deadline_s: float,
    ) -> int:
        """Once, from wherever these are; how many have come. Waits a while if none can be read
        now."""
        places = self._pool.look_up(keys[rows], fingerprint_of(signature, nbytes))
        is_known = places["found"] == Found.HERE
        is_own = is_known & (places["owner"] == OWN)
        is_other = is_known & ~is_own
        for row in rows[~is_known].tolist():
            results[row] = _GONE
        own, others = rows[is_own], rows[is_other]
        count = 0
        if len(own):
            left_s = max(deadline_s - time.monotonic(), 0.0)
            promoted = self._owner.promote(keys[own], signature, nbytes, left_s)
            said_lower = places["slot"][is_own] == LOWER_TIER
            is_late = False
            for row, one, is_lower in zip(own.tolist(), promoted, said_lower, strict=True):
                # The pool says that it is in memory: it is told soon that it was evicted, and knows
                # then where else it is.
                is_untold = one.state is PromotionState.GONE and not is_lower
                results[row] = _LATER if is_untold else one
                is_late |= is_untold
            count += sum(one.state is PromotionState.HERE for one in promoted)
            if is_late and not count:
                self._wait(deadline_s)
        if len(others):
            some = others[self._in_time(places["owner"][is_other], nbytes, deadline_s)]
            count += self._read(keys, some, signature, nbytes, results, deadline_s)
        return count

    def _in_time(self, owners: Records, nbytes: int, deadline_s: float) -> npt.NDArray[np.bool_]:
        """Which objects of these owners are read at once: of each as many as come in time, one at
        least; all, if its speed is not known. Owners are read from side by side."""
        left_s = max(deadline_s - time.monotonic(), 0.0)
        chosen = np.zeros(len(owners), np.bool_)
        for number in np.unique(owners).tolist():
            of_owner = np.flatnonzero(owners == number)
            speed = self._gets.bytes_per_s(number)
            count = max(int(speed * left_s / IN_TIME // nbytes), 1) if speed else len(of_owner)
            chosen[of_owner[:count]] = True
        return chosen

    def _wait(self, deadline_s: float) -> None:
        """Until objects have come, or have not, but ``POLL_S`` at most."""
        with self._landed:
            self._landed.wait(min(max(deadline_s - time.monotonic(), 0.0), POLL_S))

    def _read(
        self,
        keys: Keys,
        rows: Rows,
        signature: bytes,
        nbytes: int,
        results: list[Promoted],
        deadline_s: float,
    ) -> int:
        """From owners of other hosts, which may not have heard yet what was removed."""
        is_gone = self._owner.storing.removed_lately(keys[rows], signature)
        for row in rows[is_gone].tolist():
            results[row] = _GONE
        rows = rows[~is_gone]
        if not len(rows):
            return 0
        claim, pieces = self._owner.storing.room(keys[rows], signature, nbytes)
        for row, verdict in zip(rows.tolist(), claim.verdicts, strict=True):
            results[row] = _GONE if verdict is Verdict.TOO_LARGE else _LATER
        if not claim.slots:
            self._wait(deadline_s)
            return 0
        granted = rows[[one is Verdict.GRANTED for one in claim.verdicts]]
        outcomes = [Got.UNREACHABLE] * len(granted)
        checksums = np.zeros(len(granted), np.uint64)
        try:
            outcomes = self._gets.get(
                keys[granted], signature, pieces, deadline_s, checksums=checksums
            )
        except StillLanding as exc:
            exc.wait()  # Behind the deadline; but nobody may have these slots before.
        finally:
            self._owner.storing.landed(claim, [one is Got.RIGHT for one in outcomes], checksums)
            with self._landed:
                self._landed.notify_all()
        for row, one in zip(granted.tolist(), outcomes, strict=True):
            results[row] = _LATER if one in _COMING else _GONE
        return outcomes.count(Got.RIGHT)
