# SPDX-License-Identifier: Apache-2.0
"""Owners of other hosts, as a process reads from them that uses the owner of its own: by te,
without a word to anybody. Their places come from the host's owner, and connections are made in the
lease's thread, once something is wanted from there.

All of this is a hint. The header that comes with an object's bytes tells whether they are right,
whichever owner they have come from; what cannot be read this way is asked of the host's owner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

import te
from kvstore.client.memory import Memory
from kvstore.client.reading import Source
from kvstore.objects.changes import KEY_BYTES, OWNERS_MAX, Keys
from kvstore.protocol.messages import Lender
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["FarOwners", "ReadLately", "each_of"]

logger = logging.getLogger(__name__)

CONNECTED_MAX: Final = 64
"""Owners that a process reads from itself; objects of more come through the host's owner."""
PAUSE_S: Final = 1.0
"""One that a read from has failed is left alone for so long, as is one that could not be connected
to; for twice as long each time that it fails again, up to ``PAUSE_S_MAX``."""
PAUSE_S_MAX: Final = 60.0
LOOK_S: Final = 10.0
"""So often the host's owner is asked where the others are, as long as anything is read. Numbers are
given anew, and nothing else tells that one means another owner now whose former one lives."""
READ_MAX: Final = 1 << 16
"""Keys that are remembered, and up to as many more."""


