# SPDX-License-Identifier: Apache-2.0
"""The contract over TCP connections. Beyond what all greetings say, its hellos say whether the
connection is encrypted, and how: by the kernel where both can, else in records of our own. Both
sides must agree; what a hello says is proved."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import ClassVar

from te.config import Config
from te.connect.dial import (
    Dialled,
    add_rails,
    address_text,
    blame,
    connect,
    hello_to,
    tune,
)
from te.core.wire import RAILS_LIMIT
from te.errors import ProtocolViolation
from te.handshake import Card
from te.memory_kinds import Reach
from te.proof import Key, stream_secrets
from te.topology import bytes_per_s_of
from te.transports.base import (
    Call,
    Capabilities,
    IncomingLink,
    Join,
    OutgoingLink,
    PlainJoin,
    Transport,
    TransportRefused,
)
from te.transports.tcp import kernel_tls
from te.transports.tcp._core import TcpLink
from te.transports.tcp.encryption import has_libcrypto

__all__ = ["Tcp"]

logger = logging.getLogger(__name__)

#: In a hello: the connection is encrypted in records of our own (encryption.pxd), or
#: by the kernel (`kernel_tls`). On the card: that records can be had, or both.
_RECORDS = b"encrypted 1"
_KERNEL = b"encrypted 1 kernel"
_ENCRYPTED_BY = {b"": "", _RECORDS: "libcrypto", _KERNEL: "kernel"}


@dataclass(eq=False)
class _Link(OutgoingLink):
    speed: float
    encryption: str
    names: list[str]

    @property
    def encrypted_by(self) -> str:
        return self.encryption

    @property
    def rail_names(self) -> tuple[str, ...]:
        """The two addresses of each connection."""
        return tuple(self.names)

    @property
    def bytes_per_s(self) -> float:
        """The rate of the interface by which the link leaves."""
        return self.speed


class Tcp(Transport):
    """Every rail is a TCP connection."""

    name: ClassVar = "tcp"
    capabilities: ClassVar = Capabilities(
        touches=Reach.KERNEL,
        stages=True,
        is_private=True,
        connections_max=RAILS_LIMIT,
    )

    def __init__(self, config: Config) -> None:
        self._config = config
        self._offer = b""
        if config.encrypt:
            problem = kernel_tls.problem()
            self._offer = _RECORDS if problem else _KERNEL
            who = (
                f"libcrypto, as {problem}"
                if problem
                else "the kernel if the peer's kernel can, too"
            )
            logger.info("TCP connections are encrypted by %s", who)

    def probe(self) -> str | None:
        """Without encryption there is always a way."""
        if self._config.encrypt and not has_libcrypto():
            return "it cannot encrypt: there is no libcrypto of OpenSSL 3"
        return None

    def offer(self) -> bytes | None:
        return self._offer

    def _choose(self, said: bytes) -> bytes:
        """How to encrypt, by what the other side can, if either wishes to; ``TransportRefused``."""
        if bool(said) == bool(self._offer):
            return self._offer if said == self._offer else _RECORDS
        one, other = (
            ("this engine", "the other") if self._offer else ("the other engine", "this one")
        )
        raise TransportRefused(
            f"{one} encrypts and {other} does not; give both the same (encrypt in te.Config)",
            for_good=True,
        )

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        local, how = self._local, self._choose(offer)
        hello = hello_to(card, local, self.name, secrets.randbits(62), how)

        def dial(session: Key | None = None) -> Dialled:
            return connect(local, card, hello, deadline_s, timeout_s, session)

        first = dial()
        speed = bytes_per_s_of(first.sock.getsockname()[0])
        link = TcpLink(local.plane, False)
        names: list[str] = []

        def add(one: Dialled) -> bool:
            ends = one.sock.getsockname(), one.sock.getpeername()
            names.append(" → ".join(address_text(*end[:2]) for end in ends))
            keys = stream_secrets(one.session, one.hello) if how else None
            with blame(card, address_text(card.host, card.port), timeout_s):
                return _add(link, one.fileno(), how, keys)

        add_rails(first, dial, local.config.rails, add)
        return _Link(link, speed, _ENCRYPTED_BY[how], names)

    def accept(self, call: Call, link: IncomingLink | None) -> Join:
        """Every greeting asks for a rail."""
        how = call.body
        if how not in (b"", _RECORDS, _KERNEL):
            raise ProtocolViolation(f"{len(how)} bytes about a rail that are not known here")
        if self._choose(how) != how:
            raise TransportRefused("the kernel of this engine's host cannot encrypt connections")
        tune(call.sock, self._local.config.stall_timeout_s)
        plane = self._local.plane

        def give(link: IncomingLink, fd: int) -> bool:
            assert isinstance(link.handle, TcpLink)
            keys = None
            link.encrypted_by = _ENCRYPTED_BY[how]
            if how:
                assert link.session is not None
                theirs, ours = stream_secrets(link.session, call.proof)
                keys = ours, theirs
            return _add(link.handle, fd, how, keys)

        return PlainJoin(self, call, lambda: TcpLink(plane, True), give)


def _add(link: TcpLink, fd: int, how: bytes, keys: tuple[bytes, bytes] | None) -> bool:
    """Hands a connection to the plane, encrypted with these secrets of what goes out and what comes
    in; whether the link took it. ``OSError`` when it cannot be encrypted."""
    if how != _KERNEL:
        return link.add_rail(fd, keys)
    assert keys is not None
    kernel_tls.encrypt(fd, *keys)
    return link.add_rail(fd)
