# SPDX-License-Identifier: Apache-2.0
"""The writes of a prefill rank in the engine's hands: begun, cancelled, and what became of them.
What is written, and what the completion record says of it, is decided in `rooms/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

import te
from sglang_mooncake.layout import COMPLETION_BYTES, CompletionRecord, Plan, completion_bytes
from sglang_mooncake.links.destinations import Destination
from sglang_mooncake.rooms.prefill import Write, WriteEnded
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.write_story import WriteStory
from sglang_mooncake.stats import Recorder

__all__ = ["COMPLETION_SLOTS", "Outgoing", "TransferEnded"]

logger = logging.getLogger(__name__)

#: One completion record is needed per transfer of a last chunk that is under way.
COMPLETION_SLOTS = 16_384

#: Of a write: the serial of its room, and its key there.
_Key = tuple[int, tuple[str, int]]


@dataclass(frozen=True, slots=True, eq=False)
class TransferEnded:
    """A transfer that `begin` began has an outcome; `Outgoing.outcome` says which."""

    write: Write
    transfer: te.Transfer
    completion_slot: int | None
    blocks: int
    #: The decode rank, for sentences, and how it is reached.
    rank: str
    transport: str
    began_s: float

    @property
    def key(self) -> _Key:
        return self.write.room.serial, self.write.key

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


class Outgoing:
    """Every call is made on the loop thread. For each `Write` there is at least one `WriteEnded`:
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
        self._under_way: dict[_Key, te.Transfer] = {}
        self._completions = np.zeros(COMPLETION_SLOTS * COMPLETION_BYTES, dtype=np.uint8)
        self._completion_region = engine.register(self._completions, remote="none")
        self._free_completions = list(range(COMPLETION_SLOTS))
        self._unwatched: list[TransferEnded] = []

    def __len__(self) -> int:
        """How many writes are under way."""
        return len(self._under_way)

    def begin(self, write: Write, destination: Destination) -> float:
        """Hands a write to the engine; returns when that was, by the monotonic clock.

        Raises:
            ValueError, te.Error, and what else may go wrong: no byte of it has moved or will move.
        """
        blocks, completion_slot, peer = write.blocks, None, destination.peer
        try:
            if write.completion is not None:
                completion_slot = self._take_completion_slot()
                completion = self._placed(
                    write.completion,
                    completion_slot,
                    destination.plan,
                    write.target.completion_slot,
                )
                blocks = te.Blocks.concat([blocks, completion])
            transfer = peer.write(blocks, tag=write.target.tag)
        except Exception:
            self._give_back(completion_slot)
            raise
        began_s = time.monotonic()
        ended = TransferEnded(
            write, transfer, completion_slot, len(blocks), destination.rank, peer.transport, began_s
        )
        self._under_way[ended.key] = transfer
        self._recorder.transfer_began(began_s)
        try:
            transfer.add_done_callback(lambda _: self._post(ended))
        except Exception:  # no thread could be started, say; but the write is under way
            logger.exception(
                "cannot be told when the %r of room %d ends", transfer, write.room.number
            )
            self._unwatched.append(ended)
        return began_s

    def cancel(self, room: Room, keys: Iterable[tuple[str, int]]) -> None:
        """Asks writes of a room to stop; each still has its outcome, asked or not."""
        for key in keys:
            transfer = self._under_way.get((room.serial, key))
            if transfer is None:
                continue  # it was refused, or has ended, and the rules are about to hear of that
            try:
                transfer.cancel()
            except Exception:  # the others are to stop all the same
                logger.exception("cannot cancel the %r of room %d", transfer, room.number)

    def overlooked(self) -> list[TransferEnded]:
        """Transfers with an outcome of which `post` could not be told."""
        ended = [one for one in self._unwatched if one.transfer.poll() is not te.Status.PENDING]
        self._unwatched = [one for one in self._unwatched if one not in ended]
        return ended

    def outcome(self, ended: TransferEnded) -> WriteEnded | None:
        """What became of a transfer, which is forgotten here; None if that was said before."""
        write, transfer = ended.write, ended.transfer
        if self._under_way.pop(ended.key, None) is None:
            return None
        self._give_back(ended.completion_slot)
        status, now_s = transfer.poll(), time.monotonic()
        is_done = status is te.Status.DONE
        self._recorder.transfer_ended(transfer.nbytes if is_done else 0, now_s)
        if is_done and write.early:
            self._recorder.landed_early(write.cache_nbytes)
        failure = None if is_done else f"a transfer was {status.value}: {transfer.reason}"
        story = ended.story(now_s, is_done=is_done)
        return WriteEnded(write.room, write.peer, write.nth, failure, story)

    @staticmethod
    def refused(write: Write, error: Exception) -> WriteEnded:
        """What `begin` raised."""
        reason = f"could not hand {len(write.span)} pages to the engine: {error!r}"
        return WriteEnded(write.room, write.peer, write.nth, reason)

    def _take_completion_slot(self) -> int:
        if not self._free_completions:
            raise te.QueueFull(
                f"{COMPLETION_SLOTS} last chunks are being written already, which is the limit"
            )
        return self._free_completions.pop()

    def _give_back(self, completion_slot: int | None) -> None:
        if completion_slot is not None:
            self._free_completions.append(completion_slot)

    def _placed(
        self, completion: CompletionRecord, slot: int, plan: Plan, target_slot: int
    ) -> te.Blocks:
        """The block that brings a completion record by way of a slot of ours to its slot there."""
        begin = slot * COMPLETION_BYTES
        self._completions[begin : begin + COMPLETION_BYTES] = np.frombuffer(
            completion_bytes(completion), np.uint8
        )
        return plan.completion(self._completion_region.address + begin, target_slot)
