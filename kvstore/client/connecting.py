# SPDX-License-Identifier: Apache-2.0
"""Connections to owners, which are made in threads of their own and before anybody needs them. So
nobody who loads or stores waits for one, and what lies at an owner that cannot be connected to is
a miss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import te
from kvstore.threads import Threads

__all__ = ["Connections", "Known"]

logger = logging.getLogger(__name__)

THREADS_MAX: Final = 16
PAUSE_S: Final = 0.5
"""An owner that could not be connected to, or whose connection has ended, is left alone for so
long; twice as long each time, up to ``PAUSE_S_MAX``, until a connection has stood for longer than
the next pause would take, or the owner is heard again."""
PAUSE_S_MAX: Final = 60.0


@dataclass(frozen=True)
class Known:
    """The connection to an owner."""

    #: Its card, of this start of it.
    engine: bytes
    peer: te.Peer


@dataclass
class _State:
    """Of one owner."""

    known: Known | None = None
    is_connecting: bool = False
    #: By the monotonic clock: not to be tried before, and since when the connection stands.
    try_s: float = 0.0
    since_s: float = 0.0
    pause_s: float = PAUSE_S

    def rest(self, now_s: float) -> None:
        """It has failed."""
        self.try_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, PAUSE_S_MAX)

    def ended(self, now_s: float) -> None:
        """The connection has."""
        if now_s - self.since_s >= self.pause_s:
            self.pause_s = PAUSE_S
        self.known = None
        self.rest(now_s)


class Connections:
    """By the numbers of owners. All methods are thread-safe."""

    def __init__(
        self,
        connect: Callable[[int], Known | None],
        on_change: Callable[[int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            connect: connects to an owner, and waits for it; None if there is none any more. May
                raise ``te.Error``.
            on_change: gets the number of an owner whose connection stands now, or does not.
        """
        self._connect = connect
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[int, _State] = {}
        self._is_closed = False
        self._threads = Threads(THREADS_MAX, "kvstore-connect")

    def get(self, number: int) -> Known | None:
        """The connections that have been made; None if there are none at the moment."""
        state = self._states.get(number)
        return None if state is None else state.known

    def want(self, number: int) -> None:
        """From now on an owner is to be connected to; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._begin(number, self._states.setdefault(number, _State()))

    def hurry(self, number: int) -> None:
        """As ``want``, of an owner that has just been heard again: the way to it may be open since.
        Ends the pause of attempts that have failed."""
        with self._lock:
            if self._is_closed:
                return
            state = self._states.setdefault(number, _State())
            if state.known is None:
                state.pause_s, state.try_s = PAUSE_S, 0.0
            self._begin(number, state)

    def make(self, number: int) -> None:
        """As ``want``, and waits for the first attempt."""
        with self._lock:
            state = self._states.setdefault(number, _State(is_connecting=True))
        self._make(number, state)

    def drop(self, number: int) -> None:
        """The owner is gone, or another one gets its number."""
        with self._lock:
            state = self._states.pop(number, None)
        if state is not None and state.known is not None:
            state.known.peer.close()

    def lost(self, number: int, known: Known) -> bool:
        """These connections of an owner have ended; others are made in a while. False if that is
        known already."""
        with self._lock:
            state = self._states.get(number)
            if state is None or state.known is not known:
                return False
            state.ended(self._clock())
        known.peer.close()
        self._on_change(number)
        return True

    def tick(self) -> None:
        """Looks for connections that have ended, and makes those that are wanted; to be called
        regularly."""
        for number, state in list(self._states.items()):
            known = state.known
            if known is None:
                self.want(number)
            elif not known.peer.alive and self.lost(number, known):
                logger.info("the connection to owner %d of the store has ended", number)

    def close(self) -> None:
        """Ends all. Waits for those that are being made."""
        with self._lock:
            self._is_closed = True
            states, self._states = self._states, {}
        self._threads.shutdown(cancel_futures=True)
        for one in states.values():
            if one.known is not None:
                one.known.peer.close()
        # Whoever made this keeps it: both are freed at once, without a garbage collection.
        self._connect, self._on_change = _nobody, _nobody

    def _begin(self, number: int, state: _State) -> None:
        """With the lock."""
        if state.known is None and not state.is_connecting and self._clock() >= state.try_s:
            state.is_connecting = True
            try:
                self._threads.submit(self._make, number, state)
            except RuntimeError:  # There are no threads at the moment.
                state.is_connecting = False
                state.rest(self._clock())

    def _make(self, number: int, state: _State) -> None:
        known, why = None, ""
        try:
            known = self._connect(number)
        except te.Error as exc:
            why = str(exc)
        except Exception as exc:
            logger.exception("a bug in the store: owner %d was not connected to", number)
            why = repr(exc)
        with self._lock:
            now_s = self._clock()
            state.is_connecting = False
            is_wanted = self._states.get(number) is state
            if known is None:
                state.rest(now_s)
            elif is_wanted:
                state.known, state.since_s = known, now_s
        if known is not None and not is_wanted:
            known.peer.close()
        elif known is not None:
            self._on_change(number)
        elif why and is_wanted:
            logger.warning(
                "owner %d of the store is not used until it can be connected to: %s", number, why
            )


def _nobody(_: int) -> None:
    """Of connections that are closed."""
