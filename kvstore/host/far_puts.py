# SPDX-License-Identifier: Apache-2.0
"""Objects that a process stores at owners of other hosts itself, where its own host lends nothing:
by te, out of its memory into slots there. What is asked of those owners goes through the host's
owner, which learns by it where the objects lie.

Up to ``AHEAD_BYTES_MAX`` go into slots that were reserved before, with a label in the same
transfer: once that has landed the owner has all that it needs, and the put is answered. That the
objects are there the owner is told behind that, and grants the next slots with its answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import te
from kvstore.client.aheads import Aheads
from kvstore.client.deadline import Deadline
from kvstore.client.handles import check_unchanged
from kvstore.client.memory import Memory
from kvstore.client.reading import Source
from kvstore.host.far import FarOwners, each_of
from kvstore.host.handle import EXTRA_S, HostHandle
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import Keys
from kvstore.objects.copying import Copier
from kvstore.objects.labels import LABEL_BYTES_MAX, LABEL_OBJECTS_MAX, Label, label_bytes
from kvstore.objects.pieces import U64, Pieces
from kvstore.owner.claims import AHEAD_BYTES_MAX, Grant
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller
from kvstore.protocol.messages import (
    Abandon,
    Answer,
    Claim,
    Lender,
    Publish,
    Question,
    Relay,
    Reserve,
    Reserved,
    encode,
)
from kvstore.rate_limited_log import RateLimitedLog
from kvstore.rules.object_table import Verdict
from kvstore.threads import Latch
from te.connect.pool import Pool
from te.forking import Origin

__all__ = ["FarHandle", "FarPuts"]

logger = logging.getLogger(__name__)

LABELS: Final = 16
"""Writes with a label at once; more go through the host's owner."""
SETTLE_S: Final = 2.0
"""So long at most who looks for what was just put waits until this host has heard of it: for as
long as an owner may be silent before it is left out of look-ups."""
SCARCE_S: Final = 1.0
"""An owner that has no slots to reserve is not asked for any for so long."""
NEXT_S: Final = 0.05
"""So long a put waits for slots that the owner grants with the answer of the one before."""


