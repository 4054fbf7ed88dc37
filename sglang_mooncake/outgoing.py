# SPDX-License-Identifier: Apache-2.0
"""The transfers of a prefill rank's rooms: begun, sealed, cancelled, and what became of them."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

import te
from sglang_mooncake import messages
from sglang_mooncake.layout import EVERY_LAYER, SEAL_BYTES, Named, Plan, Seal, seal_bytes
from sglang_mooncake.links.destinations import Destination
from sglang_mooncake.rooms.prefill import Write, WriteEnded
from sglang_mooncake.rooms.states import RoomView
from sglang_mooncake.stats import Recorder
from sglang_mooncake.story import WRITES_MAX, WriteStory, merged

__all__ = ["SEAL_SLOTS", "Outgoing", "TransferEnded"]

logger = logging.getLogger(__name__)

#: One seal is needed per transfer of a last chunk that is under way.
SEAL_SLOTS = 16_384


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """A transfer that `begin` began has an outcome; `Outgoing.outcome` says which."""

    write: Write
    transfer: te.Transfer
    seal_slot: int | None
    #: Of its bytes those of caches and state, without metadata and seal.
    cache_nbytes: int
    blocks: int
    #: The decode rank, for sentences, and how it is reached.
    rank: str
    transport: str
    began_s: float

    def story(self, now_s: float, *, is_done: bool) -> WriteStory:
        return WriteStory(
            self.rank,
            self.transport,
            self.began_s,
            now_s,
            self.transfer.nbytes,
            self.blocks,
            self.write.pages,
            self.write.early,
            failed=int(not is_done),
        )


@dataclass(frozen=True, slots=True)
class _Room:
    """What one room has under way, and the payload that it has had for each decode rank."""

    transfers: list[te.Transfer] = field(default_factory=list)
    writes: list[WriteStory] = field(default_factory=list)
    nbytes: Counter[str] = field(default_factory=Counter)
    page_layers: defaultdict[str, PageLayers] = field(
        default_factory=lambda: defaultdict(PageLayers)
    )

    def add(self, write: WriteStory) -> None:
        """Keeps what is told of a write that has ended; no more of them than `merged` leaves."""
        self.writes.append(write)
        if len(self.writes) > 2 * WRITES_MAX:
            self.writes[:] = merged(self.writes)


@dataclass(frozen=True, slots=True)
class PageLayers:
    """Layers of pages that one decode rank has been sent, each counted once (`Seal.page_layers`).

    whole: of chunks that were sent.
    early: of chunks that are announced, by first page. They count once their chunk is sent as it
        was announced, and for nothing if it is sent whole.
    """

    whole: int = 0
    early: Mapping[int, int] = field(default_factory=dict)

    def with_write(self, write: Write, layers: int) -> PageLayers:
        """With one more write, of `layers` layers."""
        count, first = write.pages * layers, write.chunk.first
        if write.early:
            known = self.early.get(first, 0)
            return PageLayers(self.whole, {**self.early, first: known + count})
        announced = self.early.get(first, 0) if write.layers != EVERY_LAYER else 0
        stop = write.chunk.span.stop
        later = {place: count for place, count in self.early.items() if place >= stop}
        return PageLayers(self.whole + announced + count, later)


class Outgoing:
    """Every call is made on the loop thread. For each `Write` there is exactly one `WriteEnded`:
    from `refused` when `begin` raised, else from `outcome`.

    Args:
        post: hands a `TransferEnded` to the loop thread, from any thread.
    """

    def __init__(
        self,
        engine: te.Engine,
        recorder: Recorder,
        post: Callable[[TransferEnded], None],
    ) -> None:
        self._recorder, self._post = recorder, post
        self._rooms: dict[int, _Room] = {}  # by serial
        self._seals = np.zeros(SEAL_SLOTS * SEAL_BYTES, dtype=np.uint8)
        self._seal_region = engine.register(self._seals, remote="none")
        self._free_seals = list(range(SEAL_SLOTS))
        self._unwatched: list[TransferEnded] = []

    def begin(self, write: Write, destination: Destination) -> None:
        """Hands a write to the engine.

        Raises:
            ValueError, te.Error, and what else may go wrong: no byte of it has moved or will move.
        """
        room = self._rooms.setdefault(write.view.serial, _Room())
        peer, plan = destination.peer, destination.plan
        cached = self._cached(write, plan)
        blocks, seal_slot = self._with_metadata(write, plan, cached), None
        counted = room.page_layers[write.peer].with_write(write, plan.layer_count(write.layers))
        try:
            if write.chunk.is_last:
                seal_slot = self._take_seal_slot()
                nbytes = room.nbytes[write.peer] + blocks.total_nbytes
                blocks = self._sealed(write, plan, blocks, nbytes, counted.whole, seal_slot)
            transfer = peer.write(blocks, tag=write.target.tag)
        except Exception:
            self._give_back(seal_slot)
            raise
        room.transfers.append(transfer)
        room.nbytes[write.peer] += blocks.total_nbytes
        room.page_layers[write.peer] = counted
        now_s = write.view.times.posted_s = time.monotonic()
        self._recorder.transfer_began(now_s)
        ended = TransferEnded(
            write,
            transfer,
            seal_slot,
            cached.total_nbytes,
            len(blocks),
            destination.rank,
            peer.transport,
            now_s,
        )
        try:
            transfer.add_done_callback(lambda _: self._post(ended))
        except Exception:  # no thread could be started, say; but the write is under way
            logger.exception(
                "cannot be told when the %r of room %d ends", transfer, write.view.room
            )
            self._unwatched.append(ended)

    def cancel(self, view: RoomView) -> None:
        """Asks all transfers of a room to stop; each still has its outcome, asked or not."""
        for transfer in self._rooms[view.serial].transfers:
            try:
                transfer.cancel()
            except Exception:  # the others are to stop all the same
                logger.exception("cannot cancel the %r of room %d", transfer, view.room)

    def overlooked(self) -> list[TransferEnded]:
        """Transfers with an outcome of which `post` could not be told."""
        ended = [one for one in self._unwatched if one.transfer.poll() is not te.Status.PENDING]
        self._unwatched = [one for one in self._unwatched if one not in ended]
        return ended

    def outcome(self, ended: TransferEnded) -> WriteEnded | None:
        """What became of a transfer, which is forgotten here; None if that was said before."""
        view, transfer = ended.write.view, ended.transfer
        room = self._rooms.get(view.serial)
        if room is None or transfer not in room.transfers:
            return None
        room.transfers.remove(transfer)
        self._give_back(ended.seal_slot)
        status, now_s = transfer.poll(), time.monotonic()
        is_done = status is te.Status.DONE
        self._recorder.transfer_ended(transfer.nbytes if is_done else 0, now_s)
        room.add(ended.story(now_s, is_done=is_done))
        early = ended.write.early
        if is_done:
            view.landed_nbytes += ended.cache_nbytes
            if early:
                self._recorder.landed_early(ended.cache_nbytes)
            return WriteEnded(view, None, early)
        return WriteEnded(view, f"a transfer was {status.value}: {transfer.reason}", early)

    @staticmethod
    def refused(write: Write, error: Exception) -> WriteEnded:
        """What `begin` raised."""
        reason = f"could not hand {len(write.span)} pages to the engine: {error!r}"
        return WriteEnded(write.view, reason, write.early)

    def forget(self, view: RoomView) -> Sequence[WriteStory]:
        """The room is over: all its writes have ended. Returns what is told of them."""
        room = self._rooms.pop(view.serial, None)
        return () if room is None else room.writes

    def _take_seal_slot(self) -> int:
        if not self._free_seals:
            raise te.QueueFull(
                f"{SEAL_SLOTS} last chunks are being written already, which is the limit"
            )
        return self._free_seals.pop()

    def _give_back(self, seal_slot: int | None) -> None:
        if seal_slot is not None:
            self._free_seals.append(seal_slot)

    @staticmethod
    def _cached(write: Write, plan: Plan) -> te.Blocks:
        chunk, target, span = write.chunk, write.target, write.span
        ours = chunk.pages[span.start - chunk.first : span.stop - chunk.first]
        first, end = span.start // target.page_span, -(-span.stop // target.page_span)
        wanted, device = slice(4 * first, 4 * end), target.device_pages
        named = Named(
            messages.indices_from_bytes(target.pages[wanted]),
            None if device is None else messages.indices_from_bytes(device[wanted]),
            write.view.decode_prefix_len,
            first,
        )
        parts = [plan.part(ours, span.start, named, write.layers)]
        if chunk.is_last:
            parts.append(plan.state(chunk.states, messages.states_from_bytes(target.states)))
        return te.Blocks.concat(parts)

    @staticmethod
    def _with_metadata(write: Write, plan: Plan, cached: te.Blocks) -> te.Blocks:
        ours, theirs = write.chunk.aux_slot, write.target.aux_slot
        if ours is None or theirs is None:
            return cached
        return te.Blocks.concat([cached, plan.aux(ours, theirs)])

    def _sealed(
        self,
        write: Write,
        plan: Plan,
        blocks: te.Blocks,
        nbytes: int,
        page_layers: int,
        seal_slot: int,
    ) -> te.Blocks:
        """The blocks of a last chunk with the seal behind them. `nbytes`: the payload that the
        destination has had, with these blocks and without the seal; `page_layers`: see `Seal`."""
        target = write.target
        lists = zip(write.chunk.states, target.states, strict=False)
        seal = Seal(
            write.generation,
            write.sent.writes,
            write.sent.pages,
            page_layers,
            states=sum(ours is not None and theirs is not None for ours, theirs in lists),
            aux=int(target.aux_slot is not None),
            nbytes=nbytes + SEAL_BYTES,
        )
        begin = seal_slot * SEAL_BYTES
        self._seals[begin : begin + SEAL_BYTES] = np.frombuffer(seal_bytes(seal), np.uint8)
        place = plan.seal(self._seal_region.address + begin, target.seal_slot)
        return te.Blocks.concat([blocks, place])
