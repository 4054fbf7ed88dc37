# SPDX-License-Identifier: Apache-2.0
"""Bounds on the connections of a ROUTER whose hello has come to no link yet.

libzmq accepts whoever connects, for as long as the process has descriptors, and gives him 10 s for
his handshake. When there are none left its thread runs in circles (98 % of a core, measured), and
nobody else in the process can open a file. It has no limit to set. So its connections are watched
from outside, and those that have to go are shut down: libzmq closes them as if the other side had.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import zmq

from bootstrap_server.admission.crowd import Crowd, source_of
from bootstrap_server.admission.refusals import Pace

__all__ = [
    "ALL_BYTES_MAX",
    "BYTES_MAX",
    "OF_SOURCE_MAX",
    "UNAUTHENTICATED_MAX",
    "Connection",
    "UnauthenticatedConnections",
    "bytes_received",
]

logger = logging.getLogger(__name__)

#: In all, and of one source address; fewer where the process may have few descriptors. Each takes
#: about 5 kB. Decode ranks come all at once when their server starts, maybe from one address.
UNAUTHENTICATED_MAX: Final = 8192
OF_SOURCE_MAX: Final = 6144
#: What one may send before its link stands, which takes a hello of some 10 kB; and all of them.
#: libzmq itself takes as much of each as for any message, handshake or not.
BYTES_MAX: Final = 1 << 20
ALL_BYTES_MAX: Final = 64 << 20
_EVENTS_PER_TURN: Final = 256
#: Of `zmq_socket_monitor`: which event, and its descriptor.
_EVENT: Final = struct.Struct("=hi")
#: tcpi_bytes_received of struct tcp_info, linux/tcp.h.
_BYTES_RECEIVED: Final = struct.Struct("=128xQ")
_ADDRESS_BYTES_MAX: Final = 128  # struct sockaddr_storage

# None of these can block, so they keep the interpreter lock: others would take it meanwhile for up
# to 5 ms, for each of many connections.
_libc: Final = ctypes.PyDLL(None)


class Connection(NamedTuple):
    """A connection that libzmq has accepted. Its descriptor may be another's by now."""

    fd: int
    #: struct sockaddr of the other side.
    peer: bytes


class UnauthenticatedConnections:
    """Of a router that listens on `port`. For the thread alone that reads from it."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        port: int,
        add_reader: Callable[[zmq.Socket[bytes], Callable[[], None]], object],
        what: str,
    ) -> None:
        """
        Args:
            add_reader: has its second argument called when there is something to read.
            what: what the log calls such a connection.
        """
        self._router, self._port, self._what = router, port, what
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(UNAUTHENTICATED_MAX, descriptors // 4)
        self._crowd: Crowd[int] = Crowd(most, min(OF_SOURCE_MAX, most * 3 // 4))
        self._by_fd: dict[int, Connection] = {}
        self._pace = Pace()
        address = f"inproc://unauthenticated-{id(self)}"
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        context: Any = router.context
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # No limit: at one libzmq's thread would wait for the interpreter here, and heartbeats with
        # it. There are two events for each connection.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        add_reader(self._events, self._read)

    def __len__(self) -> int:
        return len(self._crowd)

    def of(self, frame: zmq.Frame) -> Connection | None:
        """The unauthenticated connection that a frame came over; None if it came over another."""
        while self._take():  # or that it was accepted would be heard after this
            pass
        return self._by_fd.get(int(frame.get("__fd")))

    def connection(self, frame: zmq.Frame) -> Connection | None:
        """What this frame came over, authenticated or not; None if that has ended."""
        while self._take():  # as in `of`
            pass
        fd = int(frame.get("__fd"))
        peer = self._peer(fd)
        return None if peer is None else Connection(fd, peer)

    def welcome(self, one: Connection | None) -> None:
        """Its link stands: it is authenticated from now on."""
        if one is not None and self._by_fd.get(one.fd) == one:
            self._forget(one.fd)

    def tick(self) -> None:
        """Ends those that have sent too much; to be called regularly."""
        sent = {one: bytes_received(one.fd) for one in self._by_fd.values()}
        excess = sum(sent.values()) - ALL_BYTES_MAX
        for one in sorted(sent, key=sent.__getitem__, reverse=True):
            if sent[one] <= BYTES_MAX and excess <= 0:
                return
            excess -= sent[one]
            self.end(one, f"it has sent {sent[one]} bytes, and its link does not stand")

    def close(self) -> None:
        """Before the router's own."""
        self._router.disable_monitor()
        self._events.close(linger=0)

    def _read(self) -> None:
        for _ in range(_EVENTS_PER_TURN):
            if not self._take():
                return

    def _take(self) -> bool:
        """One event; False if there is none."""
        try:
            event, fd = _EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return False
        self._forget(fd)
        if event == zmq.EVENT_ACCEPTED:
            self._accepted(fd)
        return True

    def _accepted(self, fd: int) -> None:
        peer = self._peer(fd)
        if peer is None:
            return  # it has ended already
        self._by_fd[fd] = Connection(fd, peer)
        self._crowd.enter(fd, source_of(_host(peer)))
        while (surplus := self._crowd.surplus()) is not None:
            self.end(self._by_fd[surplus], f"too many {self._what} connections have no link yet")

    def end(self, one: Connection, why: str) -> None:
        """Ends a connection of the router's, authenticated or not, as if the other side had."""
        self._forget(one.fd)
        # A copy stays that connection's while we look whose it is.
        held = _libc.dup(one.fd)
        if held < 0:
            return  # it has ended
        try:
            if self._peer(held) != one.peer:
                return  # likewise, and the number is another's
            _libc.shutdown(held, socket.SHUT_RDWR)
        finally:
            _libc.close(held)
        left_out = self._pace.left_out()
        if left_out is None:
            return
        more = f" ({left_out} earlier ones were not logged)" if left_out else ""
        logger.warning(
            "ended a %s connection from %s: %s%s", self._what, _host(one.peer), why, more
        )

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._crowd.leave(fd)

    def _peer(self, fd: int) -> bytes | None:
        """The other side of a connection of the router's; None if it is something else."""
        own, other = _address(_libc.getsockname, fd), _address(_libc.getpeername, fd)
        if own is None or other is None or _port(own) != self._port:
            return None
        return other


def _address(call: Callable[..., int], fd: int) -> bytes | None:
    """By getsockname(2) or getpeername(2), of a TCP connection."""
    found = ctypes.create_string_buffer(_ADDRESS_BYTES_MAX)
    nbytes = ctypes.c_uint(_ADDRESS_BYTES_MAX)
    if call(fd, found, ctypes.byref(nbytes)):
        return None
    address = found.raw[: nbytes.value]
    return address if _family(address) in (socket.AF_INET, socket.AF_INET6) else None


def _family(address: bytes) -> int:
    return int.from_bytes(address[:2], "little") if len(address) > 2 else socket.AF_UNSPEC


def _port(address: bytes) -> int:
    return int.from_bytes(address[2:4], "big")


def _host(address: bytes) -> str:
    if _family(address) == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, address[4:8])
    return socket.inet_ntop(socket.AF_INET6, address[8:24])


def bytes_received(fd: int) -> int:
    """How much a connection has brought so far; 0 for what is no TCP connection."""
    found = ctypes.create_string_buffer(_BYTES_RECEIVED.size)
    nbytes = ctypes.c_uint(_BYTES_RECEIVED.size)
    if _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, found, ctypes.byref(nbytes)):
        return 0
    return int(_BYTES_RECEIVED.unpack(found.raw)[0])
