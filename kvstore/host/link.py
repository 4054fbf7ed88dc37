# SPDX-License-Identifier: Apache-2.0
"""A process's connection to one start of its host's owner: the questions it asks there, the table
and the memory that are mapped here, and the owners of other hosts by the numbers that this start
has given them."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

import msgspec

import te
from kvstore._table import Mirror
from kvstore.client.memory import Memory
from kvstore.client.pool import OWN
from kvstore.client.reading import Source
from kvstore.client.status import StoreStatus
from kvstore.host.far import FarOwners
from kvstore.host.far_puts import FarPuts
from kvstore.host.handle import HOST
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import Figures, FiguresOf, Lender, Lenders, LendersAre
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["PAUSE_S", "Link"]

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
"""An owner that could not be connected to is left alone for so long."""


class Link:
    """Thread-safe."""

    def __init__(self, path: str, memory: Memory, timeout_s: float, *, puts_far: bool) -> None:
        """``NoAnswer``. ``timeout_s``: of each question, and to connect. ``puts_far``: what this
        process puts goes to other hosts from here, if its own lends nothing."""
        tables: list[Mirror] = []

        def map_table(fd: int) -> None:
            tables.append(Mirror(Mapped(fd).memory))

        self._memory = memory
        self._timeout_s = timeout_s
        self.caller: Final = Caller(path, HOST, timeout_s, map_table)
        self.table: Final = tables[0]
        #: Of other hosts.
        self.far: Final = FarOwners(memory, timeout_s)
        #: None if what this process puts goes to its host's owner.
        self.puts: Final = (
            FarPuts(self.caller, self.far, memory, self.identity, timeout_s)
            if puts_far and not self.caller.hello.lends
            else None
        )
        #: By te; for memory that the processor cannot read.
        self.peer: te.Peer | None = None
        #: When it may be connected to again, by the monotonic clock.
        self.connect_s = 0.0
        self._lock = threading.Lock()
        self._strange = RateLimitedLog(logger)

    def close(self) -> None:
        """Who reads what is mapped keeps it."""
        if self.puts is not None:  # First: it has something to say, perhaps.
            self.puts.close()
        self.caller.close()
        self.far.close()
        if self.peer is not None:
            self.peer.close()

    def identity(self) -> te.Identity:
        """Of this process's engine, which is made if there is none."""
        engine = self._memory.engine
        return te.Identity(engine.id, engine.epoch)

    # -- its memory

    @property
    def live_peer(self) -> te.Peer | None:
        """None if there is no connection by te at the moment."""
        peer = self.peer
        return peer if peer is not None and peer.alive else None

    @property
    def is_readable(self) -> bool:
        """Whether the owner's memory can be read at the moment, in one way at least."""
        return self.caller.window is not None or self.live_peer is not None

    @property
    def needs_te(self) -> bool:
        """Whether some is to be read that cannot be copied out of what is mapped here."""
        return self.caller.window is None or self._memory.has_unreadable

    def connect_by_te(self) -> None:
        """If that is needed, and there is no connection. Waits for it."""
        if not self.needs_te:
            return
        with self._lock:
            if self.live_peer is not None or time.monotonic() < self.connect_s:
                return
            try:
                engine, card = self._memory.engine, self.caller.hello.engine
                self.peer = engine.connect(card, self._timeout_s)
            except te.Error as exc:
                self.connect_s = time.monotonic() + PAUSE_S
                logger.warning("%s is not read by te: %s", HOST, exc)

    def source(self, number: int = OWN) -> Source | None:
        """To read from its memory, under whichever number; None if that cannot be read now."""
        window, peer, hello = self.caller.window, self.live_peer, self.caller.hello
        if window is None and peer is None:
            return None
        return Source(number, peer, hello.headers_address, hello.slots_address, window)

    # -- what it is asked

    def connect_far(self) -> None:
        """Connects to the owners of other hosts that are wanted. Waits for it."""
        self.far.connect(self._lenders)

    def _lenders(self) -> list[Lender] | None:
        """Where the owners of other hosts are; None if the host's owner does not say."""
        found, first = list[Lender](), 1
        try:
            while first:
                answer = self.caller.ask(Lenders(first), self._timeout_s)
                if not isinstance(answer, LendersAre) or 0 < answer.next <= first:
                    raise NoAnswer(f"{HOST} answers nonsense of other hosts")
                found += answer.lenders
                first = answer.next
        except NoAnswer as exc:
            self._strange.warn("where other hosts have their memory is not known: %s", exc)
            return None
        return found

    def figures(self, question: Figures) -> tuple[StoreStatus, int] | None:
        """How the owner is, and the number of this process's turn; None if it does not answer."""
        try:
            found = self.caller.ask(question, self._timeout_s)
            if not isinstance(found, FiguresOf):
                raise NoAnswer(f"{HOST} answers with {type(found).__name__}")
            return msgspec.msgpack.decode(found.status, type=StoreStatus), found.turn
        except (NoAnswer, msgspec.DecodeError) as exc:
            self._strange.warn("what %s holds is not told: %s", HOST, exc)
            return None