class ReadLately:
    """Which keys a process has read. Those are wanted again, perhaps, so that the host's owner
    keeps them the next time. Forgets the oldest. One thread adds, and any may ask."""

    def __init__(self, most: int = READ_MAX) -> None:
        """``most``: so many keys at least are remembered, and twice as many at most."""
        self._most = most
        self._now: set[bytes] = set()
        self._before: set[bytes] = set()

    def add(self, keys: Keys) -> None:
        """These were read."""
        for one in each_of(keys):
            if len(self._now) >= self._most:
                self._before, self._now = self._now, set()
            self._now.add(one)

    def has(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of these were."""
        now, before = self._now, self._before
        return np.array([one in now or one in before for one in each_of(keys)], np.bool_)

    def has_any(self, keys: Keys) -> bool:
        """Whether some of these were."""
        names = each_of(keys)
        return not (self._now.isdisjoint(names) and self._before.isdisjoint(names))


def each_of(keys: Keys) -> list[bytes]:
    """One after the other."""
    raw = keys.tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


@dataclass
class _Far:
    """One owner that something is wanted of."""

    #: While it is connected to.
    source: Source | None = None
    #: Where it was when it was connected to, or tried, the last time.
    where: Lender | None = None
    #: When it may be connected to, by the monotonic clock.
    try_s: float = 0.0
    pause_s: float = PAUSE_S

    @property
    def peer(self) -> te.Peer | None:
        source = self.source
        return None if source is None else source.link

    @property
    def live_source(self) -> Source | None:
        source = self.source
        return source if source is not None and source.peer.alive else None

    def rest(self, now_s: float) -> None:
        """It could not be connected to, or not be read from."""
        self.try_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, PAUSE_S_MAX)

    def fail(self, now_s: float) -> None:
        """A read from it has failed. The next failure soon behind a pause makes that longer: a host
        that stands still would else cost some get its deadline every second."""
        if now_s < self.try_s:
            return  # Of several reads at once.
        if now_s >= self.try_s + LOOK_S:
            self.pause_s = PAUSE_S
        self.rest(now_s)

    @property
    def was_lost(self) -> bool:
        """Whether it was connected to, or tried, and is not connected now."""
        return self.live_source is None and (self.source is not None or self.try_s > 0)

    def is_due(self, now_s: float) -> bool:
        """Whether it is to be connected to."""
        return self.live_source is None and now_s >= self.try_s


class FarOwners:
    """By the numbers that one start of the host's owner has given them. Thread-safe."""

    def __init__(
        self, memory: Memory, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``timeout_s``: of ``connect``."""
        self._memory = memory
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._owners: dict[int, _Far] = {}
        self._is_closed = False
        #: When the host's owner may be asked again where they are, and is to be.
        self._ask_s = self._look_s = 0.0
        self._looked_s = -PAUSE_S
        #: By number, what it has said last; replaced as a whole. And whether that is of use beyond
        #: those that are connected to.
        self.lenders: Mapping[int, Lender] = {}
        self._wants_all = False
        self._unreached = RateLimitedLog(logger)

    def close(self) -> None:
        """Ends the connections, and reads under way."""
        with self._lock:
            self._is_closed = True
            owners, self._owners = self._owners, {}
        for one in owners.values():
            if one.peer is not None:
                one.peer.close()

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """By number: from which owners objects can be read now."""
        found = np.zeros(OWNERS_MAX, np.bool_)
        now_s = self._clock()
        for number, one in list(self._owners.items()):
            found[number] = now_s >= one.try_s and one.live_source is not None
        return found

    def reachable(self, number: int) -> Source | None:
        """One owner, if it can be read from now, and written to."""
        one = self._owners.get(number)
        return None if one is None or self._clock() < one.try_s else one.live_source

    def want(self, numbers: Iterable[int]) -> bool:
        """Something lies there that is to be read; whether ``connect`` has something to do."""
        with self._lock:
            if self._is_closed:
                return False
            for one in numbers:
                if one not in self._owners and self._has_room():
                    self._owners[one] = _Far()
            return bool(self._to_connect())

    def want_all(self, numbers: Iterable[int]) -> bool:
        """Where all owners are is to be known, of which these are the numbers; whether ``connect``
        has something to do."""
        now_s = self._clock()
        with self._lock:
            self._wants_all = True
            if any(one not in self.lenders for one in numbers):
                self._look_s = min(self._look_s, self._looked_s + PAUSE_S)
            return not self._is_closed and now_s >= max(self._look_s, self._ask_s)

    def _has_room(self) -> bool:
        """With the lock. Those that were lost make room: they may be gone."""
        if len(self._owners) < CONNECTED_MAX:
            return True
        lost = next((one for one, far in self._owners.items() if far.was_lost), None)
        if lost is not None:
            del self._owners[lost]
        return lost is not None

    def connect(self, lenders: Callable[[], Iterable[Lender] | None]) -> None:
        """Connects to those that are wanted, as far as the time allows, and leaves those that are
        elsewhere now. Waits for it. ``lenders``: asks the host's owner where they are; None if it
        does not say."""
        begun_s = self._clock()
        with self._lock:
            wants = self._wants_all or bool(self._owners)
            is_to_look = wants and begun_s >= max(self._look_s, self._ask_s)
            if not (is_to_look or self._to_connect()):
                return
        told = lenders()
        if told is None:
            self._ask_s = self._clock() + PAUSE_S
            return
        self._looked_s = self._clock()
        self._look_s = self._looked_s + LOOK_S
        self.lenders = places = {one.number: one for one in told}
        self._leave(places)
        with self._lock:
            wanted = self._to_connect()
        for number in wanted:
            left_s = begun_s + self._timeout_s - self._clock()
            if left_s <= 0 or self._is_closed:
                return  # The next wish goes on with the others.
            where = places.get(number)
            self._keep(number, where, None if where is None else self._connected(where, left_s))

    def _leave(self, places: Mapping[int, Lender]) -> None:
        """Those that are not where they were; ``places``: where each is."""
        left = list[te.Peer]()
        with self._lock:
            now_s = self._clock()
            for number, one in self._owners.items():
                where = places.get(number)
                if one.where == where:
                    continue
                if one.peer is not None:
                    left.append(one.peer)
                    one.source = None
                if where is None:
                    one.rest(now_s)
                else:
                    one.try_s, one.pause_s = 0.0, PAUSE_S
                one.where = where
            # te has one connection to an owner, under whichever numbers it is known.
            kept = {id(one.peer) for one in self._owners.values()}
        for peer in left:
            if id(peer) not in kept:
                peer.close()

    def _keep(self, number: int, where: Lender | None, peer: te.Peer | None) -> None:
        """``peer``: None if it was not connected to."""
        with self._lock:
            one = self._owners.get(number)
            if one is not None:
                one.where = where
                if peer is None or where is None:
                    one.rest(self._clock())
                else:
                    places = where.headers_address, where.slots_address
                    one.source = Source(number, peer, *places, is_far=True)
                    one.pause_s = PAUSE_S
        if one is None and peer is not None:  # It is not wanted any more.
            peer.close()

    def _to_connect(self) -> list[int]:
        """With the lock. First those that have not failed, or less often."""
        now_s = self._clock()
        if now_s < self._ask_s:
            return []
        due = [number for number, one in self._owners.items() if one.is_due(now_s)]
        return sorted(due, key=lambda number: self._owners[number].pause_s)

    def _connected(self, where: Lender, timeout_s: float) -> te.Peer | None:
        try:
            return self._memory.engine.connect(where.engine, timeout_s)
        except (te.Error, OSError, RuntimeError) as exc:  # Such as no descriptors, or no threads.
            self._unreached.warn(
                "objects at owner %d of the store come through this host's owner: %s",
                where.number,
                exc,
            )
        except Exception:  # It rests, too: else it is tried again at once, and again.
            logger.exception("a bug in the store: owner %d was not connected to", where.number)
        return None

    def source(self, number: int) -> Source | None:
        """An owner to read from; None if it cannot be read now."""
        one = self._owners.get(number)
        return None if one is None else one.live_source

    def pause(self, number: int) -> None:
        """It is not read from for a while."""
        with self._lock:
            one = self._owners.get(number)
            if one is not None:
                one.fail(self._clock())
