# SPDX-License-Identifier: Apache-2.0
"""The memory that a process lends to the store, and what lies in it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import te
from kvstore import _bytes
from kvstore.config import Config
from kvstore.memory.host_memory import check_room
from kvstore.memory.memory_file import MemoryFile
from kvstore.memory.policies import POLICIES
from kvstore.memory.populating import Populating
from kvstore.memory.slab import UNIT_BYTES, Slab
from kvstore.memory.slab_file import SlabFile
from kvstore.objects.changes import Keys, Records
from kvstore.objects.copying import Copier
from kvstore.objects.headers import HEADER, HEADER_BYTES, expected
from kvstore.objects.outcomes import Pinned
from kvstore.objects.pieces import Pieces
from kvstore.owner.card import OwnerCard, OwnerStats
from kvstore.owner.labelling import LabelRooms
from kvstore.owner.opening import open_tier
from kvstore.owner.removed import Removed
from kvstore.owner.storing import Storing
from kvstore.owner.tiering import Tiering
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger
from kvstore.rules.removals import Removals
from kvstore.rules.stored_objects import TableParts
from kvstore.rules.tiered_table import Promoted, PromotionState, TieredTable
from kvstore.tiers.base import Found, Tier, Usage
from kvstore.tiers.tombstones import Tombstones

__all__ = ["Owner"]

logger = logging.getLogger(__name__)

CHANGES_KEPT: Final = 1 << 16
DEMOTING_PART: Final = 1 / 16
"""This part of the memory may wait to be written to the lower tier, beside that which eviction
wants to be free (``Config.free_high``); what is evicted for puts beyond that is dropped."""
PROMOTED_PART: Final = 8
"""1/8 of the memory is promoted for one question at most, so that it does not push out itself."""
DRAIN_S: Final = 20.0
"""How long an owner that ends writes what lies in memory alone to the lower tier."""


class Owner:
    """Lends memory. All methods are thread-safe; those that wait say so."""

    def __init__(
        self,
        engine: te.Engine,
        config: Config,
        memory: MemoryFile | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        populates: bool = True,
    ) -> None:
        """Allocates the memory and registers it: peers may read all of it, and write under tags.
        ``populates``: its pages are there before anybody needs them.
        What a former owner has left behind in ``Config.file``, or in the memory that is given, is
        there again. Raises what ``check_room`` and ``SlabFile`` raise."""
        self._engine = engine
        self._config = config
        self._clock = clock
        slab = Slab(config.memory, config.chunk_bytes_used)
        self._slab = slab
        self._file: SlabFile | None = None
        self._keeps_file = False
        self._lock = threading.Lock()
        #: Of which all have been told.
        self._evicted = 0
        self._log = ChangeLog(CHANGES_KEPT)
        #: Called whenever there are new changes, in the thread that has made them: those of this
        #: process before who has made them is told, those that tell others later, too.
        self.listeners: Final[list[Callable[[], None]]] = []
        self.announcers: Final[list[Callable[[], None]]] = []
        with contextlib.ExitStack() as undo:
            self._buffer: Any = None
            #: The descriptor of the memory, for processes of this host that read there; None if
            #: they could make it shorter, or take huge pages out of it.
            self.shared: int | None = None
            if config.file is not None:
                self._file = SlabFile(config.file, slab.nbytes, config.chunk_bytes_used)
                undo.callback(self._file.close)
                self._buffer = self._file.buffer
            elif memory is not None:
                self._buffer, self.shared = memory.buffer, memory.readable_fd
            else:
                check_room("memory", config.memory)
                allocated = te.allocate(slab.nbytes)
                self._buffer = allocated
                self.shared = None if allocated.huge else allocated.fd
            self._bytes = memoryview(self._buffer)
            start = np.frombuffer(self._buffer, np.uint8).ctypes.data
            self._slots_address = start + slab.slots_offset
            self._populating: Populating | None = None
            if self._file is None and populates:  # A file's blocks are there.
                self._populating = Populating(start, slab.nbytes)
                undo.callback(self._populating.close)
            self._copier = Copier()
            undo.callback(self._copier.close)
            headers = np.frombuffer(self._buffer, HEADER, slab.units)
            demoting = int(config.memory * (config.free_high + DEMOTING_PART))
            ledger = Ledger(demoting if config.has_tier else 0)
            self._table = TieredTable(
                TableParts(slab, headers, POLICIES[config.policy], self._log, ledger)
            )
            if self._file is not None:
                kept, dropped = self._table.adopt(self._checksum)
                logger.info("%s has %d objects; %d were dropped", config.file, kept, dropped)
            elif memory is not None and memory.is_adopted:
                # The machine has run all the time: headers are true of what is behind them.
                sums = headers["checksum"]
                kept, dropped = self._table.adopt(lambda slot, _: int(sums[slot]))
                logger.info("the last owner's memory has %d objects; %d dropped", kept, dropped)
            self._removed = Removed(self._lock, str(config.disk or config.objects))
            undo.callback(self._removed.close)
            self._tiering = self._open_tier()
            if self._tiering is not None:
                undo.callback(self._tiering.close, 0.0)
            self._labels = LabelRooms(engine)
            undo.callback(self._labels.close)
            self.region = engine.register(self._buffer, remote="read-tagged")
            undo.pop_all()
        self._removals = Removals()
        self.storing: Final = Storing(
            engine,
            config,
            self._table,
            self._lock,
            self._copier,
            self._slots_address,
            self._removals,
            self._labels,
            # Not ``self.tell``: a closed owner gives back its memory at once.
            partial(_call, self.listeners, self.announcers),
            clock,
        )
        self.card: Final = OwnerCard(
            engine.card(),
            engine.epoch,
            self.region.address,
            self.region.address + slab.slots_offset,
            slab.chunks,
            slab.object_bytes_max,
            self._table.parts,
        )

    @property
    def buffer(self) -> Any:
        """The memory."""
        return self._buffer

    def _open_tier(self) -> Tiering | None:
        opened = open_tier(self._config, self._slab.object_bytes_max)
        if opened is None:
            return None
        tier, self._removed.stones = opened.tier, opened.stones
        try:
            found = self._without_removed(tier, tier.found())
        except BaseException:
            tier.close()
            raise
        taken = self._table.adopt_lower_tier(found)
        logger.info(
            "%s has %d objects; %d more are larger than a chunk of the memory",
            opened.label,
            taken,
            len(found) - taken,
        )
        return Tiering(tier, self._table, self._lock, self._bytes, self.tell)

    def _without_removed(self, tier: Tier, found: Sequence[Found]) -> Sequence[Found]:
        """What lies in the lower tier, less what was removed before a former process was killed."""
        stones = self._removed.stones
        if not isinstance(stones, Tombstones):
            return found  # Object storage has left it out already.
        removed = set(stones.removed([one.name for one in found]))
        tier.remove(list(removed))
        if not (removed and self._config.objects):  # These follow a disk in their own time.
            stones.reset()
        return [one for one in found if one.name not in removed]

    def close(self) -> None:
        """Ends the registration: nobody can read or write the memory any more. Waits for writes
        under way; raises ``te.FenceTimeout`` if they do not end. What lies in memory alone is
        written to the lower tier, unless a file keeps it."""
        self.storing.close()
        self.listeners.clear()
        self.announcers.clear()
        if self._populating is not None:
            self._populating.close()
        self._copier.close()
        try:
            try:
                self._labels.close()
            finally:
                self._engine.deregister(self.region)
        finally:
            if self._tiering is not None:
                self._tiering.close(DRAIN_S if self._file is None else 0.0)
            self._removed.close()
        if self._file is not None and not self._keeps_file:
            self._file.close()

    def keep_file(self) -> None:
        """Somebody may write to the memory behind ``close``: no other process gets its file before
        this one has ended. (Memory without a file is taken over with the host's ``Lock``, which
        ends with the process.)"""
        self._keeps_file = True

    @property
    def claim_timeout_s(self) -> float:
        """``Config.claim_timeout_s``."""
        return self._config.claim_timeout_s

    # -- what is stored

    def touch(self, keys: Keys, signature: bytes) -> None:
        """Says that objects were read."""
        with self._lock:
            self._table.touch(keys, signature)

    def promote(
        self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float
    ) -> Sequence[Promoted]:
        """Has objects in memory that lie in the lower tier: reads them into slots, which others may
        have to leave. At most 1/8 of the memory; ask again for those that come ``LATER``. Waits for
        the tier; without one an object is in memory, or ``GONE``. One answer for each key."""
        if self._tiering is None:
            _, places = self.places(keys, signature, nbytes)
            return [
                Promoted(PromotionState.HERE, *place) if place[1] else Promoted(PromotionState.GONE)
                for place in places
            ]
        names = [key.tobytes() + signature for key in keys]
        bytes_max = self._config.memory // PROMOTED_PART
        return self._tiering.promote(names, nbytes, bytes_max, time.monotonic() + timeout_s)

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> tuple[list[Pinned], str]:
        """See ``PinnedTable.pin``: for so many seconds."""
        with self._lock:
            return self._table.pin(keys, signature, self._clock() + ttl_s)

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """See ``PinnedTable.unpin``."""
        with self._lock:
            self._table.unpin(keys, signature)

    def remove(self, keys: Keys, signature: bytes) -> Sequence[bool]:
        """Removes objects; returns which of them there were. After this no restart finds them on a
        disk or in object storage: waits until it is told there."""
        # A request to object storage has a deadline.
        return self.remove_soon(keys, signature).result()

    def remove_soon(self, keys: Keys, signature: bytes) -> Future[Sequence[bool]]:
        """As ``remove``, but does not wait for object storage: nobody finds the objects any more,
        and a restart does not once the future is done."""
        self.storing.settle()
        with self._lock:
            names = [one.tobytes() + signature for one in keys]
            ledger = self._table.ledger
            tiered = [one for one in names if one in ledger or one in ledger.demoting]
            found: Sequence[bool] = self._table.remove(keys, signature)
            self._removals.add(names, self._clock())
            self._removed.begin()
        told = self._removed.tell(lambda stones: stones.remove(tiered), found, waits=bool(tiered))
        self._has_changed()
        return told

    def clear(self, signature: bytes) -> int:
        """Removes all objects of a signature, as ``remove``; returns how many there were."""
        return self.clear_soon(signature).result()

    def clear_soon(self, signature: bytes) -> Future[int]:
        """As ``remove_soon``."""
        self.storing.settle()
        with self._lock:
            count = self._table.clear(signature)
            self._removals.add([signature], self._clock())
            self._removed.begin()
        told = self._removed.tell(lambda stones: stones.clear(signature), count, waits=True)
        self._has_changed()
        return told

    def sizes(self, keys: Keys, signature: bytes) -> Sequence[int]:
        """See ``ObjectTable.sizes``."""
        with self._lock:
            return self._table.sizes(keys, signature)

    def holds(self, keys: Keys, signature: bytes, nbytes: int) -> npt.NDArray[np.bool_]:
        """Which objects of this size lie in this process's memory."""
        _, places = self.places(keys, signature, nbytes)
        return np.array([generation > 0 for _, generation in places], np.bool_)

    def bring(self, keys: Keys, signature: bytes, pieces: Pieces) -> npt.NDArray[np.intp]:
        """Copies objects out of this process's memory to pieces that the processor can write, and
        compares them with their headers and checksums. The rows of those that are right."""
        nbytes = pieces.object_bytes
        _, places = self.places(keys, signature, nbytes)
        slots, generations = np.array(places, np.uint64).reshape(-1, 2).T
        here = np.flatnonzero(generations)
        wanted = expected(keys[here], signature, nbytes, generations[here])
        begin = slots[here] * np.uint64(UNIT_BYTES) + np.uint64(self._slots_address)
        headers = slots[here] * np.uint64(HEADER_BYTES) + np.uint64(self.region.address)
        codes = self._copier.bring(begin, headers, wanted, pieces.of(here), verify=True)
        right: npt.NDArray[np.intp] = here[codes == _bytes.RIGHT]
        return right

    def tick(self) -> None:
        """What has to be done from time to time: makes room, ends overdue claims, and tries fences
        again that were not confirmed. Waits for none of them."""
        now_s = self._clock()
        with self._lock:
            self._table.unpin_overdue(now_s)
            self._table.make_room(self._config.free_low, self._config.free_high)
            evicted = self._table.counts.evicted
        # Some may have left for a put that was given up.
        if evicted != self._evicted:
            self._evicted = evicted
            self.tell()
        if self._tiering is not None:
            self._tiering.wake()
        # Object storage follows a disk in its own time: the next start sees whether it has.
        if self._tiering is not None and not (self._config.disk and self._config.objects):
            self._removed.forget(self._tiering)
        self.storing.tick()

    # -- what others are told

    @property
    def changes(self) -> int:
        """The number of the next change."""
        with self._lock:
            return len(self._log)

    def since(self, number: int, limit: int) -> Records | None:
        """See ``ChangeLog.since``."""
        with self._lock:
            return self._log.since(number, limit)

    def snapshot(self, first_chunk: int, chunks: int) -> tuple[int, Records]:
        """What lies in some of the card's parts, as additions, and the number of the next
        change."""
        with self._lock:
            return len(self._log), self._table.snapshot(first_chunk, chunks)

    def places(
        self, keys: Keys, signature: bytes, nbytes: int
    ) -> tuple[int, Sequence[tuple[int, int]]]:
        """The number of the next change, and ``ObjectTable.places``."""
        with self._lock:
            return len(self._log), self._table.places(keys, signature, nbytes)

    def stats(self) -> OwnerStats:
        """Counters since the start."""
        usage = Usage(0, 0, 0, 0, 0) if self._tiering is None else self._tiering.usage()
        with self._lock:
            counts, ledger = self._table.counts, self._table.ledger
            return OwnerStats(
                len(self._table),
                dict(counts.verdicts),
                counts.published,
                counts.abandoned,
                counts.evicted,
                counts.removed,
                len(self._log),
                self._slab.used_bytes,
                len(ledger),
                usage.nbytes,
                usage.capacity,
                len(ledger.demoting),
                ledger.counts.demoted,
                ledger.counts.promoted,
                ledger.counts.dropped,
                usage.failed,
                usage.corrupted,
                len(self._table.pins),
            )

    def _has_changed(self) -> None:
        self.tell()
        if self._tiering is not None:
            self._tiering.wake()

    def tell(self) -> None:
        """Has all look for changes. All calls do that that change something, but those of
        ``Storing`` that say so."""
        self.tell_here()
        self.tell_others()

    def tell_here(self) -> None:
        """Has this process's listeners look for changes."""
        _call(self.listeners)

    def tell_others(self) -> None:
        """Has other processes told of changes."""
        _call(self.announcers)

    def _checksum(self, slot: int, nbytes: int) -> int:
        place = Pieces.whole([self._slots_address + slot * UNIT_BYTES], nbytes)
        return int(self._copier.checksums(place)[0])


def _call(*listeners: list[Callable[[], None]]) -> None:
    for some in listeners:
        for one in tuple(some):
            one()
