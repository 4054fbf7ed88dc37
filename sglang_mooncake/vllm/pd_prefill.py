# SPDX-License-Identifier: Apache-2.0
"""The worker's part on a prefill server: computed blocks wait until their decode server asks for
them, and are sent. Knows the hand-over, and nothing of vLLM."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.vllm.pd_requests import GivenUp, Send

__all__ = ["PrefillWorker"]

logger = logging.getLogger("vllm.sglang_mooncake")

#: vLLM keeps no metadata beside its KV cache: the last chunk names a slot, and nothing lies there.
NO_METADATA_SLOT: Final = 0


@dataclass(slots=True)
class _Sending:
    work: Send
    room: Room
    is_sent: bool = False


class PrefillWorker:
    """One rank's. The model runner's thread calls everything here, and waits for nothing."""

    def __init__(self, side: PrefillSide, block_tokens: int) -> None:
        self._side, self._block_tokens = side, block_tokens
        self._sending: dict[str, _Sending] = {}

    def send(self, work: Send) -> None:
        """Its blocks keep what they hold until ``take_sent`` names the request."""
        room = self._side.open_room(work.room, register_dp_rank=False)
        self._sending[work.request_id] = _Sending(work, room)

    def give_up(self, work: GivenUp) -> None:
        """Its blocks need not wait, if this rank has them."""
        self._side.given_up(work.room, work.reason, work.refused)

    def take_sent(self) -> set[str]:
        """Requests whose blocks are not read any more: they have arrived, or nobody has asked for
        them in time, or the decode server has given them up or is gone. Each is told once."""
        over = [name for name, one in self._sending.items() if self._goes_on(one) is False]
        for name in over:
            del self._sending[name]
        return set(over)

    def _goes_on(self, one: _Sending) -> bool:
        view = one.room.view
        if view.over:
            self._say(one)
            return False
        if view.state is RoomState.READY and not one.is_sent:
            self._send(one)
        self._side.polled(one.room, one.is_sent)
        return True

    def _send(self, one: _Sending) -> None:
        work, held = one.work, one.room.view.decode_prefix_len
        one.is_sent = True
        if held % self._block_tokens or held > work.tokens:
            self._side.fail(
                one.room,
                f"the decode server says that it holds {held} tokens of a prompt of {work.tokens},"
                f" which is no number of blocks of {self._block_tokens} in it",
            )
            return
        blocks = np.array(work.blocks[held // self._block_tokens :], np.int64)
        self._side.send_chunk(one.room, Chunk(blocks, 0, NO_METADATA_SLOT, time.monotonic()))

    def _say(self, one: _Sending) -> None:
        view, name = one.room.view, one.work.request_id
        if view.state is RoomState.DONE:
            logger.debug("request %s: %d bytes handed over", name, view.landed_nbytes)
        elif view.state is RoomState.ABORTED:
            logger.info("request %s was not handed over: %s", name, view.reason)
        else:
            logger.warning("request %s was not handed over: %s", name, view.reason)
