# SPDX-License-Identifier: Apache-2.0
"""Another engine, as this one writes to it and reads from it."""

from __future__ import annotations

from typing import NamedTuple

from te.blocks import Blocks
from te.config import Config
from te.connect.dial import address_text
from te.connect.transports import OpenLink
from te.core.wire import NOTE_LIMIT as NOTE_BYTES_MAX
from te.errors import BoundsError, ConnectError, QueueFull
from te.handshake import Card, CardRegion
from te.memory import RegionTable
from te.reasons import Reason, sentence
from te.stats import LinkStats, outcomes_of
from te.tags import Identity, check_tag
from te.transfers import Notifier, Transfer

__all__ = ["NOTE_BYTES_MAX", "Note", "Peer"]


class Note(NamedTuple):
    """A short message of another engine's application."""

    #: The engine that sent it.
    peer: Identity
    data: bytes


class Peer:
    """A connected engine, as ``Engine.connect`` returns it. All methods are thread-safe.

    A peer that has lost one of its connections stays dead: its transfers fail at once with the
    reason, and ``Engine.connect`` makes a new peer.
    """

    def __init__(
        self, card: Card, opened: OpenLink, memory: RegionTable, config: Config, notifier: Notifier
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
        """Host and port on which the peer listens."""
        return self._card.host, self._card.port

    @property
    def regions(self) -> tuple[CardRegion, ...]:
        """The peer's regions when its card was made; the peer may have others now."""
        return tuple(self._card.regions)

    @property
    def alive(self) -> bool:
        """Whether the connection stands. False is final."""
        return self._link.alive

    @property
    def rails(self) -> int:
        """The number of rails to the peer that work."""
        return self._link.rails

    @property
    def transport(self) -> str:
        """The name of the transport to this peer, as in ``Config.transports``."""
        return self._opened.transport

    @property
    def transport_reason(self) -> str:
        """Why a preferred transport could not be used; empty for the first choice."""
        return self._opened.reason

    @property
    def is_encrypted(self) -> bool:
        """Whether transfers to the peer are encrypted on the network (``Config.encrypt``); False on
        the same host."""
        return bool(self._link.encrypted_by)

    @property
    def bytes_per_s(self) -> float:
        """The nominal rate of the local devices or interface to the peer, in bytes per second;
        0.0 if it is not known, as on the same host."""
        return self._link.bytes_per_s

    def stats(self) -> LinkStats:
        """What has gone to the peer and come from it over the link that this engine opened."""
        flows, outcomes, unfinished = self._link.handle.tally()
        rails = self._link.rail_stats(flows)
        return LinkStats(
            peer=self.id,
            address=address_text(*self.address),
            is_incoming=False,
            transport=self.transport,
            transport_reason=self.transport_reason,
            encrypted_by=self._link.encrypted_by,
            bytes_per_s_max=self.bytes_per_s,
            rails=rails,
            transfers_unfinished=unfinished,
            outcomes=outcomes_of(outcomes),
            last_error=next((one.reason for one in rails if one.reason), ""),
        )

    def write(self, blocks: Blocks, tag: int = 0, *, is_awaited: bool = False) -> Transfer:
        """Begins to copy ``blocks`` from this engine's memory into the peer's; returns at once.

        Every source range must be registered with this engine, and stays registered until the
        transfer has an outcome. Do not change the source before that. The destination checks every
        destination range: one that is not registered there fails the transfer, and nothing of its
        segment lands (over RDMA, nothing of the whole transfer).

        With a ``tag`` other than 0, the destination must have opened that tag with ``expect``, and
        counts the transfer's arrival; a transfer without blocks counts, too.

        Transfers to one peer begin in the order of submission. They share its rails, so that a
        later transfer may end first.

        Where nothing else is to be sent, up to 64 KiB are sent by this thread, with the interpreter
        lock. So a page that the kernel has to fetch first, of swap space or of a mapped file, holds
        up every thread of the interpreter for that long. ``is_awaited``: the caller waits for it
        next, and for nothing else meanwhile. Then over TCP up to 1 MiB and 64 KiB are sent by this
        thread, and without that lock above 64 KiB.

        Raises:
            te.BoundsError: a source range is not registered; no byte has moved.
            te.QueueFull: the peer has ``Config.max_queued_transfers`` unfinished transfers.
            ValueError: the tag is out of range.
        """
        if tag:
            check_tag(tag)
        return self._submit(blocks, tag, is_read=False, is_awaited=is_awaited)

    def read(self, blocks: Blocks) -> Transfer:
        """Begins to copy ``blocks`` from the peer's memory (``src``) into this engine's (``dst``).

        Every ``dst`` range must be registered with this engine; the peer checks that every ``src``
        range lies in its regions and may be read. Over TCP, up to 1 MiB and 64 KiB land in the
        thread that waits for them. When a read has failed, pieces of it may still be
        landing: call ``Transfer.cancel`` before the memory is reused.

        Raises:
            te.BoundsError: a ``dst`` range is not registered here.
            te.QueueFull: the peer has ``Config.max_queued_transfers`` unfinished transfers.
        """
        return self._submit(blocks, 0, is_read=True)

    def send_note(self, data: bytes) -> None:
        """Sends a short message, which the peer's ``Engine.take_notes`` returns; returns at once.

        Notes to one peer come in order, and each once at most. One that is sent once a transfer has
        its outcome comes behind that transfer's bytes. A note is lost when the connection ends
        before it has come, or when the peer takes too few of them; nothing tells of that.

        Raises:
            te.ConnectError: the connection has ended.
            te.QueueFull: 8 MiB, or 8,192 notes, wait to be sent.
            ValueError: the message is empty or has more than ``NOTE_BYTES_MAX`` bytes.
        """
        if not 0 < len(data) <= NOTE_BYTES_MAX:
            raise ValueError(
                f"a note has {len(data)} bytes, and must have between 1 and {NOTE_BYTES_MAX}"
            )
        if not self.alive:
            code, errnum, text = self._link.handle.death
            raise ConnectError(self.describe(code, errnum, text))
        if not self._link.handle.send_note(bytes(data)):
            raise QueueFull(f"too many notes wait for {self._label}")

    def close(self) -> None:
        """Closes the connections; unfinished transfers fail. Returns at once. Idempotent."""
        self._link.close()

    def describe(self, code: int, errnum: int, text: str) -> str:
        """The sentence for what the plane reports of this peer."""
        if code == Reason.SOURCE_FAULT:
            text = self._memory.trouble
        return sentence(self._label, code, errnum, text, self._config.stall_timeout_s)

    def _submit(
        self, blocks: Blocks, tag: int, *, is_read: bool, is_awaited: bool = False
    ) -> Transfer:
        limit = self._config.max_queued_transfers
        result = self._link.submit(blocks, tag, is_read, limit, is_awaited)
        if result is None:
            raise QueueFull(f"{self._label} has {limit} unfinished transfers")
        if isinstance(result, int):
            block, side = blocks.array[result], "dst" if is_read else "src"
            raise BoundsError(self._memory.complaint(int(block[side]), int(block["nbytes"])))
        return Transfer(result, blocks.total_nbytes, self._notifier, self.describe)
