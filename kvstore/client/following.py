# SPDX-License-Identifier: Apache-2.0
"""Follows the owners of other processes: what they hold goes into the table, and their answers to
those who ask."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Final

import msgspec
import numpy as np
import zmq

from bootstrap_server.running import RunningClock
from kvstore import _bytes
from kvstore._table import Table
from kvstore.client.aheads import Aheads
from kvstore.objects.changes import CHANGE, LOWER_TIER, OWNERS_MAX, Keys, fingerprint_of
from kvstore.owner.card import OwnerCard
from kvstore.protocol.asking import Asker, NoAnswer
from kvstore.protocol.loop import Loop
from kvstore.protocol.messages import (
    REQUEST_ID,
    VERSION,
    Answer,
    Changes,
    Follow,
    Greet,
    Hello,
    Placed,
    Question,
    Refused,
    Snapshot,
    decode_answer,
    encode,
    split,
)
from kvstore.protocol.sockets import Sockets, Where
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["Followed", "Following"]

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1
LOOK_S: Final = 0.5
"""How often this process looks for new owners."""
FORGET_S: Final = 60.0
"""An owner that has not answered for so long is forgotten, with all that it held."""
TRYING_MAX: Final = 64
"""Owners that have yet to prove themselves, and are asked at the same time. The list that they come
from may have any number, and be written by others: who does not answer makes room for the next."""
STILL_S: Final = 0.5
"""Of a time in which this process stood still, so much counts as silence of the owners."""
SNAPSHOT_PARTS: Final = 16
ASKED_MAX: Final = 1024
"""Questions to one owner that wait for an answer; more fail at once."""


class Followed:
    """One owner, as this process knows it. For the loop's thread, except ``card``, ``asker`` and
    ``aheads``."""

    def __init__(self, following: Following, name: str, where: Where) -> None:
        self.name: Final = name
        #: 0 before the owner's first answer.
        self.number = 0
        #: Replaced as a whole. None before the owner's first answer.
        self.card: OwnerCard | None = None
        self.asker: Final = Asker(following.sockets, where, name)
        self.aheads: Final = Aheads()
        self._following = following
        self.where: Final = where
        self._socket: zmq.Socket[bytes] | None = None
        #: Of that one; see ``Sockets.connect_watched``.
        self._ended: zmq.Socket[bytes] | None = None
        #: Whether it has brought the answer to a greeting.
        self._is_greeted = False
        self._asked: dict[bytes, tuple[Future[Answer], float]] = {}
        self._ids = itertools.count()
        #: Guards the next two, and what the table has of it.
        self._lock = threading.Lock()
        self._changes = 0
        self._is_forgotten = False
        self._part = 0
        #: Whether the table has all that the owner had when ``_changes`` was the next number.
        self._is_whole = False
        self._heard_s = self._following.clock.now_s()
        self._waiting_since_s = 0.0
        self.greet()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer."""
        return self._following.clock.now_s() - self._heard_s

    def learn(self, keys: Keys, signature: bytes, nbytes: int, placed: Placed) -> None:
        """Takes over where objects lie, before the announcement of that comes: who has stored
        something finds it. From any thread. ``ValueError`` for what says it not of each."""
        slots, generations = placed.slots, placed.generations
        if not len(slots) == len(generations) == 4 * len(keys):
            given = f"{len(slots)} and {len(generations)} bytes"
            raise ValueError(f"{given} do not say where {len(keys)} objects lie")
        changes = np.empty(len(keys), CHANGE)
        fingerprint = fingerprint_of(signature, nbytes)
        count = _bytes.additions(
            np.ascontiguousarray(keys), fingerprint, slots, generations, LOWER_TIER, changes
        )
        with self._lock:
            # What is announced later may have removed them already.
            if placed.number > self._changes and not self._is_forgotten:
                self._following.table.apply(self.number, changes[:count])

    def forget(self) -> None:
        """Its number may be another's from now on."""
        with self._lock:
            self._is_forgotten = True
            self._following.table.drop(self.number)

    def ask_soon(self, question: Question) -> Future[Answer]:
        """Asks in the loop's thread, from any thread; who does not need the answer leaves it. The
        future raises ``NoAnswer``; it may never end once the store is closed."""
        future: Future[Answer] = Future()
        self._following.loop.call(lambda: self._ask(question, future))
        return future

    # -- in the loop's thread

    def tell(self, question: Question) -> None:
        """Asks what needs no answer."""
        self._ask(question, Future())

    def _ask(self, question: Question, future: Future[Answer]) -> None:
        self._send(question, future, self._following.clock.now_s() + FORGET_S)

    def greet(self) -> None:
        """Connects anew and begins from the start. If it cannot, ``check`` tries again."""
        self.close()
        self._waiting_since_s = self._following.clock.now_s()
        try:
            self._socket, self._ended = self._following.sockets.connect_watched(self.where)
        except zmq.ZMQError as exc:  # Too many open files.
            logger.warning("owner %s cannot be connected to: %s", self.name, exc)
            return
        self._following.loop.add(self._socket, self._on_readable)
        self._following.loop.add(self._ended, self._on_ended)
        self._follow(Greet(VERSION), self._on_hello)

    def close(self) -> None:
        """Ends the connection, and all questions."""
        if self._socket is not None and self._ended is not None:
            for one in (self._socket, self._ended):
                self._following.loop.remove(one)
            self._socket.disable_monitor()
            self._socket.close()
            self._ended.close()
            self._socket = self._ended = None
            self._is_greeted = False
        asked, self._asked = self._asked, {}
        for future, _ in asked.values():
            future.set_exception(NoAnswer(f"the connection to owner {self.name} was ended"))

    def check(self, now_s: float, timeout_s: float) -> None:
        """Ends questions that are too old, and takes an owner out of look-ups that is silent. By
        ``Following.clock``."""
        late = [one for one, (_, deadline_s) in self._asked.items() if deadline_s < now_s]
        for one in late:
            self._asked.pop(one)[0].set_exception(
                NoAnswer(f"owner {self.name} does not answer in time")
            )
        if self.is_late(now_s, timeout_s):
            if self._following.set_heard(self.number, False):
                logger.warning(
                    "owner %s has not answered for %.1f s: its pages are not used until it answers",
                    self.name,
                    self.silent_s,
                )
            self.greet()

    @property
    def is_whole(self) -> bool:
        """Whether all that it had when it was greeted is in the table."""
        return self._is_whole

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Whether an answer is missing that should have come. By ``Following.clock``."""
        return now_s - self._waiting_since_s > timeout_s + 1.0

    def _follow(self, question: Question, then: Callable[[Answer], None]) -> None:
        """Asks something whose answer the loop itself uses."""
        self._waiting_since_s = self._following.clock.now_s()
        future: Future[Answer] = Future()
        future.add_done_callback(lambda one: None if one.exception() else then(one.result()))
        # ``check`` ends it: a longer deadline than the one there.
        self._send(question, future, self._waiting_since_s + FORGET_S)

    def _send(self, question: Question, future: Future[Answer], deadline_s: float) -> None:
        if self._socket is None or len(self._asked) >= ASKED_MAX:
            future.set_exception(NoAnswer(f"owner {self.name} has {ASKED_MAX} questions already"))
            return
        request_id = REQUEST_ID.pack(next(self._ids))
        self._following.loop.has_sent(self._socket)
        try:
            self._socket.send(request_id + encode(question), zmq.NOBLOCK)
        except zmq.Again:
            future.set_exception(NoAnswer(f"owner {self.name} does not read its questions"))
            return
        self._asked[request_id] = future, deadline_s

    def _on_readable(self) -> None:
        while self._socket is not None:
            try:
                request_id, raw = split(self._socket.recv(zmq.NOBLOCK))
                answer = decode_answer(raw)
            except zmq.Again:
                return
            except msgspec.DecodeError as exc:
                self._following.nonsense.warn(
                    "owner %s answers what cannot be read: %s", self.name, exc
                )
                continue
            self._heard_s = self._following.clock.now_s()
            asked = self._asked.pop(request_id, None)
            if asked is None:
                continue
            if isinstance(answer, Refused):
                asked[0].set_exception(NoAnswer(f"owner {self.name}: {answer.why}"))
            else:
                asked[0].set_result(answer)

    def _on_ended(self) -> None:
        """The connection has: what was asked over it is not answered any more. One that has not
        brought a greeting is left to ``check``, which does not try again at once."""
        assert self._ended is not None
        self._ended.recv_multipart(zmq.NOBLOCK)
        if self._is_greeted:
            self._following.set_heard(self.number, False)
            logger.info("the connection to owner %s has ended: it is greeted again", self.name)
            self.greet()

    def _on_hello(self, answer: Answer) -> None:
        if not isinstance(answer, Hello) or not (self.number or self._following.admit(self)):
            return
        self._is_greeted = True
        former, self.card = (
            self.card,
            OwnerCard(
                answer.engine,
                answer.epoch,
                answer.headers_address,
                answer.slots_address,
                answer.chunks,
                answer.object_bytes_max,
                answer.parts,
            ),
        )
        if self._is_whole and self.card == former:
            # The connection was cut, and nothing was lost but time: what is known stays known, or
            # whoever has found a page would not find it any more when he loads it.
            self._following.set_heard(self.number, True)
            self._follow(Follow(self._changes), self._on_changes)
            return
        self._is_whole = False
        self.aheads.drop()
        with self._lock:
            self._following.table.drop(self.number)
            self._changes, self._part = answer.number, 0
        self._following.set_heard(self.number, True)
        self._next_parts()

    def _next_parts(self) -> None:
        assert self.card is not None
        if self._part >= self.card.parts:
            self._is_whole = True
            self._follow(Follow(self._changes), self._on_changes)
            return
        self._follow(Snapshot(self._part, SNAPSHOT_PARTS), self._on_snapshot)
        self._part += SNAPSHOT_PARTS

    def _on_snapshot(self, answer: Answer) -> None:
        if self._apply(answer):
            self._next_parts()

    def _on_changes(self, answer: Answer) -> None:
        if isinstance(answer, Changes) and answer.changes is None:
            logger.info("owner %s has changed too fast to be followed; begins anew", self.name)
            self._is_whole = False
            self.greet()
        elif self._apply(answer, is_next=True):
            self._following.set_heard(self.number, True)
            self._follow(Follow(self._changes), self._on_changes)

    def _apply(self, answer: Answer, *, is_next: bool = False) -> bool:
        """``is_next``: what has changed since ``_changes``."""
        if not isinstance(answer, Changes) or answer.changes is None:
            return False
        with self._lock:
            self._following.table.apply(self.number, answer.changes)
            if is_next:
                self._changes = answer.number
        return True


class Following:
    """The owners of other processes, found by looking for them every half second."""

    def __init__(
        self,
        table: Table,
        set_heard: Callable[[int, bool], bool],
        sockets: Sockets,
        endpoints: Callable[[], Mapping[str, Collection[Where]]],
        on_tick: Callable[[], None],
        forget: Callable[[int], None],
        timeout_s: float,
    ) -> None:
        """
        Args:
            table: gets what they hold.
            set_heard: gets an owner's number and whether it answers; returns whether that is new.
            sockets: to connect with.
            endpoints: where owners are said to listen, by name; is called in the loop's thread.
            on_tick: is called about every tenth of a second in the loop's thread.
            forget: gets the number of an owner that is not known any more.
            timeout_s: an owner that has not answered for so long is not used until it does.
        """
        self.table: Final = table
        self.set_heard = set_heard
        self.sockets: Final = sockets
        self._endpoints = endpoints
        self._on_tick = on_tick
        self._on_forget = forget
        self._timeout_s = timeout_s
        self._owners: dict[str, Followed] = {}
        self._by_number: dict[int, Followed] = {}
        #: Those that have yet to answer.
        self._trying: dict[tuple[str, Where], Followed] = {}
        #: In which turn each was tried last; 0: never.
        self._turns: dict[tuple[str, Where], int] = {}
        self._turn = 0
        #: Owners that are said to be there, and have not proved themselves yet.
        self._unknown: Mapping[str, Collection[Where]] = {}
        self._looked_s = 0.0
        #: What owners say while this process stands still waits in its sockets: that is no silence.
        #: For the loop's thread.
        self.clock: Final = RunningClock(time.monotonic, STILL_S)
        #: For lines that another process can cause as often as it likes.
        self.nonsense: Final = RateLimitedLog(logger)
        self.loop: Final = Loop("kvstore-client", TICK_S, self._on_time)

    def start(self) -> None:
        """From now on the callbacks are called."""
        self._look()
        self.loop.start(self._end)

    def owner(self, number: int) -> Followed | None:
        """By its number in the table; None if there is none. From any thread."""
        return self._by_number.get(number)

    def owners(self) -> list[Followed]:
        """All that are known. From any thread."""
        return list(self._by_number.values())

    def knows(self, is_meant: Callable[[Where], bool]) -> bool:
        """Whether it knows what all of these owners have that were there when it last looked. From
        any thread."""
        unknown = itertools.chain.from_iterable(self._unknown.values())
        known = (one.is_whole for one in self.owners() if is_meant(one.where))
        return not any(map(is_meant, unknown)) and all(known)

    def close(self) -> None:
        """Ends all connections and questions."""
        self.loop.stop()

    def _end(self) -> None:
        for one in (*self._owners.values(), *self._trying.values()):
            one.close()
            one.asker.close()
        self._trying.clear()
        self._owners.clear()
        self._by_number.clear()
        # Whoever made this keeps it: both are freed at once, without a garbage collection.
        self._on_tick, self.set_heard = lambda: None, lambda *_: False
        self._on_forget = lambda _: None

    def _on_time(self) -> None:
        self._on_tick()
        now_s = self.clock.now_s()
        for one in list(self._owners.values()):
            one.check(now_s, self._timeout_s)
        if now_s - self._looked_s > LOOK_S:
            self._look()

    def _look(self) -> None:
        self._looked_s = self.clock.now_s()
        found = self._endpoints()
        self._unknown = {name: one for name, one in found.items() if name not in self._owners}
        for name, one in list(self._owners.items()):
            if name not in found and one.silent_s > self._timeout_s:
                self._forget(one, "it is gone")
            elif one.silent_s > FORGET_S:
                self._forget(one, f"it has been silent for {FORGET_S:g} s")
        self._try(
            [
                (name, where)
                for name, places in found.items()
                if name not in self._owners
                for where in places
            ]
        )

    def _try(self, places: Collection[tuple[str, Where]]) -> None:
        """Asks those that it does not know who they are: first those that were never asked."""
        now_s = self.clock.now_s()
        self._turns = {place: self._turns.get(place, 0) for place in places}
        for place, one in list(self._trying.items()):
            if place not in self._turns or one.is_late(now_s, self._timeout_s):
                one.close()
                del self._trying[place]
        others = (place for place in places if place not in self._trying)
        free = TRYING_MAX - len(self._trying)
        for place in heapq.nsmallest(free, others, key=self._turns.__getitem__):
            self._turn += 1
            self._turns[place] = self._turn
            self._trying[place] = Followed(self, *place)

    def admit(self, one: Followed) -> bool:
        """An owner has proved itself: it gets a number, if there is one left."""
        del self._trying[one.name, one.where]
        unknown = {name: at for name, at in self._unknown.items() if name != one.name}
        number = self._free_number()
        if number is None:
            logger.warning("owner %s is left out: there are %d already", one.name, OWNERS_MAX - 1)
        if number is None or one.name in self._owners:  # Two entries lead to one owner.
            self._unknown = unknown
            one.close()
            return False
        one.number = number
        self._owners[one.name] = self._by_number[number] = one
        self._unknown = unknown  # At last: other threads wait until it is known (`knows`).
        return True

    def _free_number(self) -> int | None:
        """0 is this process's own."""
        return next((one for one in range(1, OWNERS_MAX) if one not in self._by_number), None)

    def _forget(self, one: Followed, why: str) -> None:
        logger.info("owner %s is forgotten: %s", one.name, why)
        self.set_heard(one.number, False)
        one.forget()
        one.close()
        one.asker.close()
        del self._owners[one.name], self._by_number[one.number]
        self._on_forget(one.number)
