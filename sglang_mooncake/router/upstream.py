# SPDX-License-Identifier: Apache-2.0
"""Asks servers over connections that are used again: a POST with a whole body, and an answer whose
body is read as it comes.

A request of the router's is two of these, and of what it costs aiohttp's client was 30 % and more.
Questions to servers, which are rare, go by that all the same.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from sglang_mooncake.router.addresses import host_of, port_of
from sglang_mooncake.router.dialing import EXHAUSTED, Dialer
from sglang_mooncake.router.http1 import AnswerError, AnswerParser, Head, request_head
from sglang_mooncake.router.patience import within

__all__ = [
    "CONNECT_S",
    "KEEPALIVE_S",
    "Answer",
    "Broken",
    "Exhausted",
    "Stale",
    "Unreachable",
    "Upstream",
]

#: A server accepts a connection at once, unless its host is gone.
CONNECT_S: Final = 5.0
#: SGLang's servers close a connection on which nothing was asked for 5 s.
KEEPALIVE_S: Final = 2.0
#: Of an answer, before its sender is held back.
WAITING_BYTES_MAX: Final = 256 << 10
#: A long body is sent in pieces, between which others have their turn.
PIECE_BYTES: Final = 256 << 10


class Unreachable(Exception):
    """No connection could be made: the server has not had the request."""


class Exhausted(Unreachable):
    """The router has no descriptor or memory left for a connection, which is no server's fault."""


class Broken(Exception):
    """The connection has ended before the answer has, or has brought what is no answer."""


class Stale(Broken):
    """That was a connection that had been idle, and nothing of an answer has come: most likely the
    server was about to close it, and has not had the request."""


class _Origin(NamedTuple):
    host: str
    port: int
    is_tls: bool
    #: As the header ``Host`` names it, and what paths begin with.
    named: str
    prefix: str


class Upstream:
    """Connections to all servers. A server is named by its URL."""

    def __init__(self) -> None:
        self._dialer = Dialer()
        self._idle: dict[_Origin, deque[_Connection]] = {}
        self._lines: WeakValueDictionary[_Origin, _Line] = WeakValueDictionary()
        self._tls: ssl.SSLContext | None = None

    async def post(
        self, url: str, path: str, headers: Mapping[str, str], raw: bytes, *, is_new: bool = False
    ) -> Answer:
        """The answer, once its head has come. ``is_new``: over a connection that nothing was asked
        on before. ``Unreachable``, ``Broken``; ``UnicodeError`` of a host that can be no name. The
        caller looks at the time."""
        origin = _origin_of(url)
        head = request_head(origin.prefix + path, origin.named, headers, len(raw))
        idle = None if is_new else self._idle_one(origin)
        connection = idle or await self._connected(origin)
        try:
            await connection.ask(head, raw)
        except BaseException as error:
            connection.abort()
            if idle is not None and connection.is_unanswered and isinstance(error, Broken):
                self._end_idle(origin)  # They are as old.
                raise Stale(str(error)) from error
            raise
        return Answer(self, origin, connection)

    def give_up(self, url: str, quiet_s: float) -> None:
        """A server does not answer for its health. If nothing has come from it for so long on any
        connection, requests that it has had for as long are ``Broken``: a busy server lets some
        wait, and its health's answer, too, but answers others meanwhile."""
        line = self._lines.get(_origin_of(url))
        since_s = asyncio.get_running_loop().time() - quiet_s
        if line is not None and line.heard_s <= since_s:
            for connection in tuple(line.open):
                connection.give_up(since_s)

    def close(self) -> None:
        """Ends the connections on which nothing is under way."""
        for origin in self._idle:
            self._end_idle(origin)

    def _end_idle(self, origin: _Origin) -> None:
        connections = self._idle.get(origin)
        while connections:
            connections.pop().abort()

    def keep(self, origin: _Origin, connection: _Connection) -> None:
        """It may be used again."""
        connection.let_rest()
        if origin not in self._idle:
            self._idle[origin] = deque()
            self._sweep_later(origin)
        self._idle[origin].append(connection)

    def _sweep_later(self, origin: _Origin) -> None:
        asyncio.get_running_loop().call_later(KEEPALIVE_S, self._sweep, origin)

    def _sweep(self, origin: _Origin) -> None:
        """Closes what has not been used again, for as long as there is any."""
        idle = self._idle[origin]
        now_s = asyncio.get_running_loop().time()
        while idle and not idle[0].is_fresh(now_s):
            idle.popleft().abort()
        if idle:
            self._sweep_later(origin)
        else:
            del self._idle[origin]

    def _idle_one(self, origin: _Origin) -> _Connection | None:
        """The one that was used last, if the server has not closed it and is not about to."""
        idle = self._idle.get(origin)
        now_s = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if connection.is_fresh(now_s):
                return connection
            connection.abort()
        return None

    async def _connected(self, origin: _Origin) -> _Connection:
        line = self._lines.setdefault(origin, _Line())
        connection = _Connection(asyncio.get_running_loop(), line)
        try:
            await within(CONNECT_S, self._connect(origin, connection))
        except BaseException as error:
            connection.abort()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"no connection within {CONNECT_S:g} s") from error
            if isinstance(error, OSError):
                where = f"{origin.named}: {error.strerror or error}"
                if error.errno in EXHAUSTED:
                    raise Exhausted(f"the router cannot connect to {where}") from error
                raise Unreachable(f"cannot connect to {where}") from error
            raise
        return connection

    async def _connect(self, origin: _Origin, connection: _Connection) -> None:
        if origin.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        connected = await self._dialer.connect(origin.host, origin.port)
        await asyncio.get_running_loop().create_connection(
            lambda: connection,
            sock=connected,
            ssl=self._tls if origin.is_tls else None,
            server_hostname=origin.host if origin.is_tls else None,
        )