class _Labels:
    """Registered memory for labels that are on their way. Thread-safe."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._buffer: Any = None
        self._address = 0
        self._lock = threading.Lock()
        self._free = list(range(LABELS))
        #: Those of writes that were given up, until these have an outcome.
        self._left: list[tuple[te.Transfer, int]] = []

    def take(self, label: Label) -> tuple[int, int] | None:
        """Which room, and its address; None if none is free."""
        with self._lock:
            if self._buffer is None:
                self._buffer = te.allocate(LABELS * LABEL_BYTES_MAX)
                region = self._memory.engine.register(self._buffer, remote="none")
                self._address = region.address
            left, self._left = self._left, []
            for transfer, room in left:
                if transfer.poll() is te.Status.PENDING:
                    self._left.append((transfer, room))
                else:
                    self._free.append(room)
            if not self._free:
                return None
            room = self._free.pop()
        raw, first = label.pack(), room * LABEL_BYTES_MAX
        memoryview(self._buffer)[first : first + len(raw)] = raw
        return room, self._address + first

    def give_back(self, room: int, transfer: te.Transfer | None) -> None:
        """``transfer``: what has read it, or may still."""
        with self._lock:
            if transfer is None or transfer.poll() is not te.Status.PENDING:
                self._free.append(room)
            else:
                self._left.append((transfer, room))


class _Storing(NamedTuple):
    """Owners that objects can be stored at, as long as ranks and lenders are the same."""

    ranks: bytes
    lenders: Mapping[int, Lender]
    numbers: Sequence[int]
    #: Whether there are some, and it is known where each is: every client has to choose among the
    #: same.
    are_known: bool


class FarPuts:
    """Of one start of the host's owner. Thread-safe."""

    def __init__(
        self,
        caller: Caller,
        far: FarOwners,
        memory: Memory,
        writer: Callable[[], te.Identity],
        timeout_s: float,
    ) -> None:
        """``timeout_s``: of questions."""
        self.caller: Final = caller
        self.far: Final = far
        self.timeout_s: Final = timeout_s
        self.copier: Final = Copier()
        self.labels: Final = _Labels(memory)
        self.writer: Final = writer
        self._origin = Origin()
        self._aheads: dict[str, Aheads] = {}
        #: No executor: nobody waits for what it runs, and would need no future.
        self._thread = Pool("kvstore-puts", 1)
        self._lock = threading.Lock()
        #: By key: notified once this host knows of it; by owner: once it has granted more slots.
        self._unsettled: dict[bytes, Latch] = {}
        self._storing = _Storing(b"", {}, (), False)
        self._coming: dict[str, Latch] = {}
        #: By owner: when it may be asked for slots, by the monotonic clock.
        self.reserve_s: Final[dict[str, float]] = {}
        self.strange: Final = RateLimitedLog(logger)

    def close(self) -> None:
        """Ends its threads, and waits a while for what is to be told. What has landed is stored,
        also if its owner is not told so."""
        self.settle(None)
        self._thread.stop()
        self.copier.close()

    def storing(self, ranks: bytes) -> _Storing:
        """Among which owners is chosen where objects are stored: all of other hosts that can be
        used. ``ranks``: see ``Pool``."""
        last, lenders = self._storing, self.far.lenders
        if last.ranks == ranks and last.lenders is lenders:
            return last
        found: list[int] = (np.flatnonzero(np.frombuffer(ranks, np.uint8)[1:]) + 1).tolist()
        are_known = bool(found) and all(one in lenders for one in found)
        self._storing = _Storing(ranks, lenders, found, are_known)
        return self._storing

    def handle(self, number: int) -> FarHandle | None:
        """An owner to store at; None if this process cannot write there now."""
        lender = self.far.lenders.get(number)
        source = self.far.reachable(number)
        if lender is None or source is None or not self._origin.is_here:
            return None
        return FarHandle(source, lender, self)

    # -- slots that were reserved

    def aheads_of(self, name: str) -> Aheads:
        """Those of one owner."""
        aheads = self._aheads.get(name)
        if aheads is None:
            with self._lock:
                aheads = self._aheads.setdefault(name, Aheads())
        return aheads

    def await_next(self, name: str, timeout_s: float) -> None:
        """Until an owner has answered that grants more slots with its answer."""
        event = self._coming.get(name)
        if event is not None:
            event.wait(min(timeout_s, NEXT_S))

    def granted_soon(self, name: str, ask: Callable[[], object], keys: Keys | None = None) -> None:
        """Asks an owner that grants slots with its answer, in a thread. ``keys``: what this host
        hears of by it."""
        event = Latch()
        names = [] if keys is None else each_of(keys)
        with self._lock:
            if keys is None and name in self._coming:
                return  # There are some soon.
            self._coming[name] = event
            self._unsettled.update(dict.fromkeys(names, event))
        self.soon(partial(self._granted, name, ask, names, event))

    def _granted(
        self, name: str, ask: Callable[[], object], names: Sequence[bytes], event: Latch
    ) -> None:
        try:
            ask()
        except NoAnswer as exc:
            self.strange.warn("an owner of another host was not told of objects: %s", exc)
        finally:
            with self._lock:
                if self._coming.get(name) is event:
                    del self._coming[name]
                for one in names:
                    if self._unsettled.get(one) is event:
                        del self._unsettled[one]
            event.set()

    def soon(self, work: Callable[[], object]) -> None:
        """In a thread; in this one if there is none: it is closed, or there are no more threads."""
        if not self._thread.run(work):
            work()

    def settle(self, keys: Keys | None) -> None:
        """Waits until this host knows of what this process has put: of these, or of all. Who has
        waited in vain does not wait for the same again."""
        if not self._unsettled:
            return
        with self._lock:
            names = list(self._unsettled) if keys is None else each_of(keys)
            events = {one: self._unsettled[one] for one in names if one in self._unsettled}
        until = Deadline(SETTLE_S)
        late = {one for one in set(events.values()) if not one.wait(until.left_s)}
        with self._lock:
            for name, event in events.items():
                if event in late and self._unsettled.get(name) is event:
                    del self._unsettled[name]


