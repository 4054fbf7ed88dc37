# SPDX-License-Identifier: Apache-2.0
"""The methods of Mooncake's engine class that copy memory. Whatever ``transport_hint`` says, te
chooses the transport: only one build of Mooncake's minds it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

import te
from bootstrap_server.admission.refusals import Pace
from sglang_mooncake.faces.mooncake_engine.batches import Batch, settle
from sglang_mooncake.faces.mooncake_engine.impl import EngineImpl, outcome
from sglang_mooncake.faces.mooncake_engine.names import TransferNotify, TransferOpcode
from sglang_mooncake.faces.mooncake_engine.notes import packed, unpacked
from sglang_mooncake.faces.mooncake_engine.options import Options

__all__ = ["Transferring"]

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S: Final = 100e6
_NUMBERS: Final = {te.Status.PENDING: 0, te.Status.DONE: 1, te.Status.CANCELLED: -2}
"""What ``transfer_check_status`` says of a transfer that has not failed."""


class Transferring:
    """Those whose names have ``async`` or ``submit`` in them return while it goes on. Those that
    wait return once te has done with the caller's memory, however long that takes."""

    options: ClassVar[Options]

    def __init__(self) -> None:
        self._impl: EngineImpl | None = None
        self._foreign = Pace()

    def _ready(self) -> EngineImpl:
        if self._impl is None:
            raise RuntimeError("the engine was not initialized, or initialize failed")
        return self._impl

    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Copies ``length`` bytes from this process's ``buffer`` to an address of the peer's."""
        return self.batch_transfer_sync_write(
            target_hostname, [buffer], [peer_buffer_address], [length], transport_hint
        )

    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Copies ``length`` bytes from an address of the peer's to this process's ``buffer``."""
        return self.batch_transfer_sync_read(
            target_hostname, [buffer], [peer_buffer_address], [length], transport_hint
        )

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """The one or the other; see ``batch_transfer_sync``."""
        return self.batch_transfer_sync(
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            opcode,
            notify,
            transport_hint,
        )

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Many of them, with one outcome."""
        return self.batch_transfer_sync(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            TransferOpcode.Write,
            None,
            transport_hint,
        )

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Many of them, with one outcome."""
        return self.batch_transfer_sync(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            TransferOpcode.Read,
            None,
            transport_hint,
        )

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",  # noqa: ARG002 - te chooses the transport
    ) -> int:
        """Many of them, with one outcome. ``notify``: what the peer's ``get_notifies`` returns once
        the bytes are there. A call whose message could not be sent has failed; the log says then
        that the bytes are there."""

        def work() -> None:
            message = None if notify is None else packed(notify)
            batch = self._start(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)
            settle([batch])
            if message is not None:
                _notify(batch.peer, message)

        return outcome(_described(opcode, lengths, target_hostname), work)

    def get_notifies(self) -> list[TransferNotify]:
        """The messages that have come with others' transfers since the last call, in each sender's
        order. One whose connection ends meanwhile is lost."""
        found = []
        for note in self._ready().engine.take_notes():
            try:
                found.append(unpacked(note.data))
            except ValueError as exc:  # UnicodeDecodeError is one.
                more = self._foreign.more()
                if more is not None:  # A peer may send as many of them as it likes.
                    logger.warning("mooncake.engine over te: %s: %s%s", note.peer.id, exc, more)
        return found

    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """As ``batch_transfer_async``."""
        return self.batch_transfer_async_write(
            target_hostname, [buffer], [peer_buffer_address], [length], transport_hint
        )

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """As ``batch_transfer_async``."""
        return self.batch_transfer_async(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            TransferOpcode.Write,
            transport_hint,
        )

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """As ``batch_transfer_async``."""
        return self.batch_transfer_async(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            TransferOpcode.Read,
            transport_hint,
        )

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        transport_hint: str = "",  # noqa: ARG002 - te chooses the transport
    ) -> int:
        """A number for ``transfer_check_status`` or ``get_batch_transfer_status``, one of which is
        to be asked until it has told the end; 0 if it could not be submitted. Waits only to connect
        to a peer that is not connected."""
        start = partial(
            self._start, target_hostname, buffers, peer_buffer_addresses, lengths, opcode
        )
        return outcome(
            _described(opcode, lengths, target_hostname),
            lambda: self._ready().batches.submit(start),
            failed=0,
        )

    def transfer_check_status(self, batch_id: int) -> int:
        """0: it goes on; 1: all bytes are there; -1: it failed, or its end was told before; -2: it
        took too long and was cancelled. After any but 0 te has done with the memory."""
        return outcome(
            f"transfer {batch_id}", lambda: _NUMBERS[self._ready().batches.check(batch_id)]
        )

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for the end of each; 0 if all bytes of all are there."""
        return outcome(
            f"one of {len(batch_ids)} transfers",
            lambda: self._ready().batches.wait(batch_ids),
        )

    def _start(
        self,
        session: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
    ) -> Batch:
        is_read = TransferOpcode(opcode) is TransferOpcode.Read
        ends = (peer_buffer_addresses, buffers) if is_read else (buffers, peer_buffer_addresses)
        blocks = _blocks(*ends, lengths)
        peer = self._ready().sessions.peer(session)
        transfer = None
        if len(blocks):
            transfer = peer.read(blocks) if is_read else peer.write(blocks)
        limit_s = self.options.transfer_timeout_s + blocks.total_nbytes / SLOWEST_BYTES_PER_S
        return Batch(transfer, is_read, limit_s, peer)


def _notify(peer: te.Peer, message: bytes) -> None:
    """Tells the process that the bytes went to, and no other that has its address by now."""
    try:
        peer.send_note(message)
    except te.Error as exc:
        raise RuntimeError(f"the bytes are there, but its message was not sent: {exc}") from exc


def _described(opcode: TransferOpcode, lengths: Sequence[int], session: str) -> str:
    what = (
        "read of {} blocks from {}" if opcode == TransferOpcode.Read else "write of {} blocks to {}"
    )
    return "a " + what.format(len(lengths), session)


def _blocks(src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]) -> te.Blocks:
    """Without those of no bytes, which Mooncake takes. ``ValueError``."""
    if not len(src) == len(dst) == len(lengths):
        raise ValueError(f"{len(src)} sources, {len(dst)} destinations and {len(lengths)} lengths")
    some = [row for row in zip(src, dst, lengths, strict=True) if row[2]]
    columns = zip(*some, strict=True) if some else ([], [], [])
    return te.Blocks.of(*map(list, columns))
