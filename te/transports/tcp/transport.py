# SPDX-License-Identifier: Apache-2.0
"""The contract over TCP connections. It has nothing to say beyond what all greetings say."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import ClassVar

from te.config import SEGMENT_BYTES_MAX
from te.connect.dial import Dialled, add_rails, connect, hello_to, tune
from te.core.wire import RAILS_LIMIT
from te.errors import ProtocolViolation
from te.handshake import Card
from te.memory_kinds import Reach
from te.proof import Key
from te.topology import bytes_per_s_of
from te.transports.base import (
    Call,
    Capabilities,
    IncomingLink,
    Join,
    OutgoingLink,
    PlainJoin,
    Transport,
)
from te.transports.tcp._core import TcpLink

__all__ = ["Tcp"]


@dataclass(eq=False)
class _Link(OutgoingLink):
    speed: float

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
        reads_one_sided=False,
        piece_nbytes_max=SEGMENT_BYTES_MAX,
        rails_max=RAILS_LIMIT,
        connections_max=RAILS_LIMIT,
    )

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        local = self._local
        hello = hello_to(card, local, self.name, secrets.randbits(62))

        def dial(session: Key | None = None) -> Dialled:
            return connect(local, card, hello, deadline_s, timeout_s, session)

        first = dial()
        speed = bytes_per_s_of(first.sock.getsockname()[0])
        link = TcpLink(local.plane, False)
        add_rails(first, dial, local.config.rails, lambda one: link.add_rail(one.fileno()))
        return _Link(link, speed)

    def accept(self, call: Call, link: IncomingLink | None) -> Join:
        """Every greeting asks for a rail."""
        if call.body:
            raise ProtocolViolation(f"{len(call.body)} bytes about a rail that needs none")
        tune(call.sock, self._local.config.stall_timeout_s)
        plane = self._local.plane
        return PlainJoin(
            self, call, lambda: TcpLink(plane, True), lambda handle, fd: handle.add_rail(fd)
        )