class _Line:
    """All connections to one server, while there are any."""

    def __init__(self) -> None:
        self.open: set[_Connection] = set()
        #: When something has come on one of them.
        self.heard_s = -math.inf


class Answer:
    """Of a server. It is let go by ``release`` or ``close``."""

    def __init__(self, upstream: Upstream, origin: _Origin, connection: _Connection) -> None:
        self._upstream, self._origin, self._connection = upstream, origin, connection
        head = connection.head
        self.status, self.headers, self.content_length = head.status, head.headers, head.length
        #: What has come of the body, some of it at least; nothing at its end. ``Broken``.
        self.read: Final = connection.read
        self._is_let_go = False

    def release(self) -> None:
        """It is read to its end, else its connection is closed."""
        if self._connection.may_be_kept and not self._is_let_go:
            self._is_let_go = True
            self._upstream.keep(self._origin, self._connection)
        else:
            self.close()

    def close(self) -> None:
        """It is not wanted any more, and neither is its connection."""
        if not self._is_let_go:  # Else it is another request's by now.
            self._is_let_go = True
            self._connection.abort()


class _Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, line: _Line) -> None:
        self._loop, self._line = loop, line
        self._transport: asyncio.Transport
        self._is_lost = False
        #: Whether it has ended without a byte of the answer.
        self.is_unanswered = False
        self._rests_since_s = 0.0
        self._asked_s = loop.time()
        self._parser = AnswerParser()
        #: What has come of the body and was not read, and how much.
        self._parts: list[bytes] = []
        self._size = 0
        self._is_held = False
        self._why: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_full = False
        self._is_resting = False

    # --- what the loop tells ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # Uvloop's is none by its type.
        self._line.open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_resting:
            self.abort()  # Nothing was asked.
            return
        self._line.heard_s = self._loop.time()
        try:
            body = self._parser.take(data)
        except AnswerError as error:
            self._fail(error)
            return
        if body:
            self._parts.append(body)
            self._size += len(body)
            if self._size > WAITING_BYTES_MAX and not self._is_held:
                self._is_held = True
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._line.open.discard(self)
        if not (self._is_resting or self._parser.is_over):
            self.is_unanswered = self._why is None and not self._parser.has_begun
            try:
                self._parser.end()
            except AnswerError as error:
                self._why = self._why or exc or error
            else:
                self._why = self._why or exc
        self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    # --- what its user asks ---

    async def ask(self, head: bytes, raw: bytes) -> None:
        """Returns when the head of the answer has come."""
        self._is_resting, self._asked_s = False, self._loop.time()
        if len(raw) <= PIECE_BYTES:
            self._transport.write(head + raw)
        else:
            await self._send(head, raw)
        while self._parser.head is None:
            self._look()
            await self._wait()

    async def _send(self, head: bytes, raw: bytes) -> None:
        """In pieces. A server that answers before it has all wants no more of it."""
        self._transport.write(head)
        view = memoryview(raw)
        for at in range(0, len(raw), PIECE_BYTES):
            self._transport.write(view[at : at + PIECE_BYTES])
            await asyncio.sleep(0)
            while self._is_full and self._parser.head is None and self._why is None:
                await self._wait()
            if self._parser.head is not None:
                self._parser.keeps = False
                return
            self._look()

    @property
    def head(self) -> Head:
        assert self._parser.head is not None
        return self._parser.head

    async def read(self) -> bytes:
        while True:
            if self._parts:
                body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._size = 0
                if self._is_held and not self._is_lost:
                    self._is_held = False
                    self._transport.resume_reading()
                return body
            self._look()
            if self._parser.is_over:
                return b""
            await self._wait()

    @property
    def may_be_kept(self) -> bool:
        parser = self._parser
        return parser.is_over and parser.keeps and not (self._parts or self._is_lost)

    def let_rest(self) -> None:
        """The answer is over."""
        self._parser, self._is_resting = AnswerParser(), True
        self._rests_since_s = self._loop.time()

    def is_fresh(self, now_s: float) -> bool:
        """Whether it can be used again."""
        is_closed = self._is_lost or self._transport.is_closing()
        return not is_closed and now_s - self._rests_since_s < KEEPALIVE_S

    def give_up(self, since_s: float) -> None:
        """Nothing more is expected, if it was asked before and something could come."""
        may_come = not (self._is_resting or self._is_held or self._parser.is_over)
        if may_come and self._asked_s <= since_s:
            self._fail(Broken("it has gone silent, and does not answer for its health"))

    def abort(self) -> None:
        if self in self._line.open:  # Else it was not made yet, or has ended.
            self._transport.abort()

    def _fail(self, why: Exception) -> None:
        self._why = why
        self._transport.abort()
        self._wake()

    def _look(self) -> None:
        if self._why is not None:
            raise Broken(str(self._why) or type(self._why).__name__) from self._why

    async def _wait(self) -> None:
        """For anything that the loop tells."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@lru_cache(maxsize=1024)
def _origin_of(url: str) -> _Origin:
    parts = urlsplit(url)
    named = host_of(url) if parts.port is None else f"{host_of(url)}:{parts.port}"
    return _Origin(parts.hostname or "", port_of(parts), parts.scheme == "https", named, parts.path)
