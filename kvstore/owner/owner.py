# SPDX-License-Identifier: Apache-2.0
"""The memory that a process lends to the store, and what lies in it.

A put has two phases. A client *claims* slots: the owner opens a tag for them that this client alone
may write under. When the client says that its write has ended, the owner fences the tag, compares
what arrived with what was claimed, computes checksums and *publishes* the objects. A client that
vanishes in between costs its slots until the claim's deadline.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import compress
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
from kvstore.objects.copying import Copier, Foreign
from kvstore.objects.headers import HEADER, HEADER_BYTES, expected
from kvstore.objects.outcomes import Pinned
from kvstore.objects.pieces import U64, Pieces
from kvstore.owner.card import OwnerCard, OwnerStats
from kvstore.owner.claims import (
    CLAIM_IS_OVER,
    CLAIM_OBJECTS_MAX,
    FENCE_TIMEOUT_S,
    NO_CONTENT,
    AheadClaims,
    Content,
    Grant,
    Held,
    Opened,
)
from kvstore.owner.opening import open_tier
from kvstore.owner.removed import Removed
from kvstore.owner.tiering import Tiering
from kvstore.rules.change_log import ChangeLog
from kvstore.rules.ledger import Ledger
from kvstore.rules.object_table import Claim, Verdict
from kvstore.rules.removals import Removals
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
            self._table = TieredTable(slab, headers, POLICIES[config.policy], self._log, ledger)
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
            self.region = engine.register(self._buffer, remote="read-tagged")
            undo.pop_all()
        self._tags: dict[int, Opened] = {}
        self._aheads = AheadClaims(config.memory)
        self._unfenced: list[Held] = []
        self._removals = Removals()
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
        self.listeners.clear()
        self.announcers.clear()
        if self._populating is not None:
            self._populating.close()
        self._copier.close()
        try:
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

    # -- putting

    def claim(self, keys: Keys, signature: bytes, nbytes: int, writer: te.Identity) -> Grant:
        """Slots for objects of one signature and size, which ``writer`` alone may write to until
        ``publish`` or ``abandon``, or until the claim's deadline. ``ValueError`` for more than
        ``CLAIM_OBJECTS_MAX`` keys or a size below 1."""
        if len(keys) > CLAIM_OBJECTS_MAX or nbytes < 1:
            raise ValueError(
                f"{len(keys)} objects of {nbytes} bytes in one claim: give at most"
                f" {CLAIM_OBJECTS_MAX} of at least 1 byte"
            )
        deadline_s = self._clock() + self._config.claim_timeout_s
        with self._lock:
            claim = self._table.claim(keys, signature, nbytes, deadline_s)
            if not claim.slots:
                return Grant(0, 0, claim.verdicts, ())
            return self._open(claim, writer)

    def claim_ahead(self, held: Held, count: int) -> Grant | None:
        """Slots for so many more objects of a size that a client has just stored; it names them
        when they are published (``Content``). They are its own for as long as those of a claim.
        None if it has some already, if they are too many bytes, or memory is scarce."""
        nbytes, writer = held.claim.nbytes, held.writer
        deadline_s = self._clock() + self._config.claim_timeout_s
        with self._lock:
            if not self._aheads.may_have(writer, count * nbytes):
                return None
            claim = self._table.claim_ahead(count, nbytes, deadline_s)
            if claim is None:
                return None
            self._aheads.begin(writer, count * nbytes)
            return self._open(claim, writer)

    def _open(self, claim: Claim, writer: te.Identity) -> Grant:
        """With the lock."""
        tag = te.new_tag()
        self._tags[claim.id] = Opened(tag, writer)
        addresses = self._addresses(claim)
        ranges = np.stack([addresses, np.full(len(addresses), claim.nbytes, np.uint64)], axis=1)
        self._engine.expect(tag, writer, ranges)
        return Grant(claim.id, tag, claim.verdicts, claim.slots)

    def take(self, keys: Keys, signature: bytes, pieces: Pieces) -> Sequence[Verdict]:
        """Stores objects of one signature and size that lie in this process's memory, which the
        processor can read. Those that are granted can be read now; who calls has to ``tell``."""
        claim, checksums = self.fill(keys, signature, pieces)
        if claim.slots:
            self.keep(claim, checksums)
        return claim.verdicts

    def fill(self, keys: Keys, signature: bytes, pieces: Pieces) -> tuple[Claim, U64]:
        """As ``take``, but nobody can read them yet: if there are slots, ``keep`` or ``drop`` has
        to follow."""
        return self._filled(keys, signature, pieces, self._copier.take)

    def fetch(
        self, foreign: Foreign, keys: Keys, signature: bytes, pieces: Pieces
    ) -> tuple[Claim, U64]:
        """As ``fill``, out of another process's memory. ``OSError`` if it cannot be read."""
        return self._filled(keys, signature, pieces, partial(self._copier.fetch, foreign))

    def _filled(
        self, keys: Keys, signature: bytes, pieces: Pieces, copy: Callable[[U64, Pieces], U64]
    ) -> tuple[Claim, U64]:
        """Slots with objects, and their checksums."""
        with self._lock:
            claim = self._table.claim(keys, signature, pieces.object_bytes, self._clock())
            if not claim.slots:
                return claim, np.zeros(0, np.uint64)
            self._table.take_claim(claim.id)  # It has no deadline.
        try:
            if len(claim.slots) < len(keys):
                granted = [one is Verdict.GRANTED for one in claim.verdicts]
                pieces = pieces.of(np.flatnonzero(granted))
            return claim, copy(self._addresses(claim), pieces)
        except BaseException:
            self.drop(claim)
            raise

    def keep(self, claim: Claim, checksums: U64) -> None:
        """What has come to the slots can be read now; who calls has to ``tell``."""
        with self._lock:
            self._table.publish(claim, checksums)

    def drop(self, claim: Claim) -> None:
        """Nothing can come to the slots any more, and they are free."""
        with self._lock:
            self._table.abandon(claim)

    def room(self, keys: Keys, signature: bytes, nbytes: int) -> tuple[Claim, Pieces]:
        """Slots for objects that this process itself reads from somewhere, and where the granted
        ones lie; ``landed`` has to follow."""
        with self._lock:
            claim = self._table.claim(keys, signature, nbytes, self._clock())
            self._table.take_claim(claim.id)  # It has no deadline, but the time when it began.
        return claim, Pieces.whole(self._addresses(claim), nbytes)

    def landed(self, claim: Claim, is_right: Sequence[bool]) -> None:
        """The reads of ``room`` have ended: which of the granted objects are right. These can be
        read now, but for those that were removed meanwhile; the others' slots are free. Reads all
        bytes once."""
        rows = np.flatnonzero(is_right)
        checksums = np.zeros(len(claim.slots), np.uint64)
        places = Pieces.whole(self._addresses(claim)[rows], claim.nbytes)
        checksums[rows] = self._copier.checksums(places)
        with self._lock:
            gone = self._removed_lately(claim.keys, claim.signature, claim.deadline_s)
            chosen = [right and not late for right, late in zip(is_right, gone, strict=True)]
            if any(chosen):
                self._table.publish(_part(claim, chosen), checksums[chosen])
            self._table.abandon(_part(claim, [not one for one in chosen]))
        self.tell()

    def removed_lately(self, keys: Keys, signature: bytes) -> npt.NDArray[np.bool_]:
        """Which objects were removed so lately that other owners may have them still. They are not
        to be read from there: ``landed`` drops them."""
        with self._lock:
            names = [one.tobytes() for one in keys]
            return np.array(self._removed_lately(names, signature, self._clock()), np.bool_)

    def _removed_lately(
        self, keys: Sequence[bytes], signature: bytes, begun_s: float
    ) -> Sequence[bool]:
        """Since a read has begun, or in the time before that for which who removes waits."""
        since_s = begun_s - self._config.request_timeout_s
        return [self._removals.has(key + signature, since_s) for key in keys]

    def publish(self, claim_id: int, timeout_s: float = math.inf) -> str:
        """The client says that its one write under the claim's tag is done. Returns an empty text
        once its objects can be read, else why they were dropped. Waits for the fence,
        ``FENCE_TIMEOUT_S`` at most, and reads all bytes once for their checksums."""
        held = self.begin_publishing(claim_id)
        if held is None:
            return CLAIM_IS_OVER
        held.wait(timeout_s)
        return self.end_publishing(held)[0]

    def begin_publishing(self, claim_id: int) -> Held | None:
        """``publish`` for who does not wait: closes the claim's tag. To be followed by
        ``end_publishing`` once ``Held.is_closed``, or when that is not waited for any more. None:
        ``CLAIM_IS_OVER``."""
        return self._take(claim_id)

    def end_publishing(self, held: Held, content: Content = NO_CONTENT) -> tuple[str, Claim]:
        """See ``publish``; also what was published. Waits for no fence; reads all bytes once if the
        client has told no checksums. Who reads compares them with what it reads: wrong ones cost
        the object."""
        claim, is_ahead = held.claim, not held.claim.keys
        count = len(content.keys) if is_ahead else len(claim.slots)
        wanted = count * claim.nbytes
        if not held.is_closed():
            self._end(held)
            return "writes under the claim do not end", claim
        if held.arrived != 1 or held.nbytes != wanted or count > len(claim.slots):
            self.drop(claim)
            return (
                f"{held.arrived} writes of {held.nbytes} bytes arrived, not one of {wanted}",
                claim,
            )
        sums = content.checksums
        if len(sums) != count:
            places = Pieces.whole(self._addresses(claim)[:count], claim.nbytes)
            sums = self._copier.checksums(places)
        with self._lock:
            if is_ahead:
                claim = self._table.name(claim, content.keys, content.signature)
                sums = sums[[one is Verdict.GRANTED for one in claim.verdicts]]
            self._table.publish(claim, sums)
        self.tell()
        return "", claim

    def abandon(self, claim_id: int) -> None:
        """Ends a claim whose client gives up. Does not wait: its slots are free as soon as nothing
        can land there any more."""
        held = self._take(claim_id)
        if held is not None:
            self._end(held)

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
            evicted = self._table.make_room(self._config.free_low, self._config.free_high)
            overdue = self._table.overdue(now_s)
        if evicted:
            self.tell()
        if self._tiering is not None:
            self._tiering.wake()
        # Object storage follows a disk in its own time: the next start sees whether it has.
        if self._tiering is not None and not (self._config.disk and self._config.objects):
            self._removed.forget(self._tiering)
        for one in overdue:
            if one.keys:  # Else it was made ahead, for what has not come.
                logger.warning(
                    "a client claimed slots and has written nothing for %g s; they are freed",
                    self._config.claim_timeout_s,
                )
            self.abandon(one.id)
        with self._lock:
            waiting, self._unfenced = self._unfenced, []
        for held in waiting:
            self._end(held)

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
        """Has all look for changes. All calls do that that change something, but ``take``."""
        self.tell_here()
        self.tell_others()

    def tell_here(self) -> None:
        """Has this process's listeners look for changes."""
        for listener in tuple(self.listeners):
            listener()

    def tell_others(self) -> None:
        """Has other processes told of changes."""
        for announcer in tuple(self.announcers):
            announcer()

    def _take(self, claim_id: int) -> Held | None:
        """Ends a claim and closes its tag; None if there is none (any more)."""
        with self._lock:
            claim = self._table.take_claim(claim_id)
            if claim is None:
                return None
            tag, writer = self._tags.pop(claim_id)
            if not claim.keys:
                self._aheads.end(writer)
        # Before it is closed: te forgets the tag behind its fence.
        arrived, nbytes = self._engine.arrived(tag), self._engine.arrived_nbytes(tag)
        return Held(claim, writer, self._engine.revoke(tag), arrived, nbytes, self._clock())

    def _end(self, held: Held) -> None:
        """Frees a claim's slots if nobody can write there any more; else ``tick`` tries again."""
        if held.is_closed():
            self.drop(held.claim)
            return
        open_s = self._clock() - held.closed_s
        if not held.is_told and open_s > FENCE_TIMEOUT_S:
            logger.warning(
                "%d slots cannot be freed yet: a write into them has not ended for %g s",
                len(held.claim.slots),
                open_s,
            )
            held.is_told = True
        with self._lock:
            self._unfenced.append(held)

    def _addresses(self, claim: Claim) -> U64:
        """Where the slots of a claim begin."""
        return np.array(claim.slots, np.uint64) * UNIT_BYTES + np.uint64(self._slots_address)

    def _checksum(self, slot: int, nbytes: int) -> int:
        place = Pieces.whole([self._slots_address + slot * UNIT_BYTES], nbytes)
        return int(self._copier.checksums(place)[0])


def _part(claim: Claim, chosen: Sequence[bool]) -> Claim:
    """Some of the granted objects of a claim."""
    keys, slots = list(compress(claim.keys, chosen)), list(compress(claim.slots, chosen))
    return replace(claim, keys=keys, slots=slots)
