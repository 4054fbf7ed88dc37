# SPDX-License-Identifier: Apache-2.0
"""How objects come into an owner's memory.

A put has two phases. A client *claims* slots: the owner opens a tag for them that this client alone
may write under. When the client says that its write has ended, the owner fences the tag, compares
what arrived with what was claimed, computes checksums and *publishes* the objects. A client that
vanishes in between costs its slots until the claim's deadline.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

import te
from kvstore.config import Config
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import Keys
from kvstore.objects.copying import Copier, Foreign
from kvstore.objects.labels import LABEL_BYTES_MAX, LABEL_OBJECTS_MAX, Label, label_bytes, label_of
from kvstore.objects.pieces import U64, Pieces
from kvstore.owner.claims import (
    CLAIM_IS_OVER,
    CLAIM_OBJECTS_MAX,
    FENCE_TIMEOUT_S,
    NO_CONTENT,
    AheadClaims,
    Content,
    Grant,
    Held,
    OpenTag,
)
from kvstore.owner.labelling import LabelRooms
from kvstore.rules.object_table import Claim, Verdict
from kvstore.rules.removals import Removals
from kvstore.rules.tiered_table import TieredTable

__all__ = ["Storing"]

logger = logging.getLogger(__name__)


class Storing:
    """Of one owner (``Owner.storing``). All methods are thread-safe; those that wait say so."""

    def __init__(
        self,
        engine: te.Engine,
        config: Config,
        table: TieredTable,
        lock: threading.Lock,
        copier: Copier,
        slots_address: int,
        removals: Removals,
        labels: LabelRooms,
        tell: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            engine: in which the memory is registered.
            config: the owner's.
            table: of its objects.
            lock: held for each use of ``table`` and ``removals``.
            copier: of the owner.
            slots_address: where the first slot begins.
            removals: what was removed lately.
            labels: memory for labels.
            tell: has all look for changes (``Owner.tell``).
            clock: in seconds.
        """
        self._engine, self._config, self._table, self._lock = engine, config, table, lock
        self._copier, self._slots_address, self._removals = copier, slots_address, removals
        self._labels = labels
        self._tell, self._clock = tell, clock
        self._tags: dict[int, OpenTag] = {}
        self._aheads = AheadClaims(config.memory)
        self._unfenced: list[Held] = []

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
        return self._claim_ahead(held.writer, held.claim.nbytes, count)

    def reserve(self, writer: te.Identity, nbytes: int, count: int) -> Grant | None:
        """As ``claim_ahead``, for a client that has stored nothing here of late, and does not use
        what it may still have."""
        with self._lock:
            former = [
                claim_id
                for claim_id, one in self._tags.items()
                if one.is_ahead and one.writer == writer
            ]
        for claim_id in former:
            self._end_keeping(claim_id)
        return self._claim_ahead(writer, nbytes, count)

    def _claim_ahead(self, writer: te.Identity, nbytes: int, count: int) -> Grant | None:
        deadline_s = self._clock() + self._config.claim_timeout_s
        with self._lock:
            if not self._aheads.may_have(writer, count * nbytes):
                return None
            claim = self._table.claim_ahead(count, nbytes, deadline_s)
            if claim is None:
                return None
            self._aheads.begin(writer, count * nbytes)
            label = self._labels.take() if count <= LABEL_OBJECTS_MAX else 0
            return self._open(claim, writer, label, is_ahead=True)

    def _open(
        self, claim: Claim, writer: te.Identity, label: int = 0, *, is_ahead: bool = False
    ) -> Grant:
        """With the lock."""
        tag = te.new_tag()
        self._tags[claim.id] = OpenTag(tag, writer, label, is_ahead)
        addresses = self._addresses(claim)
        ranges = np.stack([addresses, np.full(len(addresses), claim.nbytes, np.uint64)], axis=1)
        if label:
            ranges = np.vstack([ranges, np.array([[label, LABEL_BYTES_MAX]], np.uint64)])
        self._engine.expect(tag, writer, ranges)
        return Grant(claim.id, tag, claim.verdicts, claim.slots, label)

    def take(self, keys: Keys, signature: bytes, pieces: Pieces) -> Sequence[Verdict]:
        """Stores objects of one signature and size that lie in this process's memory, which the
        processor can read. Those that are granted can be read now; ``Owner.tell`` has to
        follow."""
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
        """What has come to the slots can be read now; ``Owner.tell`` has to follow."""
        with self._lock:
            self._table.publish(claim, checksums)

    def keep_some(self, claim: Claim, checksums: U64, chosen: Sequence[bool]) -> None:
        """``keep`` for the chosen ones of the granted objects, ``drop`` for the others; who calls
        has to call ``Owner.tell``."""
        with self._lock:
            self._table.publish_some(claim, checksums, chosen)

    def pieces_of(self, claim: Claim) -> Pieces:
        """The slots of a claim."""
        return Pieces.whole(self._addresses(claim), claim.nbytes)

    def drop(self, claim: Claim) -> None:
        """Nothing can come to the slots any more, and they are free."""
        with self._lock:
            self._table.abandon(claim)

    def room(self, keys: Keys, signature: bytes, nbytes: int) -> tuple[Claim, Pieces]:
        """Slots for objects that this process itself reads from somewhere, and where the granted
        ones lie; ``landed`` has to follow."""
        with self._lock:
            claim = self._table.claim(keys, signature, nbytes, self._clock(), brings=True)
            self._table.take_claim(claim.id)  # It has no deadline, but the time when it began.
        return claim, self.pieces_of(claim)

    def landed(self, claim: Claim, is_right: Sequence[bool], checksums: U64) -> None:
        """The reads of ``room`` have ended: which of the granted objects are right. These can be
        read now, but for those that were removed meanwhile; the others' slots are free.
        ``checksums``: where one is 0, it is computed here."""
        rows = np.flatnonzero(np.asarray(is_right, np.bool_) & (checksums == 0))
        if len(rows):
            checksums[rows] = self._copier.checksums(self.pieces_of(claim).of(rows))
        with self._lock:
            gone = self._removed_lately(claim.keys, claim.signature, claim.deadline_s)
            chosen = [right and not late for right, late in zip(is_right, gone, strict=True)]
            self._table.publish_some(claim, checksums, chosen)
        self._tell()

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
        why_not, claim, sums = self.filled(held, content)
        if not why_not:
            self.keep(claim, sums)
            self._tell()
        return why_not, claim

    def filled(self, held: Held, content: Content = NO_CONTENT) -> tuple[str, Claim, U64]:
        """As ``end_publishing``, but nobody can read the objects yet: without a reason why not,
        ``keep`` or ``drop`` has to follow. The reason, the claim with the keys of its objects, and
        their checksums."""
        claim, is_ahead = held.claim, not held.claim.keys
        count = len(content.keys) if is_ahead else len(claim.slots)
        wanted = count * claim.nbytes
        if not held.is_closed():
            self._end(held)
            return "writes under the claim do not end", claim, content.checksums
        self._give_label_back(held)
        came = held.nbytes
        if held.opened.label and came == wanted + label_bytes(count):
            came = wanted
        if held.arrived != 1 or came != wanted or count > len(claim.slots):
            self.drop(claim)
            return (
                f"{held.arrived} writes of {held.nbytes} bytes arrived, not one of {wanted}",
                claim,
                content.checksums,
            )
        sums = content.checksums
        if len(sums) != count:
            sums = self._copier.checksums(self.pieces_of(claim).between(0, count))
        if is_ahead:
            with self._lock:
                claim = self._table.name(claim, content.keys, content.signature)
            sums = sums[[one is Verdict.GRANTED for one in claim.verdicts]]
        return "", claim, sums

    def abandon(self, claim_id: int) -> None:
        """Ends a claim whose client gives up. Does not wait: its slots are free as soon as nothing
        can land there any more."""
        held = self._take(claim_id)
        if held is not None:
            self._end(held)

    def tick(self) -> None:
        """Ends overdue claims, and tries fences again that were not confirmed. Waits for none."""
        with self._lock:
            overdue = self._table.overdue(self._clock())
        for one in overdue:
            if one.keys:  # Else it was made ahead, for what has not come.
                logger.warning(
                    "a client claimed slots and has written nothing for %g s; they are freed",
                    self._config.claim_timeout_s,
                )
            self._end_keeping(one.id)
        with self._lock:
            waiting, self._unfenced = self._unfenced, []
        for held in waiting:
            self._end(held)

    def settle(self) -> None:
        """Stores what has come with a label, and whose client has said nothing yet, or will not any
        more. Before what was stored is looked at: who was told that it is there has it found."""
        for claim_id, tag in self._labelled():
            if self._engine.arrived(tag):
                self._end_keeping(claim_id)

    def close(self) -> None:
        """``settle``, behind which nobody is told any more that something has come with a label.
        Waits for writes under way."""
        for claim_id, _ in self._labelled():
            self._end_keeping(claim_id, waits=True)

    def _labelled(self) -> list[tuple[int, int]]:
        """Claims whose writes may have a label, and their tags."""
        with self._lock:
            return [(claim_id, one.tag) for claim_id, one in self._tags.items() if one.label]

    def _end_keeping(self, claim_id: int, *, waits: bool = False) -> None:
        """As ``abandon``, but what has come with a label is stored. ``waits``: for writes under
        way."""
        held = self._take(claim_id)
        if held is not None:
            held.is_kept = bool(held.opened.label)
            if waits:
                held.wait()
            self._end(held)

    def _take(self, claim_id: int) -> Held | None:
        """Ends a claim and closes its tag; None if there is none (any more)."""
        with self._lock:
            claim = self._table.take_claim(claim_id)
            if claim is None:
                return None
            opened = self._tags.pop(claim_id)
            tag, writer = opened.tag, opened.writer
            if opened.is_ahead:
                self._aheads.end(writer)
        # Before it is closed: te forgets the tag behind its fence.
        arrived, nbytes = self._engine.arrived(tag), self._engine.arrived_nbytes(tag)
        fence = self._engine.revoke(tag)
        return Held(claim, writer, fence, arrived, nbytes, self._clock(), opened)

    def _end(self, held: Held) -> None:
        """Frees a claim's slots if nobody can write there any more; else ``tick`` tries again."""
        if held.is_closed():
            label = self._label_of(held)
            self._give_label_back(held)
            if label is None:
                self.drop(held.claim)
            else:
                self._keep_labelled(held.claim, label)
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

    def _label_of(self, held: Held) -> Label | None:
        """That of what is to be stored, if it has come, and is what its client has sent: the client
        may have been told that it came too late, and have used its memory again meanwhile."""
        if not held.is_kept or not held.came_whole:
            return None
        label = label_of(self._labels.read(held.opened.label), held.opened.tag)
        if label is None or len(label.keys) > len(held.claim.slots):
            return None
        came = self._copier.checksums(self.pieces_of(held.claim).between(0, len(label.keys)))
        return label if (came == label.checksums).all() else None

    def _keep_labelled(self, claim: Claim, label: Label) -> None:
        with self._lock:
            named = self._table.name(claim, label.keys, label.signature)
        self.keep(named, label.checksums[[one is Verdict.GRANTED for one in named.verdicts]])
        self._tell()

    def _give_label_back(self, held: Held) -> None:
        """Nothing can land under the claim any more."""
        if held.opened.label:
            self._labels.give_back(held.opened.label)

    def _addresses(self, claim: Claim) -> U64:
        """Where the slots of a claim begin."""
        return np.array(claim.slots, np.uint64) * UNIT_BYTES + np.uint64(self._slots_address)
