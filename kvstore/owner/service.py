# SPDX-License-Identifier: Apache-2.0
"""Answers what other processes ask an owner, over a ZeroMQ socket."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import urlsplit

import msgspec
import zmq

from bootstrap_server.admission.unauthenticated import UnauthenticatedConnections
from kvstore.owner.answers import answer, is_slow, published
from kvstore.owner.claims import CLAIM_IS_OVER, FENCE_TIMEOUT_S
from kvstore.owner.fencing import Fencing
from kvstore.owner.followers import FOLLOWERS_MAX, Followers
from kvstore.owner.owner import Owner
from kvstore.protocol.loop import Loop
from kvstore.protocol.messages import (
    Answer,
    Changes,
    Follow,
    Promote,
    Publish,
    Published,
    Question,
    Refused,
    decode_question,
    encode,
    split,
)
from kvstore.protocol.sockets import Sockets
from kvstore.rate_limited_log import RateLimitedLog
from kvstore.threads import Threads

__all__ = ["Service"]

logger = logging.getLogger(__name__)

CHANGES_MAX: Final = 1 << 17
SLOW_MAX: Final = 256
"""Publications that wait for a thread; more are refused."""
PROMOTIONS_MAX: Final = 64
"""Questions for objects of the lower tier that wait for a thread; more are refused."""
TICK_S: Final = 0.02
STRANGERS_S: Final = 0.1
"""How often it is counted what those have sent who have proved nothing."""


class _Slow:
    """Threads for questions that wait, and a bound on those that wait for a thread."""

    def __init__(self, what: str, waiting_max: int) -> None:
        self.what: Final = what
        self.waiting_max: Final = waiting_max
        self._free = threading.BoundedSemaphore(waiting_max)
        self.threads: Final = Threads(2, f"kvstore-{what}")
        self.threads.begin()

    def offer(self, work: Callable[[], object]) -> bool:
        """False if too many wait already."""
        if not self._free.acquire(blocking=False):
            return False
        self.threads.submit(self._run, work)
        return True

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            self._free.release()


class Service:
    """The questions of all clients of one owner, answered in one thread; those that read many bytes
    or look at all objects, in two others; those that wait for a tier, in two more. Nothing waits
    for a fence there: one thread looks at all of them."""

    def __init__(self, owner: Owner, sockets: Sockets, endpoint: str) -> None:
        """Starts to listen; ``zmq.ZMQError`` if it cannot."""
        self._owner = owner
        self._socket, self.endpoint = sockets.listen(endpoint)
        self._followers = Followers()
        self._slow = _Slow("publications", SLOW_MAX)
        self._promotions = _Slow("promotions", PROMOTIONS_MAX)
        self._fencing = Fencing()
        self._finished: deque[tuple[bytes, bytes, Answer]] = deque()
        self._loop = Loop("kvstore-owner", TICK_S, self._on_time)
        self._loop.add(self._socket, self._on_readable)
        #: None at a Unix socket, to which no stranger comes.
        self._unauthenticated: UnauthenticatedConnections | None = None
        where = urlsplit(self.endpoint)
        if where.scheme == "tcp" and where.port:
            self._unauthenticated = UnauthenticatedConnections(
                self._socket, where.port, self._loop.add, "store"
            )
        self._strangers_s = 0.0
        self._strange, self._deaf = RateLimitedLog(logger), RateLimitedLog(logger)
        self._closing = False
        owner.announcers.append(self._on_change)
        self._loop.start(self._end)

    def close(self) -> None:
        """Answers nobody any more. Waits for publications under way, and for no fence."""
        self._owner.announcers.remove(self._on_change)
        self._closing = True
        self._fencing.close()  # First: it gives the others work.
        for threads in (self._slow.threads, self._promotions.threads):
            threads.shutdown()
        self._loop.stop()

    def _end(self) -> None:
        if self._unauthenticated is not None:
            self._unauthenticated.close()
        self._socket.close()

    def _on_change(self) -> None:
        if len(self._followers):  # One that comes after this sees the change by its number.
            self._loop.call(self._tell_followers)

    def _on_readable(self) -> None:
        while True:
            try:
                frame, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._unauthenticated is not None:
                self._unauthenticated.welcome(self._unauthenticated.of(frame))
            try:
                (part,) = parts
                request_id, raw = split(part.buffer)
            except (ValueError, msgspec.DecodeError):
                self._strange.warn("a client sent what is no question of the store")
                continue
            client = frame.bytes
            try:
                question = decode_question(raw)
            except msgspec.DecodeError as exc:
                self._send(client, request_id, Refused(f"the question cannot be read: {exc}"))
                continue
            reply = self._answer(client, request_id, question)
            if reply is not None:
                self._send(client, request_id, reply)

    def _answer(self, client: bytes, request_id: bytes, question: Question) -> Answer | None:
        """None if it comes later."""
        if isinstance(question, Follow):
            if not self._followers.add(client, request_id, question.number, time.monotonic()):
                return Refused(f"there are {FOLLOWERS_MAX} followers already")
            self._tell_followers(client)
            return None
        if isinstance(question, Publish) and question.checksums:
            return self._publish(client, request_id, question)  # There is nothing to read.
        if isinstance(question, Publish):
            work = partial(self._publish, client, request_id, question)
            return self._slowly(self._slow, client, request_id, work)
        if is_slow(question):
            slow = self._promotions if isinstance(question, Promote) else self._slow
            return self._slowly(slow, client, request_id, partial(answer, self._owner, question))
        return answer(self._owner, question)

    def _publish(self, client: bytes, request_id: bytes, question: Publish) -> Answer | None:
        """In a thread for publications, unless the client has told the checksums. None if the fence
        is still open: what is left is done in such a thread, behind the fence."""
        held = self._owner.storing.begin_publishing(question.claim_id)
        if held is None:
            return Published(CLAIM_IS_OVER)

        def end() -> Answer:
            return published(self._owner, held, question)

        # Past the bound: there are no more of them than claims.
        later = partial(self._slow.threads.submit, self._run, client, request_id, end)
        if held.is_closed() or not self._fencing.wait(held.is_closed, FENCE_TIMEOUT_S, later):
            return end()
        return None

    def _tell_followers(self, client: bytes | None = None) -> None:
        """Those who are due; of one client alone, if one is given."""
        answers: dict[int, bytes] = {}  # Most know the same changes.
        for one in self._followers.due(self._owner.changes, time.monotonic(), client):
            if one.number not in answers:
                answers[one.number] = encode(self._since(one.number))
            self._send_encoded(one.client, one.request_id, answers[one.number])

    def _since(self, number: int) -> Changes:
        found = self._owner.since(number, CHANGES_MAX)
        if found is None:
            return Changes(self._owner.card.epoch, number, None)
        return Changes(self._owner.card.epoch, number + len(found), found.tobytes())

    def _slowly(
        self, slow: _Slow, client: bytes, request_id: bytes, work: Callable[[], Answer | None]
    ) -> Answer | None:
        if self._closing:
            return Refused("the owner is being closed")
        try:
            is_taken = slow.offer(partial(self._run, client, request_id, work))
        except RuntimeError:
            self._closing = True  # Its threads were ended between the two.
            return Refused("the owner is being closed")
        if not is_taken:
            return Refused(f"{slow.waiting_max} {slow.what} wait already; ask for less at once")
        return None

    def _run(self, client: bytes, request_id: bytes, work: Callable[[], Answer | None]) -> None:
        """In one of the threads. Nothing is answered yet if the work returns None."""
        try:
            reply = work()
        except Exception as exc:
            logger.exception("a bug in the store: a question failed")
            reply = Refused(f"a bug: {exc!r}")
        if reply is not None:
            self._finished.append((client, request_id, reply))
            self._loop.call(self._send_finished)

    def _send_finished(self) -> None:
        while self._finished:
            self._send(*self._finished.popleft())

    def _send(self, client: bytes, request_id: bytes, reply: Answer) -> None:
        self._send_encoded(client, request_id, encode(reply))

    def _send_encoded(self, client: bytes, request_id: bytes, raw: bytes) -> None:
        """A client that is gone, or reads nothing, costs its answers alone."""
        self._loop.has_sent(self._socket)
        try:
            self._socket.send_multipart([client, request_id + raw], zmq.NOBLOCK)
        except zmq.Again:
            self._deaf.warn("a client of the store does not read its answers")

    def _on_time(self) -> None:
        now_s = time.monotonic()
        if self._unauthenticated is not None and now_s >= self._strangers_s:
            self._strangers_s = now_s + STRANGERS_S
            self._unauthenticated.tick()
        self._tell_followers()
