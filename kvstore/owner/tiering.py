# SPDX-License-Identifier: Apache-2.0
"""Carries an owner's objects between its memory and the lower tier: demotes in a thread of its own,
promotes in some others, for which whoever wants the objects waits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kvstore.memory.slab import UNIT_BYTES
from kvstore.rules.ledger import Demoting
from kvstore.rules.tiered_table import Promoted, PromotionState, TieredTable
from kvstore.threads import Threads
from kvstore.tiers.base import Laid, Tier, Usage, Wanted

__all__ = ["Tiering"]

logger = logging.getLogger(__name__)

READS_MAX: Final = 4
"""Promotions that read at once."""
POLL_S: Final = 0.02
"""How long who waits for a slot sleeps when nothing wakes it: the owner's tick makes room."""


class Tiering:
    """All methods are thread-safe; those that wait say so."""

    def __init__(
        self,
        tier: Tier,
        table: TieredTable,
        lock: threading.Lock,
        memory: memoryview,
        tell: Callable[[], None],
    ) -> None:
        """
        Args:
            tier: is this object's from now on, and closed by it.
            table: of the owner.
            lock: guards the table.
            memory: of the slab.
            tell: called after changes, without the lock.
        """
        self._tier = tier
        self._table = table
        self._lock = lock
        #: Notified when there is something to write to the tier, and when something was written.
        self._work = threading.Condition(lock)
        self._written = threading.Condition(lock)
        self._memory = memory
        self._tell = tell
        self._is_closing = False
        self._is_writing = False
        #: Reads under way. A device that hangs keeps its slots, and no caller beyond his deadline.
        self._reads = 0
        self._readers = Threads(READS_MAX, "kvstore-promote")
        self._readers.begin()
        self._thread = threading.Thread(target=self._run, name="kvstore-demote", daemon=True)
        self._thread.start()

    def usage(self) -> Usage:
        """Of the tier."""
        return self._tier.usage()

    @property
    def is_idle(self) -> bool:
        """Whether all that left memory or was removed has been done in the tier. Who asks holds the
        lock."""
        ledger = self._table.ledger
        return not (self._is_writing or ledger.has_work or ledger.demoting)

    def wake(self) -> None:
        """The table may have something to write to the tier, or to forget there."""
        with self._lock:
            if self._table.ledger.has_work:
                self._work.notify()

    def close(self, drain_s: float) -> None:
        """Writes what is in memory alone to the lower tier, as far as the time allows, and closes
        the tier. Nobody may change the table meanwhile. Waits for both."""
        with self._lock:
            if drain_s:
                self._table.demote_all()
            self._work.notify()
            is_done = self._written.wait_for(lambda: not self._table.ledger.demoting, drain_s)
            left = len(self._table.ledger.demoting)
            self._is_closing = True
            self._work.notify()
        if not is_done:
            logger.warning("%d objects were not written to the lower tier in %g s", left, drain_s)
        self._thread.join()
        self._readers.shutdown()
        self._tier.close()

    # -- promoting

    def promote(
        self, names: Sequence[bytes], nbytes: int, bytes_max: int, deadline_s: float
    ) -> list[Promoted]:
        """Has objects of one signature and size in memory, so many bytes at most; waits for it.
        ``LATER`` for those beyond that, and for those that are not there at the deadline."""
        most = max(bytes_max // nbytes, 1)
        results: dict[bytes, Promoted] = {}
        open_names = list(dict.fromkeys(names))
        while open_names and most > 0:
            found = self._promote(open_names[:most], nbytes, deadline_s)
            if not found and time.monotonic() >= deadline_s:
                break
            results |= found
            most -= sum(one.state is PromotionState.HERE for one in found.values())
            open_names = [name for name in open_names if name not in found]
        return [results.get(name, Promoted(PromotionState.LATER)) for name in names]

    def _promote(
        self, names: Sequence[bytes], nbytes: int, deadline_s: float
    ) -> dict[bytes, Promoted]:
        """The objects for which there is an answer; waits a while if there is none."""
        read: Future[dict[bytes, Promoted]] | None = None
        with self._lock:
            found: dict[bytes, Promoted] = {}
            if self._reads < READS_MAX:
                found = dict(zip(names, self._table.promote(names, nbytes), strict=True))
                self._work.notify()  # Others may have to leave.
            taken = {name: one for name, one in found.items() if one.state is PromotionState.TAKEN}
            if taken:
                self._reads += 1
                read = self._readers.submit(self._read, taken, nbytes)
            elif all(one.state is PromotionState.LATER for one in found.values()):
                self._written.wait(min(max(deadline_s - time.monotonic(), 0.0), POLL_S))
        done = {
            name: one
            for name, one in found.items()
            if one.state in (PromotionState.HERE, PromotionState.GONE)
        }
        if read is not None:
            with contextlib.suppress(TimeoutError):
                done |= read.result(max(deadline_s - time.monotonic(), 0.0))
        return done

    def _read(self, taken: dict[bytes, Promoted], nbytes: int) -> dict[bytes, Promoted]:
        names = list(taken)
        checksums: Sequence[int | None] = [None] * len(names)
        try:
            checksums = self._tier.read(
                [Wanted(name, nbytes, self._slot(one.slot, nbytes)) for name, one in taken.items()]
            )
        finally:
            with self._lock:
                self._reads -= 1
                landed = self._table.landed(names, nbytes, checksums)
                self._written.notify_all()
        self._tell()
        return dict(zip(names, landed, strict=True))

    def _slot(self, slot: int, nbytes: int) -> memoryview:
        start = self._table.slab.slot_offset(slot)
        return self._memory[start : start + -(-nbytes // UNIT_BYTES) * UNIT_BYTES]

    # -- demoting

    def _run(self) -> None:
        while True:
            with self._lock:
                unwanted, demoting = self._table.ledger.take(self._tier.batch_max)
                if not unwanted and not demoting:
                    if self._is_closing:
                        return
                    self._work.wait()
                    continue
                if self._is_closing:  # What is left of a drain that was too slow.
                    demoting = self._give_up(demoting)
                laid = [self._laid(one) for one in demoting]
                self._is_writing = True
            self._write(unwanted, demoting, laid)

    def _give_up(self, demoting: Sequence[Demoting]) -> list[Demoting]:
        self._table.demoted(demoting, [False] * len(demoting))
        return []

    def _laid(self, one: Demoting) -> Laid:
        nbytes, checksum = self._table.content_of(one.slot)
        return Laid(one.name, nbytes, checksum, self._slot(one.slot, nbytes))

    def _write(
        self, unwanted: Sequence[bytes], demoting: Sequence[Demoting], laid: Sequence[Laid]
    ) -> None:
        stored: Sequence[bool] = [False] * len(laid)
        gone: Sequence[bytes] = ()
        try:
            self._tier.remove(unwanted)
            if laid:
                written = self._tier.write(laid)
                stored, gone = written.stored, written.gone
        except Exception:
            logger.exception("a bug in the store: a tier raised; its objects are dropped")
        with self._lock:
            self._table.gone_from_tier(gone)
            self._table.demoted(demoting, stored)
            self._is_writing = False
            self._written.notify_all()
        self._tell()
