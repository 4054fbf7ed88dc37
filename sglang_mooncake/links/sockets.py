# SPDX-License-Identifier: Apache-2.0
"""The sockets of control links: a ROUTER on each prefill rank, to which each decode rank connects a
DEALER."""

from __future__ import annotations

import errno
import socket as sockets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from bootstrap_server.admission.routing_ids import ignore_claimed_ids
from sglang_mooncake.context import Deadlines

__all__ = [
    "HANDSHAKE_FAILED",
    "QUEUE_MESSAGES_MAX",
    "CurvePair",
    "PortsTaken",
    "Readers",
    "numeric_address",
    "open_dealer",
    "open_router",
]

#: Control messages that wait for one peer; beyond it the peer counts as unreachable.
QUEUE_MESSAGES_MAX = 10_000
#: A connection that could not be made safe; `EVENT_DISCONNECTED` follows.
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: zmq ends a connection that is silent for so many times what `silence.Silence` waits: the latter
#: looks at those of links alone.
_ABANDONED = 10
#: zmq takes milliseconds as a C int: 24 days, which is "never" for a heartbeat.
_ZMQ_MS_MAX = 2**31 - 1
#: How long a connection may take to prove itself; zmq's own value is 30 s.
_HANDSHAKE_MS_MAX = 10_000
#: Connections that libzmq has yet to accept. Who finds no place comes again after 1 s, 3 s, 7 s.
_BACKLOG = 1_024
#: Names the gatekeeper's question; without a domain libzmq asks nobody and lets everybody in.
_ZAP_DOMAIN = b"sglang-mooncake"
_DEADLINES = Deadlines()


class PortsTaken(RuntimeError):
    """None of the ports that a rank may listen on is free."""


@dataclass(frozen=True, slots=True)
class CurvePair:
    """A key pair of Curve25519 for CURVE (RFC 26), both in Z85 (RFC 32)."""

    public: bytes
    secret: bytes = field(repr=False)


class Readers(Protocol):
    """What `ControlLoop` has for those who use sockets."""

    zmq_context: zmq.Context[zmq.Socket[bytes]]

    def add_reader(self, socket: zmq.Socket[bytes], readable: Callable[[], None]) -> None: ...
    def remove_reader(self, socket: zmq.Socket[bytes]) -> None: ...


def numeric_address(host: str) -> str:
    """The first address of a host that may be given by its name. Waits for the resolver, as long as
    that likes: for the start of a rank alone, which tells its peers nothing but this.

    Raises:
        ValueError: the name has no address; the sentence says why.
    """
    try:
        found = sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the host {host!r}, under which other hosts are to reach this rank, has no address: "
            f"{error}"
        ) from error
    return str(found[0][4][0])


def _is_numeric(host: str) -> bool:
    try:
        sockets.getaddrinfo(host, None, flags=sockets.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def open_router(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    message_bytes_max: int,
    ports: tuple[int, int] | None = None,
    pair: CurvePair | None = None,
    deadlines: Deadlines = _DEADLINES,
) -> tuple[zmq.Socket[bytes], int]:
    """A bound ROUTER socket and its port; peers connect with `open_dealer`. It gives each of them a
    routing id, whatever id the peer claims. A message to a peer has one frame behind that.

    Args:
        ports: the first and the last of those of which a free one is taken (default: of all).
        pair: let in only whom `curve.Gatekeeper` lets in, encrypted; None: everybody, in plain.
        deadlines: a peer that shows no sign of life for so long is gone: a send to it raises.

    Raises:
        zmq.ZMQError: the address cannot be bound.
        PortsTaken: none of `ports` is free.
    """
    socket = context.socket(zmq.ROUTER)
    _bound(socket, host, message_bytes_max, deadlines)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS_MAX)
    socket.setsockopt(zmq.BACKLOG, _BACKLOG)
    if pair is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else: no gatekeeper, everybody comes in
    # A send to a peer that is gone raises instead of vanishing.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        port = _bind(socket, host, ports)
    except BaseException:
        socket.close(linger=0)
        raise
    ignore_claimed_ids(socket)
    return socket, port


def _bind(socket: zmq.Socket[bytes], host: str, ports: tuple[int, int] | None) -> int:
    if ports is None:
        return socket.bind_to_random_port(_tcp(host))
    for port in range(ports[0], ports[1] + 1):
        try:
            socket.bind(f"{_tcp(host)}:{port}")
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return port
    raise PortsTaken(
        f"cannot listen on {host}: none of the ports from {ports[0]} to {ports[1]} is free; give a "
        "wider range"
    )


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    host: str,
    port: int,
    deadlines: Deadlines,
    message_bytes_max: int,
    pair: CurvePair | None = None,
    router_key: bytes = b"",
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER socket to a ROUTER, and the socket that reports when its connection breaks or is
    refused, when nobody listens, and when it is made. With a `pair` it is encrypted, to the ROUTER
    whose public key is `router_key`.

    zmq's own heartbeats run in its I/O thread, so a busy interpreter on either side is not mistaken
    for a dead peer; `silence.Silence` finds a frozen process by them.

    Raises:
        zmq.ZMQError: the process has too many sockets or open files.
        ValueError: `host` is a name. libzmq would look it up in its one thread, and all links of
            the process would wait for a resolver that does not answer.
    """
    if not _is_numeric(host):
        raise ValueError(
            f"its record in the registry has the host {host!r}, which is no numeric address; "
            "prefill ranks of this release register nothing else"
        )
    socket = context.socket(zmq.DEALER)
    try:
        _bound(socket, host, message_bytes_max, deadlines)
        if pair is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, router_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_DISCONNECTED
            | HANDSHAKE_FAILED
        )
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


def _bound(
    socket: zmq.Socket[bytes], host: str, message_bytes_max: int, deadlines: Deadlines
) -> None:
    abandoned_s = _ABANDONED * deadlines.heartbeat_s * deadlines.heartbeat_failures_max
    socket.setsockopt(zmq.HEARTBEAT_IVL, _milliseconds(deadlines.heartbeat_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _milliseconds(abandoned_s))
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)


def _tcp(host: str) -> str:
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
