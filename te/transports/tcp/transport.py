# SPDX-License-Identifier: Apache-2.0
"""The contract over TCP connections. Beyond what all greetings say, its hellos say whether the
connection is encrypted, on which both sides must agree: what a hello says is proved."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import ClassVar

from te.config import SEGMENT_BYTES_MAX, Config
from te.connect.dial import Dialled, add_rails, connect, hello_to, tune
from te.core.encryption import has_libcrypto
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
from te.transports.tcp._core import TcpLink

__all__ = ["Tcp"]

#: On the card and in a hello: what goes over the connection is encrypted (te/core/encryption.pxd).
_ENCRYPTED = b"encrypted 1"


@dataclass(eq=False)
class _Link(OutgoingLink):
    speed: float
    is_secret: bool

    @property
    def is_encrypted(self) -> bool:
        return self.is_secret

    @property
    def bytes_per_s(self) -> float:
        """Of the interface by which it leaves."""
        return self.speed


class Tcp(Transport):
    """Every rail is a TCP connection."""

    name: ClassVar = "tcp"
    capabilities: ClassVar = Capabilities(
        touches=Reach.KERNEL,
        stages=True,
        keeps_order=False,
        is_private=True,
        reads_one_sided=False,
        piece_nbytes_max=SEGMENT_BYTES_MAX,
        rails_max=RAILS_LIMIT,
        connections_max=RAILS_LIMIT,
    )

    def __init__(self, config: Config) -> None:
        self._config = config
        self._says = _ENCRYPTED if config.encrypt else b""

    def probe(self) -> str | None:
        """Without encryption there is always a way."""
        if self._config.encrypt and not has_libcrypto():
            return "it cannot encrypt: there is no libcrypto of OpenSSL 3 or 1.1"
        return None

    def offer(self) -> bytes | None:
        return self._says

    def _check(self, said: bytes) -> None:
        """What the other side says of itself; ``TransportRefused``."""
        if said == self._says:
            return
        one, other = (
            ("this engine", "the other") if self._says else ("the other engine", "this one")
        )
        raise TransportRefused(
            f"{one} encrypts and {other} does not; give both the same (encrypt in te.Config)"
        )

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        local = self._local
        self._check(offer)
        hello = hello_to(card, local, self.name, secrets.randbits(62), self._says)

        def dial(session: Key | None = None) -> Dialled:
            return connect(local, card, hello, deadline_s, timeout_s, session)

        first = dial()
        speed = bytes_per_s_of(first.sock.getsockname()[0])
        link = TcpLink(local.plane, False)

        def add(one: Dialled) -> bool:
            if not self._says:
                return link.add_rail(one.fileno())
            return link.add_rail(one.fileno(), stream_secrets(one.session, one.hello))

        add_rails(first, dial, local.config.rails, add)
        return _Link(link, speed, bool(self._says))

    def accept(self, call: Call, link: IncomingLink | None) -> Join:
        """Every greeting asks for a rail."""
        if call.body not in (b"", _ENCRYPTED):
            raise ProtocolViolation(f"{len(call.body)} bytes about a rail that are not known here")
        self._check(call.body)
        tune(call.sock, self._local.config.stall_timeout_s)
        plane = self._local.plane

        def give(link: IncomingLink, fd: int) -> bool:
            assert isinstance(link.handle, TcpLink)
            if not self._says:
                return link.handle.add_rail(fd)
            assert link.session is not None
            theirs, ours = stream_secrets(link.session, call.proof)
            return link.handle.add_rail(fd, (ours, theirs))

        return PlainJoin(self, call, lambda: TcpLink(plane, True), give)
