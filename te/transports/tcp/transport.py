# SPDX-License-Identifier: Apache-2.0
"""The contract over TCP connections. It has nothing to say beyond what all greetings say."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import ClassVar

from te.config import SEGMENT_BYTES_MAX, Config
from te.connect.dial import Dialled, add_rails, connect, hello_to, tune
from te.core.wire import RAILS_LIMIT
from te.errors import ProtocolViolation
from te.handshake import Card
from te.memory_kinds import Reach
from te.transports.base import (
    Call,
    Capabilities,
    IncomingLink,
    Join,
    Local,
    OutgoingLink,
    Transport,
    Watch,
)
from te.transports.tcp._core import TcpLink

__all__ = ["Tcp"]


class Tcp(Transport):
    """Every rail is a TCP connection."""

    name: ClassVar = "tcp"
    capabilities: ClassVar = Capabilities(
        touches=Reach.KERNEL,
        keeps_order=False,
        reads_one_sided=False,
        piece_nbytes_max=SEGMENT_BYTES_MAX,
        rails_max=RAILS_LIMIT,
        connections_max=RAILS_LIMIT,
    )

    _local: Local

    def __init__(self, config: Config) -> None:
        """It needs nothing of the configuration before there are connections."""

    def probe(self) -> str | None:
        """It can always be used."""
        return None

    def start(self, local: Local, watch: Watch) -> tuple[()]:
        """Its greetings come by the engine's own listener."""
        self._local = local
        return ()

    def offer(self) -> bytes:
        """The card has the address already."""
        return b""

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        local = self._local
        hello = hello_to(card, local, self.name, secrets.randbits(62))

        def dial() -> Dialled:
            return connect(local, card, hello, deadline_s, timeout_s)

        first = dial()
        link = TcpLink(local.plane, False)
        add_rails(first, dial, local.config.rails, lambda one: link.add_rail(one.fileno()))
        return OutgoingLink(link)

    def accept(self, call: Call, link: IncomingLink | None) -> Join:
        """Every greeting asks for a rail."""
        if call.body:
            raise ProtocolViolation(f"{len(call.body)} bytes about a rail that needs none")
        return _Join(self, self._local, call)


@dataclass
class _Join(Join):
    transport: Tcp
    local: Local
    call: Call

    def check(self) -> bytes:
        tune(self.call.sock, self.local.config.stall_timeout_s)
        return b""

    def begin(self) -> IncomingLink:
        handle = TcpLink(self.local.plane, True)
        return IncomingLink(handle, self.call.key, self.transport, self.call.where)

    def add(self, link: IncomingLink) -> bool:
        assert isinstance(link.handle, TcpLink)
        return link.handle.add_rail(self.call.sock.fileno())
