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
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore._table import sole_owner
from kvstore.client.deadline import Deadline
from kvstore.client.load_times import LoadTimes
from kvstore.client.memory import Memory
from kvstore.client.pool import OWN, Version, keys_of
from kvstore.client.reading import Source
from kvstore.client.status import OwnerSeen, StoreStatus, with_owner
from kvstore.host.far import ReadLately
from kvstore.host.handle import HostHandle
from kvstore.host.lease import Lease
from kvstore.host.link import PAUSE_S, Link
from kvstore.host.place import Place
from kvstore.host.telling import TELLER_S, Told
from kvstore.objects.changes import LOWER_TIER, OWNERS_MAX, PLACE, Found, Keys, Records
from kvstore.owner.card import OwnerStats
from kvstore.owner.claims import CLAIM_OBJECTS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import NO_TURN, Discard, Figures, Lender, Touch

__all__ = ["HostPool"]

logger = logging.getLogger(__name__)

OWN_ALONE: Final = bytes([1]).ljust(OWNERS_MAX, b"\0")
TOLD_MAX: Final = 1024
"""Batches of keys that wait to be told to the owner."""
_NOBODY: Final = Lender(0, b"", 0, 0, bytes(16).hex(), "", 1)


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
        *,
        reads_far: bool = True,
        puts_far: bool = True,
    ) -> None:
        """Connects to the owner, if there is one. ``reads_far``: what lies at other hosts is read
        from there; else it is asked of the owner. ``puts_far``: if this host lends nothing, objects
        are stored at others from here; else the owner does that."""
        self.request_timeout_s: Final = request_timeout_s
        self._lease = lease
        self._place = place
        self._reads_far, self._puts_far = reads_far, puts_far
        self._read_lately = ReadLately()
        self._memory = memory
        self._load_times = load_times
        self._lock = threading.Lock()
        self._link: Link | None = None
        #: Which joining it belongs to (``Lease.joins``), and when it is tried again.
        self._joins = 0
        self._link_s = 0.0
        self._id: Final = secrets.token_bytes(16)
        #: What it has told, and the last answer, which counts for a while.
        self._told: Final = Told()
        self._answer: tuple[StoreStatus, OwnerStats | None] | None = None
        self._answer_until_s = 0.0
        self._untold: deque[tuple[Callable[[bytes], Touch | Discard], Keys]] = deque()
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
        joins = self._lease.joins
        try:
            path = str(self._place.calls)
            link = Link(path, self._memory, self.request_timeout_s, puts_far=self._puts_far)
        except NoAnswer as exc:
            self._link_s = time.monotonic() + PAUSE_S
            logger.warning("%s; it is tried again", exc)
            return
        link.connect_by_te()  # First: what is found behind this is to be read.
        former, self._link = self._link, link
        self._joins = joins
        if former is not None:
            former.close()
        for number in np.flatnonzero(np.frombuffer(link.table.ranks, np.uint8)).tolist():
            self._load_times.forget(number)  # The owner's numbers may be others' now.

    def _joined(self) -> Link | None:
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
        self._connect_far()

    def _connect_far(self) -> None:
        """Behind the first wish: until then, and if it fails, the owner brings what is there."""
        link = self._joined()
        if link is not None:
            link.connect_far()
            if self._link is not link:
                link.far.close()

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
        if link is None or not link.is_readable:
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
        return self.ranks if lends else b"\0" + self.ranks[OWN + 1 :]

    def ranks_without(self, numbers: Collection[int]) -> bytes:
        """See ``Pool``."""
        if not numbers:
            return self.ranks
        ranks = bytearray(self.ranks)
        for number in numbers:
            ranks[number] = 0
        return bytes(ranks)

    def look_up(
        self, keys: Keys, fingerprint: int, ranks: bytes | None = None, *, asks: bool = False
    ) -> Records:
        """See ``Pool``."""
        link = self._link
        if link is None:
            self._joined()  # Whoever only looks up has it connected to, too.
            return np.zeros(len(keys), PLACE)
        places = np.empty(len(keys), PLACE)
        if link.puts is not None:
            link.puts.settle(keys)
        ranks = self.ranks if ranks is None else ranks
        if not link.table.look_up(np.ascontiguousarray(keys), fingerprint, ranks, places):
            return places  # As before most puts.
        number = sole_owner(places)
        if number == OWN or (number > OWN and not asks and self._reads_itself(link, keys, number)):
            return places
        is_far = (places["owner"] != OWN) | (places["slot"] == LOWER_TIER)
        is_far &= places["found"] == Found.HERE
        if is_far.any():
            is_joined = self._joined() is link
            if is_joined and self._reads_far and not asks:
                is_far &= ~self._is_readable(link, keys, places, is_far)
            places["slot"][is_far] = LOWER_TIER
            if not is_joined:  # Nobody is there to be asked for them.
                places["found"][is_far] = Found.MISSING
        return places

    def _reads_itself(self, link: Link, keys: Keys, number: int) -> bool:
        """Whether all of the objects that lie in the memory of one owner of another host are for
        this process to read: the most frequent case, and told quickly. See ``_is_readable``."""
        return (
            self._reads_far
            and link.far.reachable(number) is not None
            and not self._read_lately.has_any(keys)
            and self._joined() is link
        )

    def _is_readable(
        self, link: Link, keys: Keys, places: Records, is_far: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Which of the objects that do not lie in this host's memory this process reads itself:
        those in the memory of other hosts' owners to which it is connected, and that it has not
        read lately. What is wanted again is kept on this host."""
        rows = np.flatnonzero(is_far & (places["slot"] != LOWER_TIER))
        numbers = places["owner"][rows]
        readable = link.far.readable[numbers]
        found = np.zeros(len(keys), np.bool_)
        wants = self._memory.is_used and not readable.all()
        if wants and link.far.want(np.unique(numbers).tolist()):
            self._lease.remind()
        rows = rows[readable]
        found[rows] = ~self._read_lately.has(keys[rows])
        return found

    def held_by(self, number: int, keys: Keys, fingerprint: int) -> Records:
        """See ``Pool``."""
        ranks = bytearray(OWNERS_MAX)
        ranks[number] = 1
        return self.look_up(keys, fingerprint, bytes(ranks))

    def keys(self, since: Version | None) -> tuple[Version, Keys] | None:
        """See ``Pool``. Without an owner to ask there are none."""
        link = self._joined()
        return keys_of(None if link is None else link.table, self.ranks, since)

    def touch_soon(self, keys: Keys, signature: bytes, nbytes: int) -> None:
        """See ``Pool``. Wakes up the lease's thread if it was not reminded since the last time; of
        too many, some are left out."""
        self._tell_soon(lambda some: Touch(some, signature, nbytes), keys)

    def discard_soon(self, keys: Keys, signature: bytes) -> None:
        """Has objects removed, as ``touch_soon``. An owner that does not hear it keeps them."""
        self._tell_soon(lambda some: Discard(some, signature), keys)

    def _tell_soon(self, kind: Callable[[bytes], Touch | Discard], keys: Keys) -> None:
        if len(self._untold) < TOLD_MAX:
            self._untold.append((kind, keys))
            self._lease.remind()

    def _tell(self) -> None:
        """In the lease's thread."""
        link, told = self._joined(), list[Touch | Discard]()
        while self._untold:
            kind, keys = self._untold.popleft()
            self._read_lately.add(keys)
            for first in range(0, len(keys), CLAIM_OBJECTS_MAX):
                told.append(kind(keys[first : first + CLAIM_OBJECTS_MAX].tobytes()))
        if link is not None:
            link.caller.tell(told)

    # -- owners

    def source(self, number: int, *, brought: bool = False) -> Source | None:
        """See ``Pool``: what was brought lies in this host's memory, whichever number it is."""
        link = self._link
        if link is None:
            return None
        if number != OWN and not brought:
            return link.far.source(number)
        source = link.source(number)
        if (source is None or source.link is None) and link.needs_te:
            self._lease.remind()
        return source

    def source_of_all(self, places: Records, *, brought: bool = False) -> Source | None:
        """See ``Pool``."""
        number = sole_owner(places)
        return None if number < 0 else self.source(number, brought=brought)

    def connect_by_te(self) -> None:
        """Connects to the owner, if this process needs that, and has no connection. Waits for
        it."""
        link = self._joined()
        if link is not None:
            link.connect_by_te()
            if self._link is not link:  # It was ended meanwhile.
                link.close()

    def pause(self, number: int, reason: str) -> None:
        """See ``Pool``. The lease's thread connects anew."""
        link = self._link
        if link is not None:
            link.far.pause(number)
        logger.warning("the memory of owner %d of the store was not read: %s", number, reason)

    def settle(self, keys: Keys | None) -> None:
        """Waits a while until the owner knows of what this process has put: of these, or of all."""
        link = self._link
        if link is not None and link.puts is not None:
            link.puts.settle(keys)

    def handle(self, number: int) -> HostHandle | None:
        """See ``Pool``: the host's owner, whichever number it is; but objects are stored at the
        owner of that number, if this process can write there."""
        link = self._joined()
        if link is None:
            return None
        if link.puts is not None and number != OWN:
            far = link.puts.handle(number)
            if far is not None:
                return far
            if self._memory.is_used and link.far.want([number]):
                self._lease.remind()
        source = self.source(number, brought=True)
        if source is None:
            return None
        return HostHandle(source, link.caller, link.identity, self.request_timeout_s)

    def usable(self) -> Sequence[int]:
        """See ``Pool``: objects are stored at the host's owner, and it stores copies elsewhere."""
        return [] if self._joined() is None else [OWN]

    def storing(self) -> Sequence[int]:
        """See ``Pool``: the host's owner, or those of other hosts that this process stores at."""
        link = self._joined()
        if link is None or link.puts is None or not self._memory.is_used:
            return self.usable()
        storing = link.puts.storing(link.table.ranks)
        if link.far.want_all(storing.numbers):
            self._lease.remind()
        return storing.numbers if storing.are_known else self.usable()

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
        """See ``Pool``. The host's owner is there to be chosen alone."""
        link = self._link
        lenders = {} if link is None else link.far.lenders
        known = [lenders.get(one, _NOBODY) for one in numbers]
        names = [bytes.fromhex(one.name) for one in known]
        return names, [float(one.nbytes) for one in known], [one.host for one in known]

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
        found = link.figures(Figures(self._id))
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
        found = None if link is None else link.figures(Figures())
        if link is None or found is None:
            return ()
        host, _ = found
        held = 0 if host.own is None else host.own.objects
        mine = [msgspec.structs.replace(one, objects=held) for one in self.seen()]
        return (*(mine if link.caller.hello.lends else []), *host.owners)


def _nothing() -> None:
    """Of who does not want to know."""
