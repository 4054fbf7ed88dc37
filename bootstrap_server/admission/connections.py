# SPDX-License-Identifier: Apache-2.0
"""Bounds that aiohttp leaves open: for clients that do not go on, and for connections.

aiohttp limits neither how many connections there are, nor how long a client takes to send the head
of its first request, nor how long it takes to read an answer. Each connection's protocol is wrapped
in one that does.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any, Final, cast

from bootstrap_server.admission.crowd import Crowd, source_of
from bootstrap_server.admission.refusals import Refusals

__all__ = [
    "FIELDS_MAX",
    "FIELD_BYTES_MAX",
    "HEAD_BYTES_MAX",
    "HEAD_DEADLINE_S",
    "HTTP_BOUNDS",
    "KEPT_MAX",
    "OPEN_MAX",
    "RANKS_KEPT_MAX",
    "READ_DEADLINE_S",
    "UNPROVED_MAX",
    "UNPROVED_OF_SOURCE_MAX",
    "ConnectionWatch",
]

#: A request's head is a few hundred bytes: one packet.
HEAD_DEADLINE_S: Final = 10.0
#: The first head of a connection, whose sender has proved nothing: a browser's has 1 or 2 kB, and
#: cookies, of which 127.0.0.1 gets those of all servers there. Parsed it takes up to five times
#: that.
HEAD_BYTES_MAX: Final = 8 << 10
#: Bounds of aiohttp for every head: how many fields there are, and how long the longest is.
FIELDS_MAX: Final = 32
FIELD_BYTES_MAX: Final = 4 << 10
#: For aiohttp's servers. What a stranger has packed is not unpacked: neither to refuse it nor to
#: skip it.
HTTP_BOUNDS: Final[dict[str, Any]] = {
    "auto_decompress": False,
    "max_headers": FIELDS_MAX,
    "max_field_size": FIELD_BYTES_MAX,
    "max_line_size": FIELD_BYTES_MAX,
}
#: With more connections than this, none is kept open for another request: each costs about 10 kB,
#: and opening one again costs less than a tenth of a millisecond.
KEPT_MAX: Final = 1024
#: Except the connections over which ranks renew their leases: when such a connection closes, its
#: rank has probably died. Or a quarter of the process's descriptors, if that is less.
RANKS_KEPT_MAX: Final = 4096
#: Connections in all, or three quarters of the process's descriptors if that is less: SGLang's HTTP
#: server is in the same process.
OPEN_MAX: Final = 16_384
#: Connections over which nothing was proved yet (without a secret: no whole request has come), in
#: all and of one address; or a half and three eighths of the descriptors. 4,096 ranks may begin at
#: once, and from one address, as behind a translation of addresses.
UNPROVED_MAX: Final = 8192
UNPROVED_OF_SOURCE_MAX: Final = 6144
#: The longest answer is some MB, and most of it fits into socket buffers.
READ_DEADLINE_S: Final = 20.0

_REFUSED: Final = (
    "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    "Content-Length: {length}\r\nConnection: close\r\n\r\n{sentence}"
)
_HEAD_END: Final = b"\r\n\r\n"


class ConnectionWatch:
    """Makes watched protocols; is told of every request whose head has come (`heard`), and of those
    that are to be served (`proved`)."""

    def __init__(self, on_closed: Callable[[asyncio.BaseTransport], None] | None = None) -> None:
        """`on_closed` hears of each connection of a rank (`keep`) that has ended."""
        self._on_closed = on_closed
        #: Connections over which ranks hold their leases.
        self._ranks: set[asyncio.BaseTransport] = set()
        #: Connections that have not sent a whole head yet, and when they came; oldest first.
        self._silent: dict[asyncio.BaseTransport, float] = {}
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._unproved: Crowd[asyncio.BaseTransport] = Crowd(
            min(UNPROVED_MAX, descriptors // 2), min(UNPROVED_OF_SOURCE_MAX, descriptors * 3 // 8)
        )
        self._open, self._open_max = 0, min(OPEN_MAX, descriptors * 3 // 4)
        self._ranks_max = min(RANKS_KEPT_MAX, descriptors // 4)
        self._refusals = Refusals("connection")

    @property
    def open(self) -> int:
        """Connections that are open."""
        return self._open

    def keep(self, transport: asyncio.BaseTransport | None) -> bool:
        """A rank holds its lease over `transport`: whether that is kept open however many others
        there are, and its end told."""
        if transport is None or transport.is_closing():
            return False
        if transport not in self._ranks and len(self._ranks) >= self._ranks_max:
            return False
        self._ranks.add(transport)
        return True

    def closes(self, transport: asyncio.BaseTransport | None) -> bool:
        """Whether the connection should be closed after its answer."""
        return self._open > KEPT_MAX and transport not in self._ranks

    def factory(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """A protocol factory for `loop.create_server` around another one."""
        return lambda: _Watched(inner(), self)

    def heard(self, transport: asyncio.BaseTransport | None) -> None:
        """The head of a request has come on `transport`."""
        if transport is not None:
            self._silent.pop(transport, None)

    def proved(self, transport: asyncio.BaseTransport | None) -> None:
        """A request on `transport` is to be served: it makes room for nobody any more."""
        if transport is not None:
            self._unproved.leave(transport)

    def opened(self, transport: asyncio.Transport) -> None:
        """A client has connected."""
        self._open += 1
        self._silent[transport] = asyncio.get_running_loop().time()
        peer = transport.get_extra_info("peername")
        self._unproved.enter(transport, source_of(peer[0]) if peer else "")
        while (surplus := self._unproved.surplus()) is not None:
            self._drop(surplus)
        if self._open > self._open_max:
            oldest = self._unproved.first_to_go()
            assert oldest is not None  # one has just come
            self._drop(oldest)

    def closed(self, transport: asyncio.Transport) -> None:
        """The connection is gone."""
        self._open -= 1
        self.heard(transport)
        self.proved(transport)
        if transport in self._ranks:
            self._ranks.remove(transport)
            if self._on_closed is not None:
                self._on_closed(transport)

    def _drop(self, transport: asyncio.BaseTransport) -> None:
        self.heard(transport)
        self._unproved.leave(transport)
        peer = transport.get_extra_info("peername")
        why = f"the bootstrap server has too many unauthenticated connections ({self._open})"
        self._refusals.note(peer[0] if peer else "a client that has disconnected", why)
        cast(asyncio.Transport, transport).abort()

    def too_long(self, transport: asyncio.Transport) -> None:
        """The first head on `transport` is longer than `HEAD_BYTES_MAX`."""
        self.heard(transport)
        sentence = f"the head of the request is longer than {HEAD_BYTES_MAX} bytes"
        peer = transport.get_extra_info("peername")
        self._refusals.note(peer[0] if peer else "a client that has disconnected", sentence)
        _turn_away(transport, "431 Request Header Fields Too Large", sentence)

    def stuck(self, transport: asyncio.Transport) -> asyncio.TimerHandle:
        """An answer waits for `transport`'s client to read; cancel the timer when it goes on."""
        return asyncio.get_running_loop().call_later(READ_DEADLINE_S, transport.abort)

    def sweep(self) -> None:
        """Turn away who has been connected for too long without asking; to be called regularly."""
        late_s = asyncio.get_running_loop().time() - HEAD_DEADLINE_S
        while self._silent:
            transport, opened_s = next(iter(self._silent.items()))
            if opened_s > late_s:
                return
            del self._silent[transport]
            sentence = f"no complete request has arrived within {HEAD_DEADLINE_S:g} s"
            _turn_away(cast(asyncio.Transport, transport), "408 Request Timeout", sentence)


