# SPDX-License-Identifier: Apache-2.0
"""Opening connections to an engine and exchanging greetings; blocking, with one deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from te.links.greeting import Greeting, GreetingKind, GreetingReader, encode_greeting

__all__ = ["Dialled", "TransportRefused", "address_text", "blame", "greet", "insist", "tune"]

# An idle connection to a vanished host is given up after about 5 + 3 x 2 seconds.
KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_PROBES = 3
DIALS_MAX = 4
DIAL_PAUSE_S = 0.05


@dataclass(frozen=True)
class Dialled:
    """A welcomed, non-blocking connection."""

    sock: socket.socket
    welcome: Welcome
    #: Same host only: memory file of the rail.
    rings_fd: int = -1

    def close(self) -> None:
        """Of one that is not handed to the plane."""
        self.sock.close()
        if self.rings_fd >= 0:
            os.close(self.rings_fd)


class TransportRefused(ConnectError):
    """The engine answers, but this transport cannot be used between the two."""


def address_text(host: str, port: int) -> str:
    """``host:port``, with brackets where the host has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock: socket.socket, stall_timeout_s: float) -> None:
    """Options for every TCP connection, both sides; tcp(7), socket(7)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    # A rail that is cut off while its data waits in the kernel: other rails may go on, so nothing
    # above would notice. Twice the stall timeout, so that a frozen peer is called just that.
    user_timeout_ms = min(int(2000 * stall_timeout_s), 1 << 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)


@contextlib.contextmanager
def blame(card: Card, where: str, timeout_s: float) -> Iterator[None]:
    """Turns what the system says about a connection into ``te.ConnectError``."""
    try:
        yield
    except TimeoutError:
        raise ConnectError(
            f"no welcome from the engine {card.id} at {where} within {timeout_s} s"
        ) from None
    except OSError as exc:
        cause = exc.strerror or str(exc)
        raise ConnectError(f"cannot connect to the engine {card.id} at {where}: {cause}") from exc


def greet(
    sock: socket.socket,
    hello: Hello,
    card: Card,
    where: str,
    deadline_s: float,
    fds: Sequence[int] = (),
) -> Dialled:
    """Sends the hello, with descriptors if any (unix sockets only), and waits for the welcome;
    closes the socket on any error.

    Raises ``OSError``, ``te.ConnectError``, ``te.VersionError``, ``te.HandshakeError``,
    ``TransportRefused``.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        try:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            # One that refuses at once may have closed already: its reason is still to be read.
            with contextlib.suppress(BrokenPipeError):
                data = encode_greeting(GreetingKind.HELLO, PROTOCOL_VERSION, encode(hello))
                if fds:
                    # A new connection's empty buffer takes it whole.
                    socket.send_fds(sock, [data], fds)
                else:
                    sock.sendall(data)
            greeting = _read_greeting(sock, deadline_s)
        except ProtocolViolation as exc:
            raise HandshakeError(f"{where}: {exc}") from None
        welcome = _check_greeting(greeting, card, where)
        sock.setblocking(False)
        undo.pop_all()
        return Dialled(sock, welcome)


def insist(dial: Callable[[], Dialled], deadline_s: float) -> Dialled:
    """Dials again when the other side closes before its welcome: an engine to which too many
    connect at once closes one that is silent or old (``te.links.admission``), and that may be ours
    when this process was held up before its hello. Raises as ``dial`` does, at the last try or at
    the deadline."""
    for _ in range(DIALS_MAX - 1):
        try:
            return dial()
        except ConnectionResetError:
            if time.monotonic() + DIAL_PAUSE_S >= deadline_s:
                raise
            time.sleep(DIAL_PAUSE_S)
    return dial()


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


def _check_greeting(greeting: Greeting, card: Card, where: str) -> Welcome:
    if greeting.version != PROTOCOL_VERSION:
        raise VersionError(version_mismatch(f"the engine at {where}", greeting.version))
    if greeting.kind == GreetingKind.REFUSE:
        refuse = decode_body(greeting.body, Refuse)
        if refuse.code is Refusal.TRANSPORT:
            raise TransportRefused(refuse.reason)
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
    return welcome
