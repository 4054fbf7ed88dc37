# SPDX-License-Identifier: Apache-2.0
"""The owners, as a process knows them that uses the owner of its host: that one owns the memory,
and knows the others. Its table and its memory are mapped here, for reading. Whoever puts or gets
makes no connection: that is done when memory is registered, or in the lease's thread.

What does not lie in the host's memory is to this process in a lower tier, wherever it lies: it asks
the owner for it (``kvstore.host.bringing``).
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

import te
from kvstore._table import Mirror, sole_owner
from kvstore.client.deadline import Deadline
from kvstore.client.handles import Handle
from kvstore.client.load_times import LoadTimes
from kvstore.client.managing import Managing
from kvstore.client.memory import Memory
from kvstore.client.pool import OWN, Version, keys_of
from kvstore.client.reading import Source
from kvstore.client.status import OwnerSeen, StoreStatus, with_owner
from kvstore.host.handle import HOST, HostHandle
from kvstore.host.lease import Lease
from kvstore.host.place import Place
from kvstore.host.telling import TELLER_S, Told
from kvstore.objects.changes import LOWER_TIER, OWNERS_MAX, PLACE, Found, Keys, Records
from kvstore.owner.card import OwnerStats
from kvstore.owner.claims import CLAIM_OBJECTS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import NO_TURN, Discard, Figures, FiguresOf, Touch
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["HostManaging", "HostPool"]

logger = logging.getLogger(__name__)

OWN_ALONE: Final = bytes([1]).ljust(OWNERS_MAX, b"\0")
TOLD_MAX: Final = 1024
"""Batches of keys that wait to be told to the owner."""
PAUSE_S: Final = 1.0
"""An owner that could not be connected to is left alone for so long."""


@dataclass
class _Link:
    """To one start of an owner."""

    caller: Caller
    table: Mirror
    #: By te; for memory that the processor cannot read.
    peer: te.Peer | None = None
    #: When it may be connected to again, by the monotonic clock.
    connect_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def live_peer(self) -> te.Peer | None:
        """None if there is no connection by te at the moment."""
        peer = self.peer
        return peer if peer is not None and peer.alive else None

    def close(self) -> None:
        """Who reads what is mapped keeps it."""
        self.caller.close()
        if self.peer is not None:
            self.peer.close()


class HostPool:
    """See ``kvstore.client.pool``. When the owner has ended, its memory and its table stay mapped:
    what lies in the memory is read on, until there is another owner."""

    def __init__(
        self,
        lease: Lease,
        place: Place,
        memory: Memory,
        load_times: LoadTimes,
        request_timeout_s: float,
    ) -> None:
        """Connects to the owner, if there is one."""
        self.own: Final = None
        self.request_timeout_s: Final = request_timeout_s
        self._lease = lease
        self._place = place
        self._memory = memory
        self._load_times = load_times
        self._lock = threading.Lock()
        self._strange = RateLimitedLog(logger)
        self._link: _Link | None = None
        #: Which joining it belongs to (``Lease.joins``), and when it is tried again.
        self._joins = 0
        self._link_s = 0.0
        self._id: Final = secrets.token_bytes(16)
        #: What it has told, and the last answer, which counts for a while.
        self._told: Final = Told()
        self._answer: tuple[StoreStatus, OwnerStats | None] | None = None
        self._answer_until_s = 0.0
        self._untold: deque[tuple[type[Touch | Discard], Keys, bytes]] = deque()
        lease.on_join = self._join
        lease.on_reminder = self._on_reminder
        if lease.is_joined:
            self._join()

    def close(self) -> None:
        """Ends the connections."""
        self._lease.on_join = self._lease.on_reminder = _nothing
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    # -- the connection

    def _join(self) -> None:
        """There is another owner."""
        with self._lock:
            self._connect()

    def _connect(self) -> None:
        """With the lock."""
        tables: list[Mirror] = []

        def map_table(fd: int) -> None:
            tables.append(Mirror(Mapped(fd).memory))

        joins = self._lease.joins
        try:
            path = str(self._place.calls)
            caller = Caller(path, HOST, None, self.request_timeout_s, map_table)
        except NoAnswer as exc:
            self._link_s = time.monotonic() + PAUSE_S
            logger.warning("%s; it is tried again", exc)
            return
        link = _Link(caller, tables[0])
        self._connect_by_te(link)  # First: what is found behind this is to be read.
        former, self._link = self._link, link
        self._joins = joins
        if former is not None:
            former.close()
        for number in np.flatnonzero(np.frombuffer(tables[0].ranks, np.uint8)).tolist():
            self._load_times.forget(number)  # The owner's numbers may be others' now.

    def _joined(self) -> _Link | None:
        """The connection to the owner; None if there is none. Does not wait: the lease's thread
        connects, soon behind this."""
        if not self._lease.is_joined:
            return None
        if self._joins == self._lease.joins:
            return self._link
        self._lease.remind()
        return None

    def _on_reminder(self) -> None:
        """In the lease's thread."""
        with self._lock:
            if self._joins != self._lease.joins and time.monotonic() >= self._link_s:
                self._connect()
        self.connect_by_te()
        self._tell()

    # -- look-ups

    def __len__(self) -> int:
        link = self._link
        return 0 if link is None else len(link.table)

    @property
    def table_bytes(self) -> int:
        """None: it is the owner's."""
        return 0

    @property
    def ranks(self) -> bytes:
        """Without an owner to ask, its memory alone, if that can be read."""
        link = self._link
        if link is None or (link.caller.window is None and link.live_peer is None):
            return bytes(OWNERS_MAX)
        return link.table.ranks if self._joined() is link else OWN_ALONE

    def ranks_for(self, nbytes: int) -> bytes:
        """See ``Pool``: what lies elsewhere has to fit into the host's memory."""
        link, ranks = self._link, self.ranks
        if link is None or nbytes <= link.caller.hello.object_bytes_max:
            return ranks
        return bytes(map(min, ranks, OWN_ALONE))

    @property
    def ranks_of_puts(self) -> bytes:
        """See ``Pool``."""
        link = self._link
        lends = link is None or link.caller.hello.lends
        return self.ranks_without(() if lends else (OWN,))

    def ranks_without(self, numbers: Collection[int]) -> bytes:
        """See ``Pool``."""
        ranks = bytearray(self.ranks)
        for number in numbers:
            ranks[number] = 0
        return bytes(ranks)

    @property
    def ranks_of_loads(self) -> bytes:
        """The same: what is mapped is read in any case."""
        return self.ranks

    def look_up(self, keys: Keys, fingerprint: int, ranks: bytes | None = None) -> Records:
        """See ``Pool``."""
        places = np.zeros(len(keys), PLACE)
        link = self._link
        if link is None:
            return places
        ranks = self.ranks if ranks is None else ranks
        link.table.look_up(np.ascontiguousarray(keys), fingerprint, ranks, places)
        is_far = (places["owner"] != OWN) | (places["slot"] == LOWER_TIER)
        is_far &= places["found"] == Found.HERE
        if is_far.any():
            places["slot"][is_far] = LOWER_TIER
            if self._joined() is not link:  # Nobody is there to be asked for them.
                places["found"][is_far] = Found.MISSING
        return places

    def held_by(self, number: int, keys: Keys, fingerprint: int) -> Records:
        """See ``Pool``."""
        ranks = bytearray(OWNERS_MAX)
        ranks[number] = 1
        return self.look_up(keys, fingerprint, bytes(ranks))

    def keys(self, since: Version | None) -> tuple[Version, Keys] | None:
        """See ``Pool``. Without an owner to ask there are none."""
        link = self._joined()
        return keys_of(None if link is None else link.table, self.ranks, since)

    def touch_soon(self, keys: Keys, signature: bytes, nbytes: int) -> None:  # noqa: ARG002
        """See ``Pool``. Wakes up the lease's thread if it was not reminded since the last time; of
        too many, some are left out."""
        self._tell_soon(Touch, keys, signature)

    def discard_soon(self, keys: Keys, signature: bytes) -> None:
        """Has objects removed, as ``touch_soon``. An owner that does not hear it keeps them."""
        self._tell_soon(Discard, keys, signature)

    def _tell_soon(self, kind: type[Touch | Discard], keys: Keys, signature: bytes) -> None:
        if len(self._untold) < TOLD_MAX:
            self._untold.append((kind, keys, signature))
            self._lease.remind()

    def _tell(self) -> None:
        """In the lease's thread."""
        link, told = self._joined(), list[Touch | Discard]()
        while self._untold:
            kind, keys, signature = self._untold.popleft()
            for first in range(0, len(keys), CLAIM_OBJECTS_MAX):
                told.append(kind(keys[first : first + CLAIM_OBJECTS_MAX].tobytes(), signature))
        if link is not None:
            link.caller.tell(told)

    # -- owners

    def source(self, number: int) -> Source | None:
        """See ``Pool``: whichever number it is, what can be read lies in this host's memory."""
        link = self._link
        if link is None:
            return None
        window, peer = link.caller.window, link.live_peer
        if peer is None and self._needs_te(link):
            self._lease.remind()
            if window is None:
                return None
        hello = link.caller.hello
        return Source(number, peer, hello.headers_address, hello.slots_address, window)

    def source_of_all(self, places: Records) -> Source | None:
        """See ``Pool``."""
        number = sole_owner(places)
        return None if number < 0 else self.source(number)

    def _needs_te(self, link: _Link) -> bool:
        return link.caller.window is None or self._memory.has_engine

    def connect_by_te(self) -> None:
        """Connects to the owner, if this process needs that, and has no connection. Waits for
        it."""
        link = self._joined()
        if link is not None:
            self._connect_by_te(link)
            if self._link is not link:  # It was ended meanwhile.
                link.close()

    def _connect_by_te(self, link: _Link) -> None:
        if not self._needs_te(link):
            return
        with link.lock:
            if link.live_peer is not None or time.monotonic() < link.connect_s:
                return
            try:
                engine, card = self._memory.engine, link.caller.hello.engine
                link.peer = engine.connect(card, self.request_timeout_s)
            except te.Error as exc:
                link.connect_s = time.monotonic() + PAUSE_S
                logger.warning("%s is not read by te: %s", HOST, exc)

    def pause(self, number: int, reason: str) -> None:
        """See ``Pool``. The lease's thread connects anew."""
        logger.warning("the memory of owner %d of the store was not read: %s", number, reason)

    def handle(self, number: int) -> HostHandle | None:
        """See ``Pool``: the host's owner, whichever number it is."""
        link = self._joined()
        source = None if link is None else self.source(number)
        if link is None or source is None:
            return None
        return HostHandle(source, link.caller, self._identity, self.request_timeout_s)

    def _identity(self) -> te.Identity:
        engine = self._memory.engine
        return te.Identity(engine.id, engine.epoch)

    def usable(self) -> Sequence[int]:
        """See ``Pool``: objects are stored at the host's owner, and it stores copies elsewhere."""
        return [] if self._joined() is None else [OWN]

    storing = usable

    def copy(
        self, keys: Keys, signature: bytes, nbytes: int, copies: int, deadline: Deadline
    ) -> None:
        """Has so many owners in all have objects that the host's owner has; waits for it."""
        handle = self.handle(OWN) if len(keys) else None
        if handle is not None:
            try:
                handle.copy(keys, signature, nbytes, copies, deadline)
            except NoAnswer as exc:
                logger.warning("%d objects may have fewer copies than wanted: %s", len(keys), exc)

    def known_as(self, numbers: Sequence[int]) -> tuple[list[bytes], list[float], list[str]]:
        """See ``Pool``. There is nothing to choose from."""
        return [bytes(16)] * len(numbers), [1.0] * len(numbers), [""] * len(numbers)

    @property
    def knows_all(self) -> bool:
        """See ``Pool``: the host's owner knows the others."""
        return self._joined() is not None

    def seen(self) -> tuple[OwnerSeen, ...]:
        """The host's owner."""
        if not self._lease.pid:
            return ()
        speed = self._load_times.bytes_per_s(OWN)
        name = f"process {self._lease.pid}"
        return (OwnerSeen(name, len(self), self._joined() is not None, speed),)

    def with_owner(self, mine: StoreStatus) -> StoreStatus:
        """See ``client.status.with_owner``; asks the owner. Without an answer for ``TELLER_S``, in
        which no other process tells it either, ``mine`` is all."""
        link = self._joined()
        if link is None:
            return mine
        found = self._figures(link, Figures(self._id))
        if found is None:
            if self._answer is None or time.monotonic() > self._answer_until_s:
                return mine
            return with_owner(mine, *self._answer)
        host, turn = found
        own = None
        if host.own is not None and turn != NO_TURN:
            own = self._told.add(turn, host.own)
        self._answer, self._answer_until_s = (host, own), time.monotonic() + TELLER_S
        return with_owner(mine, host, own)

    def lenders(self) -> tuple[OwnerSeen, ...]:
        """See ``Pool``: this host's, if it lends, and those that it knows. None if it does not
        answer."""
        link = self._joined()
        found = None if link is None else self._figures(link, Figures())
        if link is None or found is None:
            return ()
        host, _ = found
        held = 0 if host.own is None else host.own.objects
        mine = [msgspec.structs.replace(one, objects=held) for one in self.seen()]
        return (*(mine if link.caller.hello.lends else []), *host.owners)

    def _figures(self, link: _Link, question: Figures) -> tuple[StoreStatus, int] | None:
        """How the owner is, and the number of this process's turn; None if it does not answer."""
        try:
            found = link.caller.ask(question, self.request_timeout_s)
            if not isinstance(found, FiguresOf):
                raise NoAnswer(f"{HOST} answers with {type(found).__name__}")
            return msgspec.msgpack.decode(found.status, type=StoreStatus), found.turn
        except (NoAnswer, msgspec.DecodeError) as exc:
            self._strange.warn("what %s holds is not told: %s", HOST, exc)
            return None


class HostManaging(Managing):
    """See ``Managing``. The owner asks the others."""

    def __init__(self, owners: HostPool) -> None:
        super().__init__(owners)
        self._host = owners

    def remove_soon(self, keys: Keys, signature: bytes) -> None:
        """See ``Managing``."""
        self._host.discard_soon(keys, signature)

    def _holders(self, keys: Keys) -> Iterator[tuple[npt.NDArray[np.intp], Handle]]:
        handle = self._owners.handle(OWN)
        rows = np.arange(len(keys), dtype=np.intp)
        if handle is not None:
            for first in range(0, len(rows), CLAIM_OBJECTS_MAX):
                yield rows[first : first + CLAIM_OBJECTS_MAX], handle


def _nothing() -> None:
    """Of who does not want to know."""
