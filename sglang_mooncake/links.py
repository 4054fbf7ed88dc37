# SPDX-License-Identifier: Apache-2.0
"""The links of a decode rank to prefill ranks: the one place that knows which of them stand.

A link is opened when a room first needs it, and stays for all later rooms. One that breaks, or
cannot be opened, is forgotten at once: the next room that needs it opens it afresh. What happens to
links reaches the rooms as events, in order, and by no other way.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import zmq

import te
from bootstrap_server import Rank
from sglang_mooncake import messages
from sglang_mooncake.context import Deadlines
from sglang_mooncake.messages import (
    Hello,
    HelloReply,
    LinkReset,
    Message,
    MessageError,
    RoomComputed,
    RoomFailed,
)
from sglang_mooncake.rooms.decode_events import (
    LinkDown,
    LinkRefused,
    LinkUp,
    PeerComputed,
    PeerFailed,
)

__all__ = [
    "LinkEvent",
    "LinkKey",
    "Links",
    "PortsTaken",
    "Readers",
    "open_dealer",
    "open_router",
]

logger = logging.getLogger(__name__)

LinkEvent = LinkUp | LinkDown | LinkRefused | PeerComputed | PeerFailed

#: Control messages that wait for one peer; beyond it the peer counts as unreachable.
_QUEUE_MESSAGES_MAX = 10_000
#: zmq takes milliseconds as a C int: 24 days, which is "never" for a heartbeat.
_ZMQ_MS_MAX = 2**31 - 1
_srand = ctypes.PyDLL(None).srand
_srand.argtypes = (ctypes.c_uint,)
_srand.restype = None
#: A rank that has refused us is still told which rooms it need not wait for.
_FAREWELL_MS = 1_000


class PortsTaken(RuntimeError):
    """None of the ports that a rank may listen on is free."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    """One life of one prefill rank; `address` is that of its instance's registry."""

    address: str
    rank: Rank

    def __str__(self) -> str:
        return f"prefill rank ({self.rank.coords}) at {self.rank.host}:{self.rank.port}"


class Readers(Protocol):
    """What `ControlLoop` has for those who use sockets."""

    zmq_context: zmq.Context[zmq.Socket[bytes]]

    def add_reader(self, socket: zmq.Socket[bytes], readable: Callable[[], None]) -> None: ...
    def remove_reader(self, socket: zmq.Socket[bytes]) -> None: ...


@dataclass(slots=True, eq=False)
class _Link:
    """One connection; a key may have another one later."""

    key: LinkKey
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    opened_s: float
    #: The engine of the prefill rank; None until its hello is answered.
    engine: te.Identity | None = None


