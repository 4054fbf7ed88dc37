# SPDX-License-Identifier: Apache-2.0
"""TCP behind the contract of ``te.transports.base``."""

from __future__ import annotations

import logging
import time

from te.handshake import Card
from te.transports.base import Counters, Local, Rail, Transport
from te.transports.tcp.connect import address_text, open_connection
from te.transports.tcp.receiver import Receiver
from te.transports.tcp.sender import Sender

__all__ = ["TcpTransport"]

logger = logging.getLogger(__name__)


class TcpTransport(Transport):
    """One listening socket and two threads per engine, one connection per peer and direction."""

    name = "tcp"

    def __init__(self, local: Local) -> None:
        """Listens at once; ``te.ListenError`` when it cannot."""
        self._local = local
        short_id = local.id[:8]
        self._receiver = Receiver(f"te-receive-{short_id}", local)
        self._sender = Sender(f"te-send-{short_id}", local.config)
        self._address = self._receiver.address

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    def connect(self, card: Card, timeout_s: float) -> Rail:
        sock = open_connection(card, self._local.id, self._local.epoch, timeout_s)
        label = f"engine {card.id} at {address_text(card.host, card.port)}"
        return self._sender.adopt(sock, label)

    def quiesce(self, timeout_s: float) -> None:
        self._receiver.gate.quiesce(timeout_s)

    def drop_incoming(self, engine_id: str, timeout_s: float) -> int:
        return self._receiver.drop(engine_id, timeout_s)

    def counters(self) -> Counters:
        return Counters(
            bytes_sent=self._sender.bytes_sent,
            bytes_received=self._receiver.bytes_received,
            rails=self._sender.rails + self._receiver.rails,
        )

    def close(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for loop in (self._receiver.loop, self._sender.loop):
            if not loop.stop(max(deadline_s - time.monotonic(), 0.0)):
                logger.error("a thread of the TCP transport did not end within %s s", timeout_s)
