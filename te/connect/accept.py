# SPDX-License-Identifier: Apache-2.0
"""The destination's side: a thread that accepts and greets, and hands connections to the plane."""

from __future__ import annotations

import errno
import functools
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from te.config import Config
from te.connect.admission import Admission, HalfOpen, source_of
from te.connect.dial import address_text
from te.connect.incoming import Incoming
from te.connect.links import Described, Links
from te.connect.loop import READABLE, IoLoop
from te.connect.throttle import Throttle
from te.connect.transports import EngineTransports
from te.errors import ListenError
from te.reasons import Reason, sentence
from te.stats import LinkStats, outcomes_of
from te.transports.base import (
    IncomingLink,
    Join,
    LinkKey,
    Listener,
    Local,
    Transport,
    TransportRefused,
    plain_rails,
)

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
# In a row: a flood of connections must not keep those from being read that are there.
ACCEPTS_PER_TURN = 64
# After accept(2) failed for want of descriptors or memory, and nothing could be closed for it.
ACCEPT_PAUSE_S = 1.0
# Connections that wait for work on other threads: those are fewer.
WAITING_MAX = 256


class Acceptor:
    """The listening sockets of an engine, and its incoming links."""

    def __init__(self, name: str, local: Local, transports: EngineTransports) -> None:
        """Listens and starts the thread; ``te.ListenError`` when it cannot. An engine that does
        not listen has the thread only where a transport has something for it to watch."""
        self.local = local
        self.transports = transports
        self._lock = threading.Lock()
        #: Under the lock.
        self._links = Links()
        self._greeting: set[Incoming] = set()
        self._admission = Admission()
        self._half_open: dict[HalfOpen, Incoming] = {}
        self._throttle = Throttle()
        #: Links that this engine has opened, by the plane's number; those that nobody has any more
        #: go by themselves.
        self.outgoing: weakref.WeakValueDictionary[int, Described] = weakref.WeakValueDictionary()
        #: Each with the transport that it belongs to; None: the engine's own.
        self._listeners: list[tuple[Listener, Transport | None]] = []
        #: Numeric host and port this engine listens on; port 0 if it does not.
        self.address: tuple[str, int] = (local.config.host, 0)
        if local.config.listens:
            listener = _listen(local.config)
            self.address = listener.getsockname()[:2]
            self._listeners.append((Listener(listener, _describe), None))
        self.loop = IoLoop(name, self._on_tick, self._on_end)
        watch = functools.partial(_watch, self.loop)
        for transport, listeners in transports.start(local, watch).items():
            self._listeners += [(one, transport) for one in listeners]
        for one, owner in self._listeners:
            on_ready = functools.partial(self._on_ready, one, owner)
            self.loop.watch(one.sock.fileno(), READABLE, on_ready)
        self.loop.watch(local.plane.events_fd, READABLE, self._on_events)
        if self._listeners or self.loop.is_wanted:
            self.loop.start()

    def look(self) -> None:
        """By who connects: where no thread hears what becomes of links, this one does. Any
        thread."""
        if not self.loop.has_begun:
            self._on_events(READABLE)

    def link_stats(self) -> list[LinkStats]:
        """The links that other engines have opened, and that stand. Any thread."""
        with self._lock:
            links = [one for one in self._links if one.handle.alive]
        found = []
        for one in links:
            flows, outcomes, unfinished = one.handle.tally()
            found.append(
                LinkStats(
                    peer=one.key.engine_id,
                    address=one.where,
                    is_incoming=True,
                    transport=one.transport.name,
                    transport_reason="",
                    encrypted_by=one.encrypted_by,
                    bytes_per_s_max=0.0,
                    rails=plain_rails(flows, (), one.handle.rails),
                    transfers_unfinished=unfinished,
                    outcomes=outcomes_of(outcomes),
                    last_error="",
                )
            )
        return found

    def log(self, level: int, message: str, *values: object) -> None:
        """A line about a stranger, unless there were too many of late. Loop's thread only."""
        if logger.isEnabledFor(level) and self._throttle.admits(time.monotonic()):
            logger.log(level, message + "%s", *values, self._throttle.more())

    def called(self, half_open: HalfOpen) -> None:
        """A connection has called, and was challenged. Loop's thread only."""
        self._admission.renew(half_open)

    def introduced(self, half_open: HalfOpen) -> None:
        """A connection's hello is whole, or it was closed. Loop's thread only."""
        self._admission.leave(half_open)
        self._half_open.pop(half_open, None)

    def forget(self, incoming: Incoming) -> None:
        """A connection was closed or handed over. Loop's thread only."""
        self._greeting.discard(incoming)

    def limit(self, source: str) -> str | None:
        """Why no more connections of that source become rails; None if they may. A quarter of all
        is for others than the source that has the most. Loop's thread only."""
        limit = self.local.config.max_connections
        if self.local.plane.connections()[1] >= limit:
            return f"{limit} connections are open already"
        of_source = limit - limit // 4
        with self._lock:
            links = [one for one in self._links if one.source == source]
        if sum(one.handle.rails for one in links) >= of_source:
            return f"{of_source} connections of {source} are open already"
        return None

    def link(self, key: LinkKey) -> IncomingLink | None:
        """The open one. Loop's thread only."""
        with self._lock:
            return self._links.get(key)

    def link_of(self, session: bytes) -> IncomingLink | None:
        """The open one whose session key has that identifier. Loop's thread only."""
        with self._lock:
            return self._links.of_session(session)

    def misfit(self, link: IncomingLink) -> str | None:
        """Why a connection cannot be one more of the link; None if it can."""
        most = min(self.local.config.rails, link.transport.capabilities.connections_max)
        rails = link.handle.rails
        return None if rails < most else f"{rails} rails are open already"

    def joined(self, sock: socket.socket, join: Join, link: IncomingLink) -> str | None:
        """Takes a connection that was welcomed into its link; or why that cannot be (then nothing
        was taken). Loop's thread only."""
        try:
            added = join.add(link)
        except OSError as exc:
            link.handle.die(Reason.PEER_CLOSED)
            return exc.strerror
        if not added:
            return "the link has ended"
        sock.detach()
        with self._lock:
            if len(self._links) > 2 * self.local.config.max_connections:
                # The plane tells of each that ends, but loses what is not listened to.
                self._links.forget_dead()
            self._links.add(link)
        return None

    def check_waiting(self) -> None:
        """``TransportRefused`` if too many connections wait for work. Loop's thread only."""
        waiting = len(self._greeting) - len(self._admission)
        if waiting > WAITING_MAX:
            raise TransportRefused(
                f"{waiting} connections are waiting to be accepted by this engine, which is the "
                "limit"
            )

    # -- loop's thread

    def _on_ready(self, listener: Listener, owner: Transport | None, _events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = listener.sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # The connection ended while it waited in the backlog; accept(2).
            except OSError as exc:
                if self._give_up_one(str(exc)):
                    continue
                self.log(logging.WARNING, "cannot accept connections, pausing: %s", exc.strerror)
                self.loop.pause(listener.sock.fileno(), ACCEPT_PAUSE_S)
                return
            try:
                self._admit(sock, address, listener, owner)
            except Exception:
                sock.close()
                raise

    def _admit(
        self, sock: socket.socket, address: Any, listener: Listener, owner: Transport | None
    ) -> None:
        sock.setblocking(False)
        where, source = listener.describe(sock, address)
        timeout_s = self.local.config.connect_timeout_s
        half_open = self._admission.enter(source, time.monotonic(), timeout_s)
        incoming = Incoming(self, sock, where, owner, listener.takes_descriptor, half_open)
        self._half_open[half_open] = incoming
        self._greeting.add(incoming)
        self.loop.watch(sock.fileno(), READABLE, incoming.on_ready)
        while (surplus := self._admission.surplus(time.monotonic())) is not None:
            self._give_up(surplus, "too many connections have sent no greeting")

    def _give_up(self, half_open: HalfOpen, reason: str) -> None:
        """Closes a connection for others, unless it has said something by now."""
        incoming, had_spoken = self._half_open[half_open], half_open.has_spoken
        incoming.on_ready(READABLE)
        if half_open in self._half_open and half_open.has_spoken == had_spoken:
            incoming.close(reason)

    def _give_up_one(self, reason: str) -> bool:
        """After accept(2) failed for that reason; whether there is one connection less."""
        before = len(self._admission)
        sacrifice = self._admission.sacrifice(time.monotonic())
        if sacrifice is not None:
            self._give_up(sacrifice, reason)
        return len(self._admission) < before

    def _on_tick(self, now_s: float) -> float | None:
        times = [incoming.check_deadline(now_s) for incoming in tuple(self._greeting)]
        return min(times, default=None)

    def _on_events(self, _events: int) -> None:
        """Each is told once, so that what goes wrong with one must not cost the others."""
        for number, has_ended, *why in self.local.plane.events():
            self.loop.guard("an event of a link", self.transports.on_event, number)
            if has_ended:
                self.loop.guard("the end of a link", self._on_link_end, number, *why)

    def _on_link_end(self, number: int, code: int, errnum: int, text: str) -> None:
        with self._lock:
            link = self._links.take(number)
        peer = self.outgoing.pop(number, None)
        if peer is not None:
            reason = peer.describe(code, errnum, text)
        else:
            # A link of this engine whose Peer nobody has any more, or one that peers opened.
            who = f"{link.where} ({link.key.engine_id})" if link else "a former peer"
            reason = sentence(who, code, errnum, text, self.local.config.stall_timeout_s)
        level = logging.WARNING if code == Reason.VIOLATED else logging.INFO
        logger.log(level, "a link ended: %s", reason)

    def _on_end(self, reason: str) -> None:
        for listener, _ in self._listeners:
            listener.sock.close()
        for incoming in tuple(self._greeting):
            incoming.close(reason)


def _watch(loop: IoLoop, fd: int, handler: Callable[[int], None]) -> None:
    """``Watch`` for transports. This acceptor keeps them alive, so they must not keep it."""
    loop.call(lambda: loop.watch(fd, READABLE, handler))


def _describe(_sock: socket.socket, address: Any) -> tuple[str, str]:
    """``Listener.describe`` of TCP connections."""
    return address_text(address[0], address[1]), source_of(address[0])


def _listen(config: Config) -> socket.socket:
    """On the first free port of those that are configured; ``te.ListenError``."""
    if config.port_last is None:
        return _listen_at(config, config.port)
    for port in range(config.port, config.port_last + 1):
        try:
            return _listen_at(config, port)
        except ListenError as exc:
            if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno != errno.EADDRINUSE:
                raise
    raise ListenError(
        f"cannot listen on {config.host}: none of the ports from {config.port} to"
        f" {config.port_last} is free; give a wider range"
    )


def _listen_at(config: Config, port: int) -> socket.socket:
    host, buffer_bytes = config.host, config.socket_buffer_bytes
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