class Links:
    """For the loop thread alone; no call waits.

    Args:
        readers: the loop that calls back when a socket can be read.
        hello: what to say first on each link.
        timeout_s: how long a prefill rank may take to answer it.
        report: takes the events. It may come back to `send` and `open` before it returns.
        forget_instance: the instance of a rank, by its registry's address, may have been started
            elsewhere: it must be looked up afresh.
    """

    def __init__(
        self,
        readers: Readers,
        hello: Callable[[], Hello],
        deadlines: Deadlines,
        timeout_s: float,
        report: Callable[[LinkEvent], None],
        forget_instance: Callable[[str], None],
    ) -> None:
        self._readers, self._hello = readers, hello
        self._deadlines, self._timeout_s = deadlines, timeout_s
        self._report, self._forget_instance = report, forget_instance
        self._links: dict[LinkKey, _Link] = {}

    def __len__(self) -> int:
        return len(self._links)

    def open(self, key: LinkKey) -> None:
        """Sees to it that the link stands. `LinkUp` or `LinkDown` follows in any case, at once when
        it stands already or cannot be opened."""
        known = self._links.get(key)
        if known is not None:
            if known.engine is not None:
                self._report(LinkUp(key))
            return
        try:
            hello = messages.encode(self._hello())
            dealer, monitor = open_dealer(
                self._readers.zmq_context,
                key.rank.host,
                key.rank.port,
                self._deadlines.heartbeat_s,
                self._deadlines.heartbeat_failures_max,
                messages.MESSAGE_BYTES_MAX,
            )
        except (zmq.ZMQError, OSError, ValueError, te.Error) as error:
            reason = f"cannot open a link to {key}: {error}"
            logger.error("%s", reason)
            self._report(LinkDown(key, reason))
            return
        link = self._links[key] = _Link(key, dealer, monitor, time.monotonic())
        self._readers.add_reader(dealer, partial(self._read, link))
        self._readers.add_reader(monitor, partial(self._lost, link))
        self._send(link, hello)

    def engine(self, key: LinkKey) -> te.Identity:
        """The engine that writes for the prefill rank; LookupError when the link does not stand."""
        link = self._links.get(key)
        if link is None or link.engine is None:
            raise LookupError(f"there is no link to {key}")
        return link.engine

    def send(self, key: LinkKey, message: Message) -> None:
        """Says nothing over a link that is gone: its rooms have been told, or are about to be."""
        link = self._links.get(key)
        if link is not None:
            self._send(link, messages.encode(message))

    def tick(self, now_s: float) -> None:
        """Gives up links whose hello is not answered."""
        for link in list(self._links.values()):
            if link.engine is None and now_s - link.opened_s >= self._timeout_s:
                self._drop(
                    link,
                    f"{link.key} did not answer the hello within {self._timeout_s:g} s"
                    " (SGLANG_MOONCAKE_LINK_TIMEOUT_S)",
                    forget_instance=True,
                )

    def close(self) -> None:
        """Closes all sockets, when nobody reads them any more."""
        for link in self._links.values():
            _close_sockets(link)
        self._links.clear()

    def _send(self, link: _Link, frame: bytes) -> None:
        try:
            link.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._drop(link, f"{link.key} takes no messages in", forget_instance=True)
        except zmq.ZMQError as error:
            self._drop(link, f"cannot write to {link.key}: {error}", forget_instance=True)

    def _stands(self, link: _Link) -> bool:
        return self._links.get(link.key) is link

    def _read(self, link: _Link) -> None:
        while self._stands(link):
            try:
                message = messages.decode(link.dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except MessageError as error:
                self._drop(link, f"{link.key}: {error}", forget_instance=True)
                return
            self._take(link, message)

    def _take(self, link: _Link, message: Message) -> None:
        key = link.key
        match message:
            case HelloReply(None, engine_id, engine_epoch):
                link.engine = te.Identity(engine_id, engine_epoch)
                self._report(LinkUp(key))
            case HelloReply(refused=reason):
                # It can be told until the link is closed; see `_FAREWELL_MS`.
                self._report(LinkRefused(key, f"{key} refused: {reason}"))
                self._close(link)
            case LinkReset(reason):
                self._drop(link, f"{key}: {reason}", forget_instance=False)
            case RoomComputed():
                self._report(PeerComputed(key, message))
            case RoomFailed():
                self._report(PeerFailed(key, message))
            case _:
                logger.warning("%s sent a %s", key, type(message).__name__)

    def _lost(self, link: _Link) -> None:
        self._drop(link, f"lost the connection to {link.key}", forget_instance=True)

    def _drop(self, link: _Link, reason: str, forget_instance: bool) -> None:
        """The next room opens it again, after a fresh look at the registry when the rank may have
        been restarted elsewhere."""
        if not self._stands(link):
            return  # a late word of a link that has been replaced
        logger.warning("%s", reason)
        self._close(link)
        if forget_instance:
            self._forget_instance(link.key.address)
        self._report(LinkDown(link.key, reason))

    def _close(self, link: _Link) -> None:
        if not self._stands(link):
            return
        del self._links[link.key]
        self._readers.remove_reader(link.dealer)
        self._readers.remove_reader(link.monitor)
        _close_sockets(link)


def open_router(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    message_bytes_max: int,
    ports: tuple[int, int] | None = None,
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER socket and its port; peers connect with `open_dealer`. It gives each of them a
    name; one that asks for the name of another is not heard.

    Args:
        ports: the first and the last of those of which a free one is taken (default: of all).

    Raises:
        zmq.ZMQError: the address cannot be bound.
        PortsTaken: none of `ports` is free.
    """
    # A ROUTER numbers its peers from rand(), which is the same in each process unless it is seeded.
    # libzmq 4.3.5 aborts the process when it gives out a number that a peer has claimed before, so
    # nobody must be able to guess the next one. No option of the socket refuses such claims.
    _srand(secrets.randbits(32))
    socket = context.socket(zmq.ROUTER)
    _bound(socket, host, message_bytes_max)
    # A send to a peer that is gone raises instead of vanishing.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if ports is None:
        return socket, socket.bind_to_random_port(_tcp(host))
    for port in range(ports[0], ports[1] + 1):
        try:
            socket.bind(f"{_tcp(host)}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return socket, port
    socket.close(linger=0)
    raise PortsTaken(
        f"cannot listen on {host}: none of the ports from {ports[0]} to {ports[1]} is free; give a "
        "wider range"
    )


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    port: int,
    heartbeat_s: float,
    heartbeat_failures_max: int,
    message_bytes_max: int,
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER socket to a ROUTER, and the socket that reports when its connection breaks.

    zmq's own heartbeats run in its I/O thread, so a busy interpreter on either side is not mistaken
    for a dead peer, while a frozen process is found after heartbeat_s × heartbeat_failures_max, or
    never when that is more than zmq can count.

    Raises:
        zmq.ZMQError: the process has too many sockets or open files.
    """
    socket = context.socket(zmq.DEALER)
    try:
        _bound(socket, host, message_bytes_max)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(heartbeat_s))
        socket.setsockopt(
            zmq.HEARTBEAT_TIMEOUT, _milliseconds(heartbeat_s * heartbeat_failures_max)
        )
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(f"{_tcp(host)}:{port}")
        except BaseException:
            socket.disable_monitor()
            monitor.close(linger=0)
            raise
    except BaseException:
        socket.close(linger=0)
        raise
    return socket, monitor


def _milliseconds(seconds: float) -> int:
    return int(min(seconds * 1000, _ZMQ_MS_MAX))


def _bound(socket: zmq.Socket[bytes], host: str, message_bytes_max: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)


def _tcp(host: str) -> str:
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def _close_sockets(link: _Link) -> None:
    link.dealer.disable_monitor()
    link.monitor.close(linger=0)
    link.dealer.close(linger=_FAREWELL_MS)
