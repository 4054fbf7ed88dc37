# SPDX-License-Identifier: Apache-2.0
"""The destination's side: one thread that accepts, and receives on every incoming connection."""

from __future__ import annotations

import logging
import socket
import time

from te.config import Config
from te.errors import ListenError
from te.handshake import PROTOCOL_VERSION, Refusal, Refuse, encode
from te.landing import LandingGate
from te.transports.base import Local
from te.transports.tcp.connect import address_text, tune
from te.transports.tcp.incoming import Incoming
from te.transports.tcp.loop import READABLE, IoLoop
from te.transports.tcp.wire import GreetingKind, encode_greeting

__all__ = ["Receiver"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 128
# After accept(2) failed for want of descriptors or memory.
ACCEPT_PAUSE_S = 1.0


class Receiver:
    """The listening socket and all incoming connections of an engine."""

    def __init__(self, name: str, local: Local) -> None:
        """Listens and starts the thread; ``te.ListenError`` when it cannot."""
        self.local = local
        self.gate = LandingGate()
        self.bytes_received = 0
        #: Where payload goes that must not land. Never read.
        self.scratch = memoryview(bytearray(256 << 10))
        self._incoming: set[Incoming] = set()
        self._paused_until_s: float | None = None
        self._listener = _listen(local.config)
        self.loop = IoLoop(name, self._on_tick, self._on_end)
        self.loop.watch(self._listener.fileno(), READABLE, self._on_ready)
        self.loop.start()

    @property
    def address(self) -> tuple[str, int]:
        """Numeric host and port this engine listens on."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def rails(self) -> int:
        """Incoming connections."""
        return len(self._incoming)

    def drop(self, engine_id: str, timeout_s: float) -> int:
        """Ends that engine's connections. Any thread; ``te.FenceTimeout``."""
        dropped = [one for one in tuple(self._incoming) if one.engine_id == engine_id]
        for one in dropped:
            one.dropped = True
        self.gate.quiesce(timeout_s)
        self.loop.call(lambda: _close_all(dropped, "the application fenced this peer"))
        return len(dropped)

    def forget(self, incoming: Incoming) -> None:
        """A connection was closed. Loop's thread only."""
        self._incoming.discard(incoming)

    def _on_ready(self, _events: int) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # It gave up while it waited in the backlog; accept(2).
            except OSError as exc:
                logger.warning("cannot accept connections, pausing: %s", exc.strerror)
                self.loop.rewatch(self._listener.fileno(), 0)
                self._paused_until_s = time.monotonic() + ACCEPT_PAUSE_S
                return
            self._admit(sock, address_text(peer[0], peer[1]))

    def _admit(self, sock: socket.socket, where: str) -> None:
        sock.setblocking(False)
        limit = self.local.config.max_connections
        if len(self._incoming) >= limit:
            logger.warning("%s refused: %d incoming connections are open", where, limit)
            refuse = Refuse(code=Refusal.LIMIT, reason=f"{limit} connections are open already")
            with sock:
                # A new connection's empty buffer takes it whole.
                sock.send(encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, encode(refuse)))
            return
        tune(sock)
        incoming = Incoming(self, sock, where)
        self._incoming.add(incoming)
        self.loop.watch(sock.fileno(), READABLE, incoming.on_ready)

    def _on_tick(self, now_s: float) -> float | None:
        times = []
        if self._paused_until_s is not None:
            if now_s >= self._paused_until_s:
                self._paused_until_s = None
                self.loop.rewatch(self._listener.fileno(), READABLE)
            else:
                times.append(self._paused_until_s)
        for incoming in tuple(self._incoming):
            deadline_s = incoming.check_greeting(now_s)
            if deadline_s is not None:
                times.append(deadline_s)
        return min(times, default=None)

    def _on_end(self, reason: str) -> None:
        self._listener.close()
        _close_all(list(self._incoming), reason)


def _close_all(connections: list[Incoming], reason: str) -> None:
    for connection in connections:
        connection.close(reason)


def _listen(config: Config) -> socket.socket:
    host, port, buffer_bytes = config.host, config.port, config.socket_buffer_bytes
    where = address_text(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ListenError(f"cannot listen on {where}: {exc.strerror}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it, and it must be known before listen(2) to set the window.
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ListenError(f"cannot listen on {where}: {exc.strerror}") from exc
    sock.setblocking(False)
    return sock