class FarHandle(HostHandle):
    """The owner of another host, as this process stores there. All else is the host's owner's."""

    _names_all = True

    def __init__(self, source: Source, lender: Lender, puts: FarPuts) -> None:
        super().__init__(source, puts.caller, puts.writer, puts.timeout_s)
        self._puts = puts
        self._lender = lender
        self._aheads = puts.aheads_of(lender.name)
        self._nbytes = 0

    @property
    def take_bytes_max(self) -> int:
        """See ``Handle``. More is claimed, written and published."""
        return AHEAD_BYTES_MAX

    def claimed_ahead(self, keys: Keys, signature: bytes, nbytes: int) -> Grant | None:
        """See ``Handle``. What is more than there ever is ahead leaves that to others."""
        if len(keys) * nbytes > AHEAD_BYTES_MAX:
            return None
        return super().claimed_ahead(keys, signature, nbytes)

    def take(
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> Sequence[Verdict]:
        """See ``Handle``. Into slots that were reserved, or by way of the host's owner."""
        nbytes = self._nbytes = pieces.object_bytes
        grant = self.claimed_ahead(keys, signature, nbytes)
        if grant is None:
            self._puts.await_next(self._lender.name, deadline.left_s)
            grant = self.claimed_ahead(keys, signature, nbytes)
        if grant is not None and self._is_written(grant, keys, signature, pieces, deadline):
            return [Verdict.GRANTED] * len(keys)
        verdicts = super().take(keys, signature, pieces, deadline)
        may_ask = time.monotonic() >= self._puts.reserve_s.get(self._lender.name, 0.0)
        if len(keys) <= LABEL_OBJECTS_MAX and may_ask:
            reserve = partial(self._reserve, len(keys), nbytes)
            self._puts.granted_soon(self._lender.name, reserve)
        return verdicts

    def _is_written(
        self, grant: Grant, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> bool:
        """Whether objects and their label have landed, so that they are stored. ``NoAnswer`` if
        they have not in time."""
        checksums = self._puts.copier.checksums(pieces)
        label = Label(grant.tag, keys, signature, checksums)
        room = self._puts.labels.take(label) if grant.label else None
        if room is None:
            self.abandon(grant.claim_id)
            return False
        transfer: te.Transfer | None = None
        is_stored = False
        try:
            check_unchanged(deadline)
            numbers, slots = np.array(grant.slots, np.uint64), self.source.slots_address
            label_to = room[1], grant.label, label_bytes(len(keys))
            blocks = pieces.blocks_and_one(numbers, slots, UNIT_BYTES, *label_to)
            transfer = self.source.peer.write(blocks, grant.tag, is_awaited=True)
            transfer.wait(deadline.left_s)
            check_unchanged(deadline)
            is_stored = True
        except te.WaitTimeout as exc:
            self._puts.far.pause(self.source.number)
            raise NoAnswer(str(exc)) from exc
        except (te.TransferFailed, te.QueueFull) as exc:
            self._puts.strange.warn("objects go through this host's owner: %s", exc)
            if not self.source.peer.alive:
                self._puts.far.pause(self.source.number)
            return False
        finally:
            if transfer is not None and not is_stored:
                transfer.cancel()
            self._puts.labels.give_back(room[0], transfer)
            if not is_stored:
                self.abandon(grant.claim_id)
        tell = partial(self._tell, grant, checksums)
        self._puts.granted_soon(self._lender.name, tell, keys)
        return True

    def _tell(self, grant: Grant, checksums: U64) -> None:
        """That they have landed. If the owner has noticed that before, it says that the claim is
        over."""
        why_not, _ = self.publish(grant, checksums, self._puts.timeout_s)
        if why_not:
            logger.debug("owner %s was told of objects late: %s", self._lender.name, why_not)

    def _reserve(self, count: int, nbytes: int) -> None:
        writer, begun_s = self._writer(), time.monotonic()
        question = Reserve(count, nbytes, writer.id, writer.epoch)
        ahead = self._ask(question, Reserved, self._puts.timeout_s).ahead
        if ahead is None or self._aheads is None:
            self._puts.reserve_s[self._lender.name] = begun_s + SCARCE_S
            return
        with self._sense("what it has reserved"):
            self._aheads.keep(ahead, nbytes, begun_s)

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:
        """See ``Handle``."""
        self._nbytes = nbytes
        return super().claim(keys, signature, nbytes, timeout_s)

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``. It does not wait; an owner that does not hear it ends the claim at the
        claim's deadline."""
        self._puts.soon(partial(super()._soon, Abandon(claim_id)))

    def _answer(self, question: Question, timeout_s: float) -> Answer:
        if not isinstance(question, Claim | Reserve | Publish | Abandon):
            return super()._answer(question, timeout_s)
        relay = Relay(self._lender.number, self._lender.name, encode(question), self._nbytes)
        return super()._answer(relay, min(timeout_s, self._timeout_s) + EXTRA_S)
