# SPDX-License-Identifier: Apache-2.0
"""A fast tier above a large one, such as a disk above object storage.

Objects are written to the upper tier, and copied to the lower one by a thread. So whoever makes
room in memory waits for the upper tier alone, and what has to leave the upper tier lies in the
lower one already, unless that is the slower one for long. What is read from the lower tier is
written to the upper one again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from kvstore.memory.slab import UNIT_BYTES
from kvstore.tiers.base import Found, Laid, Tier, Usage, Wanted, Written
from kvstore.tiers.segmentfiles import aligned
from kvstore.tiers.whereabouts import Whereabouts

__all__ = ["Stacked"]

logger = logging.getLogger(__name__)

COPY_BYTES: Final = 64 << 20
"""Copied at once: four bundles of an object store, which are written side by side."""
LINGER_S: Final = 1.0
"""Less than that waits so long for more, since few large objects are cheaper than many small."""
RAISED_BYTES: Final = 64 << 20
"""What was read from the lower tier and waits to be written to the upper; more is not written."""
RETRY_S: Final = 5.0
"""Between two attempts to copy while the lower tier's writes fail."""


class Stacked:
    """See ``Tier``. Its thread begins with ``found``."""

    def __init__(self, upper: Tier, lower: Tier) -> None:
        """Both tiers are this object's from now on, and closed by it."""
        self._upper: Final = upper
        self._lower: Final = lower
        self._lock: Final = threading.Lock()
        self._work: Final = threading.Condition(self._lock)
        self._where: Final = Whereabouts()
        #: Held while the upper tier is written to: by the caller, and by the thread.
        self._writing: Final = threading.Lock()
        self._raised: list[Laid] = []
        self._raised_bytes = 0
        self._is_closing = False
        #: Of a small upper tier it is less: what leaves it before it was copied is gone.
        self._enough: Final = min(COPY_BYTES, upper.usage().capacity // 8)
        self._thread = threading.Thread(target=self._run, name="kvstore-copies", daemon=True)

    @property
    def batch_max(self) -> int:
        """See ``Tier``."""
        return self._upper.batch_max

    def close(self) -> None:
        """See ``Tier``. What was not copied yet is copied after a restart."""
        with self._lock:
            self._is_closing = True
            self._work.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._upper.close()
        self._lower.close()

    def usage(self) -> Usage:
        """See ``Tier``. Bytes that lie in both tiers count twice."""
        upper, lower = self._upper.usage(), self._lower.usage()
        with self._lock:
            return Usage(
                len(self._where),
                upper.nbytes + lower.nbytes,
                upper.capacity + lower.capacity,
                upper.failed + lower.failed,
                upper.corrupted + lower.corrupted,
            )

    def found(self) -> Sequence[Found]:
        """See ``Tier``."""
        upper, lower = self._upper.found(), self._lower.found()
        with self._lock:
            found = self._where.found(upper, lower)
        self._thread.start()
        return found

    # -- calls

    def write(self, objects: Sequence[Laid]) -> Written:
        """See ``Tier``."""
        with self._writing:
            stored = self._write_high(objects)
        with self._lock:
            self._work.notify()
            return Written(stored, self._where.gone())

    def _write_high(self, objects: Sequence[Laid]) -> Sequence[bool]:
        """Who calls holds ``_writing``."""
        written = self._upper.write(objects)
        with self._lock:
            self._where.left_upper(written.gone)
            for one, is_stored in zip(objects, written.stored, strict=True):
                if is_stored:
                    self._where.stored(one.name, one.nbytes)
        return written.stored

    def remove(self, names: Sequence[bytes]) -> None:
        """See ``Tier``. The lower tier follows soon: a restart before that finds them there."""
        with self._writing:
            self._upper.remove(names)
            with self._lock:
                self._where.remove(names)
                self._work.notify()

    def read(self, objects: Sequence[Wanted], *, is_use: bool = True) -> Sequence[int | None]:
        """See ``Tier``."""
        with self._lock:
            high = [one for one in objects if self._where.is_in_upper(one.name)]
        found = self._read(self._upper, high, is_use=is_use)
        with self._lock:
            self._where.left_upper(one.name for one in high if one.name not in found)
            deep = [
                one
                for one in objects
                if one.name not in found and self._where.is_in_lower(one.name)
            ]
        from_lower = self._read(self._lower, deep, is_use=is_use)
        with self._lock:
            self._where.left_lower(one.name for one in deep if one.name not in from_lower)
        self._raise([one for one in deep if one.name in from_lower], from_lower)
        found |= from_lower
        return [found.get(one.name) for one in objects]

    @staticmethod
    def _read(tier: Tier, objects: Sequence[Wanted], *, is_use: bool) -> dict[bytes, int]:
        """The checksums of those that are right."""
        if not objects:
            return {}
        checksums = tier.read(objects, is_use=is_use)
        return {
            one.name: checksum
            for one, checksum in zip(objects, checksums, strict=True)
            if checksum is not None
        }

    def _raise(self, objects: Sequence[Wanted], checksums: dict[bytes, int]) -> None:
        """Has copies of them written to the upper tier, as far as there is memory for that."""
        for one in objects:
            with self._lock:
                if self._raised_bytes + one.nbytes > RAISED_BYTES:
                    return
                self._raised_bytes += one.nbytes
            memory = _pages(one.nbytes)
            memory[: one.nbytes] = one.memory[: one.nbytes]
            with self._lock:
                self._raised.append(Laid(one.name, one.nbytes, checksums[one.name], memory))
                self._work.notify()

    # -- the thread

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._is_closing, pause_s)
                self._work.wait_for(self._has_work)
                self._work.wait_for(self._has_enough, LINGER_S)
                is_last = self._is_closing
            try:
                pause_s = 0.0 if self._turn(copies=not is_last) else RETRY_S
            except Exception:
                logger.exception("a bug in the store: a tier raised; it is tried again")
                pause_s = RETRY_S
            if is_last:
                return

    def _has_work(self) -> bool:
        where = self._where
        return bool(self._is_closing or self._raised or where.has_unwanted or where.has_waiting)

    def _has_enough(self) -> bool:
        return self._is_closing or self._where.waiting_bytes >= self._enough

    def _turn(self, *, copies: bool = True) -> bool:
        """Whether it is worth going on at once."""
        with self._lock:
            turn = self._where.turn(self._lower.batch_max if copies else 0, COPY_BYTES)
            raised, self._raised = self._raised, []
            self._raised_bytes -= sum(one.nbytes for one in raised)
        if turn.unwanted:
            self._lower.remove(turn.unwanted)
        if copies:
            self._write_raised(raised)
        return not turn.copies or self._copy(turn.copies)

    def _write_raised(self, raised: Sequence[Laid]) -> None:
        """Writes to the upper tier what is in the lower one alone still."""
        for first in range(0, len(raised), self.batch_max):
            some = {one.name: one for one in raised[first : first + self.batch_max]}
            with self._writing:
                with self._lock:
                    alone = [
                        one for name, one in some.items() if self._where.is_in_lower_tier(name)
                    ]
                if alone:
                    self._write_high(alone)

    def _copy(self, copies: Sequence[tuple[bytes, int]]) -> bool:
        """Whether no write has failed. Objects of one that failed are copied again; what the lower
        tier has no room for is not."""
        stored: dict[bytes, bool] = {}
        gone: Sequence[bytes] = ()
        lost: list[bytes] = []
        is_failing = True
        try:
            wanted = [Wanted(name, nbytes, _pages(nbytes)) for name, nbytes in copies]
            found = self._read(self._upper, wanted, is_use=False)
            lost = [one.name for one in wanted if one.name not in found]
            there = [one for one in wanted if one.name in found]
            laid = [Laid(one.name, one.nbytes, found[one.name], one.memory) for one in there]
            failed = self._lower.usage().failed
            if laid:
                written = self._lower.write(laid)
                gone = written.gone
                stored = {
                    one.name: is_stored for one, is_stored in zip(laid, written.stored, strict=True)
                }
            is_failing = self._lower.usage().failed > failed
        finally:
            with self._lock:
                self._where.left_upper(lost)
                self._where.left_lower(gone)
                for name, nbytes in copies:
                    is_stored = stored.get(name, False)
                    self._where.copied(name, nbytes, is_stored=is_stored, again=is_failing)
        return not is_failing


def _pages(nbytes: int) -> memoryview:
    """Memory as ``Laid`` and ``Wanted`` need it."""
    return aligned(-(-nbytes // UNIT_BYTES) * UNIT_BYTES)
