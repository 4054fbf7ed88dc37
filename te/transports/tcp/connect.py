# SPDX-License-Identifier: Apache-2.0
"""Opening a connection to an engine and exchanging greetings; blocking, with one deadline."""

from __future__ import annotations

import contextlib
import socket
import time

from te.errors import ConnectError, HandshakeError, ProtocolViolation, VersionError
from te.handshake import (
    PROTOCOL_VERSION,
    Card,
    Hello,
    Refusal,
    Refuse,
    Welcome,
    decode_body,
    encode,
    version_mismatch,
)
from te.transports.tcp.wire import Greeting, GreetingKind, GreetingReader, encode_greeting

__all__ = ["address_text", "open_connection", "tune"]

# An idle connection to a vanished host is given up after about 5 + 3 x 2 seconds.
KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_PROBES = 3


def address_text(host: str, port: int) -> str:
    """``host:port``, with brackets where the host has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock: socket.socket) -> None:
    """Options for every connection, both sides; tcp(7), socket(7)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def open_connection(card: Card, engine_id: str, epoch: int, timeout_s: float) -> socket.socket:
    """A welcomed, non-blocking connection to the card's engine.

    Raises ``te.ConnectError`` (with address and cause), ``te.VersionError``,
    ``te.HandshakeError``.
    """
    where = address_text(card.host, card.port)
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as undo:
        try:
            sock = socket.create_connection((card.host, card.port), timeout_s)
            undo.callback(sock.close)
            tune(sock)
            hello = Hello(id=engine_id, epoch=epoch, peer_id=card.id, peer_epoch=card.epoch)
            sock.sendall(encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, encode(hello)))
            greeting = _read_greeting(sock, deadline_s)
        except TimeoutError:
            raise ConnectError(
                f"no welcome from the engine {card.id} at {where} within {timeout_s} s"
            ) from None
        except OSError as exc:
            cause = exc.strerror or str(exc)
            raise ConnectError(
                f"cannot connect to the engine {card.id} at {where}: {cause}"
            ) from exc
        except ProtocolViolation as exc:
            raise HandshakeError(f"{where}: {exc}") from None
        _check_greeting(greeting, card, where)
        sock.setblocking(False)
        undo.pop_all()
        return sock


def _read_greeting(sock: socket.socket, deadline_s: float) -> Greeting:
    reader = GreetingReader()
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        nbytes = sock.recv_into(reader.room())
        if not nbytes:
            raise ConnectionResetError("the other side closed the connection instead of a welcome")
        greeting = reader.filled(nbytes)
        if greeting is not None:
            return greeting


def _check_greeting(greeting: Greeting, card: Card, where: str) -> None:
    if greeting.version != PROTOCOL_VERSION:
        raise VersionError(version_mismatch(f"the engine at {where}", greeting.version))
    if greeting.kind == GreetingKind.REFUSE:
        refuse = decode_body(greeting.body, Refuse)
        error = VersionError if refuse.code is Refusal.VERSION else ConnectError
        raise error(f"{where} refused the connection: {refuse.reason}")
    if greeting.kind != GreetingKind.WELCOME:
        raise HandshakeError(f"{where} answered with a greeting of kind {greeting.kind}")
    welcome = decode_body(greeting.body, Welcome)
    if (welcome.id, welcome.epoch) != (card.id, card.epoch):
        raise ConnectError(
            f"{where} is the engine {welcome.id}, not {card.id} of the card: it was restarted or"
            " another one took its port; get its new card"
        )
