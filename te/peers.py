# SPDX-License-Identifier: Apache-2.0
"""Another engine, as this one writes to it."""

from __future__ import annotations

from collections.abc import Callable

from te.arrivals import check_tag
from te.blocks import Blocks
from te.handshake import Card, CardRegion
from te.memory import RegionTable
from te.transfers import Status, Transfer
from te.transports.base import Rail

__all__ = ["Peer"]


class Peer:
    """What ``Engine.connect`` returns. Any thread may call anything.

    Once its connection is gone it stays dead: its writes fail at once with the reason, and
    ``Engine.connect`` makes a new peer.
    """

    def __init__(
        self, card: Card, rail: Rail, memory: RegionTable, on_settle: Callable[[Status], None]
    ) -> None:
        """Engines make peers; ``on_settle`` counts outcomes."""
        self._card = card
        self._rail = rail
        self._memory = memory
        self._on_settle = on_settle

    def __repr__(self) -> str:
        state = "alive" if self.alive else "dead"
        return f"Peer({self.id} at {self.address[0]} port {self.address[1]}, {state})"

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
        return self._rail.alive

    def write(self, blocks: Blocks, tag: int = 0) -> Transfer:
        """Begins to copy ``blocks`` from this engine's memory into the peer's; returns at once.

        Every source range must be registered memory of this engine (``te.BoundsError`` otherwise,
        before a byte moves); its regions cannot be deregistered until there is an outcome.
        Destination ranges are checked by the destination, segment by segment, against what is
        registered there at that time; a range outside fails the transfer, and nothing of its
        segment lands. With a ``tag`` other than 0 the destination must have opened it with
        ``expect`` and counts the arrival. No blocks at all is a transfer too: it counts.

        Transfers to one peer are sent one after the other in the order of submission. Raises
        ``te.QueueFull`` when too many have no outcome, ``ValueError`` for a tag out of range. The
        source must not change before there is an outcome.
        """
        if tag:
            check_tag(tag)
        hold = self._memory.hold(blocks.array["src"], blocks.array["nbytes"])

        def on_settle(status: Status) -> None:
            self._memory.release(hold)
            self._on_settle(status)

        transfer = Transfer(blocks.total_nbytes, on_cancel=self._rail.recheck, on_settle=on_settle)
        try:
            self._rail.submit(transfer, blocks, tag)
        except BaseException:
            self._memory.release(hold)
            raise
        return transfer

    def close(self) -> None:
        """Drops the connection; unfinished transfers fail. Returns at once, idempotent."""
        self._rail.close("this peer was closed by its application")
