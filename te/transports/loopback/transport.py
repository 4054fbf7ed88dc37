# SPDX-License-Identifier: Apache-2.0
"""The contract within one process: the two ends of a link meet in a table."""

from __future__ import annotations

import secrets
from typing import ClassVar, Final

from te.connect.dial import connect, hello_to
from te.errors import ProtocolViolation
from te.handshake import Card
from te.memory_kinds import Reach
from te.transports.base import (
    Call,
    Capabilities,
    IncomingLink,
    Join,
    LinkKey,
    OutgoingLink,
    PlainJoin,
    Transport,
    TransportRefused,
)
from te.transports.loopback._core import LoopbackLink

__all__ = ["Loopback"]

_open: Final[dict[LinkKey, list[LoopbackLink]]] = {}
"""By keys that nobody else knows, the source's end of each link whose greeting is under way, until
the destination takes it out."""


class Loopback(Transport):
    """The destination's worker copies."""

    name: ClassVar = "loopback"
    capabilities: ClassVar = Capabilities(
        touches=Reach.CPU,
        is_private=True,
        connections_max=1,
    )

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        key = LinkKey(self._local.id, self._local.epoch, secrets.randbits(62))
        handle = LoopbackLink(self._local.plane, False)
        hello = hello_to(card, self._local, self.name, key.number)
        _open[key] = [handle]
        try:
            dialled = connect(self._local, card, hello, deadline_s, timeout_s)
        finally:
            _open.pop(key, None)
        if handle.add_connection(dialled.sock.fileno()):
            dialled.sock.detach()
        return OutgoingLink(handle)

    def accept(self, call: Call, link: IncomingLink | None) -> Join:
        """See ``Transport.accept``."""
        if call.body:
            raise ProtocolViolation(f"{len(call.body)} bytes about a link that needs none")
        ends = _open.get(call.key)
        if ends is None:
            raise TransportRefused("the other engine is of another process")
        if not ends:
            raise TransportRefused("an earlier connection of this link was welcomed; connect again")
        other = ends.pop()
        plane = self._local.plane

        def give(link: IncomingLink, fd: int) -> bool:
            assert isinstance(link.handle, LoopbackLink)
            return link.handle.add_connection(fd, other)

        return PlainJoin(self, call, lambda: LoopbackLink(plane, True), give)