def _turn_away(transport: asyncio.Transport, status: str, sentence: str) -> None:
    text = _REFUSED.format(status=status, length=len(sentence), sentence=sentence)
    transport.write(text.encode("ascii"))
    transport.close()


class _FirstHead:
    """Counts the bytes of a connection's first head."""

    __slots__ = ("_last", "_left", "is_whole")

    def __init__(self) -> None:
        self._left, self._last = HEAD_BYTES_MAX, b""
        self.is_whole = False

    def takes(self, data: bytes) -> bool:
        """Whether the head is not too long with `data`, in which it may end."""
        begun = self._last + data[: self._left]
        self.is_whole = _HEAD_END in begun
        self._left -= len(data)
        # Its end may come in two packets.
        self._last = begun[1 - len(_HEAD_END) :]
        return self.is_whole or self._left >= 0


class _Watched(asyncio.Protocol):
    """Passes everything on to the protocol of aiohttp."""

    __slots__ = ("_head", "_inner", "_stuck", "_transport", "_watch")

    def __init__(self, inner: asyncio.Protocol, watch: ConnectionWatch) -> None:
        self._inner = inner
        self._watch = watch
        self._transport: asyncio.Transport | None = None
        self._stuck: asyncio.TimerHandle | None = None
        #: None once it has come.
        self._head: _FirstHead | None = _FirstHead()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the class.
        self._transport = cast(asyncio.Transport, transport)
        self._watch.opened(self._transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        self._watch.closed(self._transport)
        self._writing_goes_on()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            if not self._head.takes(data):
                assert self._transport is not None
                self._watch.too_long(self._transport)
                return
            if self._head.is_whole:
                self._head = None
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._stuck = self._watch.stuck(self._transport)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._writing_goes_on()
        self._inner.resume_writing()

    def _writing_goes_on(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
