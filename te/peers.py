# SPDX-License-Identifier: Apache-2.0
"""Another engine, as this one writes to it and reads from it."""

from __future__ import annotations

from te.blocks import Blocks
from te.config import Config
from te.connect.dial import address_text
from te.connect.outgoing import Opened
from te.errors import BoundsError, QueueFull
from te.handshake import Card, CardRegion
from te.memory import RegionTable
from te.reasons import Reason, sentence
from te.tags import check_tag
from te.transfers import Notifier, Transfer
from te.transports.base import RailView

__all__ = ["Peer"]


class Peer:
    """What ``Engine.connect`` returns. Any thread may call anything.

    Once one of its connections is gone it stays dead: its writes fail at once with the reason, and
    ``Engine.connect`` makes a new peer.
    """

    def __init__(
        self, card: Card, opened: Opened, memory: RegionTable, config: Config, notifier: Notifier
    ) -> None:
        """Engines make peers."""
        self._card = card
        self._opened = opened
        self._link = opened.link
        self._memory = memory
        self._config = config
        self._notifier = notifier
        self._label = f"engine {card.id} at {address_text(card.host, card.port)}"

    def __repr__(self) -> str:
        state = "alive" if self.alive else "dead"
        return (
            f"Peer({self.id} at {self.address[0]} port {self.address[1]},"
            f" {self.transport}, {state})"
        )

    @property
    def id(self) -> str:
        """The engine's id, 32 hex digits."""
        return self._card.id

    @property
    def epoch(self) -> int:
        """When the engine started, in ns since 1970."""
        return self._card.epoch

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        return self._card.host, self._card.port

    @property
    def regions(self) -> tuple[CardRegion, ...]:
        """Its regions when the card was made. It may have others now."""
        return tuple(self._card.regions)

    @property
    def alive(self) -> bool:
        """Whether writes have a chance."""
        return self._link.alive

    @property
    def rails(self) -> int:
        """Paths to it that work: connections, or rails over RDMA."""
        return self._link.rails

    @property
    def rail_views(self) -> tuple[RailView, ...]:
        """Each rail over RDMA as it is now; empty for other transports."""
        return self._link.views

    @property
    def transport(self) -> str:
        """Its name, as in ``Config.transports``."""
        return self._opened.transport

    @property
    def transport_reason(self) -> str:
        """Why no preferred transport was taken; empty if this is the first choice."""
        return self._opened.reason

    @property
    def is_encrypted(self) -> bool:
        """Whether what goes to it over the network is encrypted (``Config.encrypt``); False on the
        same host."""
        return self._link.is_encrypted

    @property
    def bytes_per_s(self) -> float:
        """What the devices or the interface on the way to it carry at best; 0.0 if nobody tells, as
        on the same host."""
        return self._link.bytes_per_s

    def write(self, blocks: Blocks, tag: int = 0) -> Transfer:
        """Begins to copy ``blocks`` from this engine's memory into the peer's; returns at once.

        Every source range must be registered memory of this engine (``te.BoundsError`` otherwise,
        before a byte moves); its regions cannot be deregistered until there is an outcome.
        Destination ranges are checked by the destination, segment by segment, against what is
        registered there at that time; a range outside fails the transfer, and nothing of its
        segment lands. Over RDMA all of them are looked up in what the destination has told once it
        lets the transfer begin: then nothing of it lands. With a ``tag`` other than 0 the
        destination must have opened it with ``expect`` and counts the arrival. No blocks at all is
        a transfer too: it counts.

        Transfers to one peer are sent in the order of submission, but share its rails, so that a
        later one may end first. Raises ``te.QueueFull`` when too many have no outcome,
        ``ValueError`` for a tag out of range. The source must not change before there is an
        outcome.
        """
        if tag:
            check_tag(tag)
        return self._submit(blocks, tag, is_read=False)

    def read(self, blocks: Blocks) -> Transfer:
        """Begins to copy ``blocks`` from the peer's memory (``src``) into this engine's (``dst``).

        The mirror of ``write``: every ``dst`` range must be registered here (``te.BoundsError``),
        ``src`` ranges are checked by the peer against its regions. Unlike a write's, its
        cancellation needs nobody's confirmation. Pieces of a read that has failed may still be
        landing: the memory is free once ``Transfer.cancel`` has returned. Raises ``te.QueueFull``.
        """
        return self._submit(blocks, 0, is_read=True)

    def close(self) -> None:
        """Drops the connections; unfinished transfers fail. Returns at once, idempotent."""
        self._link.close()

    def describe(self, code: int, errnum: int, text: str) -> str:
        """The sentence for what the plane reports of this peer."""
        if code == Reason.SOURCE_FAULT:
            text = self._memory.trouble
        return sentence(self._label, code, errnum, text, self._config.stall_timeout_s)

    def _submit(self, blocks: Blocks, tag: int, is_read: bool) -> Transfer:
        limit = self._config.max_queued_transfers
        result = self._link.submit(blocks, tag, is_read, limit)
        if result is None:
            raise QueueFull(f"{self._label} has {limit} unfinished transfers")
        if isinstance(result, int):
            block, side = blocks.array[result], "dst" if is_read else "src"
            raise BoundsError(self._memory.complaint(int(block[side]), int(block["nbytes"])))
        return Transfer(result, blocks.total_nbytes, self._notifier, self.describe)
