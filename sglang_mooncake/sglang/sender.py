# SPDX-License-Identifier: Apache-2.0
"""The sender that SGLang's prefill scheduler makes for each request."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bootstrap_server import split_address
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.prefill_events import StreamEvent
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.layerwise.spans import SpanSender
from sglang_mooncake.sglang.manager import KVManager
from sglang_mooncake.sglang.seam import (
    BaseKVSender,
    KVPoll,
    KVTransferError,
    KVTransferMetric,
    dp_rank_conflict,
)
from sglang_mooncake.side import state_lists

__all__ = ["KVSender"]

_POLL = {
    RoomState.OPEN: KVPoll.Bootstrapping,
    RoomState.READY: KVPoll.WaitingForInput,
    RoomState.SENDING: KVPoll.Transferring,
    RoomState.ALL_SENT: KVPoll.Transferring,
    # The pages are still being read: the scheduler must not take them back yet.
    RoomState.ENDING: KVPoll.Transferring,
    RoomState.DONE: KVPoll.Success,
}


class KVSender(SpanSender, BaseKVSender):  # type: ignore[misc]
    """Names and semantics are SGLang's (BaseKVSender). No call waits for anything."""

    def __init__(
        self,
        mgr: KVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
        *,
        dest_tp_ranks: Any = None,  # until 0.5.21, as the next one
        pp_rank: Any = None,
    ) -> None:
        del dest_tp_ranks, pp_rank  # decode ranks say what they want
        assert mgr.prefill_side is not None
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        #: Read by the scheduler: whether it may name pages in pinned memory that its stream fills
        #: later. Otherwise the scheduler waits for its stream before every `send`.
        self.supports_host_tensor_indices = mgr.pins_host_memory
        #: Written by the scheduler: an event of the GPU stream that fills the pages of the next
        #: `send()`. Nothing may be read before it has happened.
        self._early_send_wait_event: Any = None
        self._side = mgr.prefill_side
        self._num_pages: int | None = None
        self.aux_slot = None
        self.next_page = self.told_tokens = 0
        self._first_send_s: float | None = None
        self._metric = KVTransferMetric()
        self.room = self._side.open_room(
            bootstrap_room, mgr.context.register_dp_rank and not req_has_disagg_prefill_dp_rank
        )
        if mgr.named_port is not None:
            self._check_port(mgr.named_port)
        conflict = dp_rank_conflict(mgr.context, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if conflict is not None:
            self._side.fail(self.room, conflict)

    def _check_port(self, named: int) -> None:
        """Whether the request leads decode servers to this server's registry."""
        _, own = split_address(self.kv_mgr.context.bootstrap_address)
        if named != own:
            self._side.misdirect(
                self.room,
                f"the request names the bootstrap port {named}, and this prefill server's registry "
                f"is at port {own} (--disaggregation-bootstrap-port); no decode server has found "
                "it. Give the router the registry's port",
            )

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """`num_kv_indices`: pages that all `send()` calls together will name."""
        self._num_pages, self.aux_slot = num_kv_indices, aux_index
        if num_kv_indices < 0:
            held = self.room.view.decode_prefix_len
            self._side.fail(
                self.room,
                f"the decode server says that it holds {held} tokens of the prompt, which has "
                f"fewer ({num_kv_indices} pages would be left)",
            )

    def pop_decode_prefix_len(self) -> int:
        """Tokens at the start of the prompt whose KV the decode side has already."""
        return self.room.view.decode_prefix_len

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """The last chunk goes even without pages: it carries metadata and completion record."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: StreamEvent | None = None,
    ) -> None:
        """Hands pages to the loop. The last chunk is the one that completes the announced number
        of pages; SGLang passes `state_indices` with it, and with it alone.

        kv_indices: page numbers, of shape (pages,): an array, or with `indices_event` a tensor in
            pinned memory of its own, which holds them once that event has happened.
        """
        del num_kv_tokens
        with self.kv_mgr.recorder.scheduler_call("send"):
            now_s = time.monotonic()
            if self._first_send_s is None:
                self._first_send_s = now_s
            first = self.next_page
            self.next_page += len(kv_indices)
            is_last = state_indices is not None
            if is_last != (self.next_page == self._num_pages) or self.aux_slot is None:
                self._side.fail(
                    self.room,
                    f"the scheduler sent {self.next_page} of {self._num_pages} pages with its "
                    f"{'last' if is_last else 'not yet last'} chunk",
                )
                return
            events = [e for e in (self._early_send_wait_event, indices_event) if e is not None]
            self._early_send_wait_event = None
            chunk = Chunk(
                # The scheduler may reuse its array. The tensor is seen, not read: its numbers come.
                pages=np.array(kv_indices) if indices_event is None else kv_indices.numpy(),
                first=first,
                aux_slot=self.aux_slot if is_last else None,
                sent_s=now_s,
                states=state_lists(state_indices),
            )
            self._side.send_chunk(self.room, chunk, events)

    def poll(self) -> int:
        with self.kv_mgr.recorder.scheduler_call("poll"):
            self._side.polled(self.room, sent=self.next_page == self._num_pages)
            state = self.room.view.state
            if state is RoomState.DONE and self._metric.transfer_latency_s is None:
                self._metric.transfer_latency_s = time.monotonic() - (self._first_send_s or 0.0)
            return int(_POLL.get(state, KVPoll.Failed))

    def poll_pp_consensus(self) -> int:
        """For stage 0 of a pipelined server: the least advanced of all stages."""
        stages = self.kv_mgr.stages
        return self.poll() if stages is None else stages.consensus(self.bootstrap_room, self.poll())

    def mark_prefill_complete(self) -> None:
        """With the allocation policy `prefill_complete`: decode may make room for the request."""
        self._side.computed(self.room)

    def get_transfer_metric(self) -> KVTransferMetric:
        """Seconds from the first `send()` until all had landed, None for a request that failed; and
        the bytes of caches and state that this rank sent and that landed, each destination's
        counted, without metadata. None where this rank had none to send, as of an MLA cache another
        rank's turn it is: SGLang would take 0 for a rate."""
        self._metric.transfer_total_bytes = self.room.view.landed_nbytes or None
        return self._metric

    def failure_exception(self) -> None:
        """Raises the reason, and lets go of the room: SGLang does not call `clear()` then."""
        view = self.room.view
        from_another_rank = view.reason is None
        reason = view.reason or "aborted, since another rank of the group failed"
        self._side.close_room(self.room)
        raise KVTransferError(self.bootstrap_room, reason, from_another_rank)

    def abort(self) -> None:
        self._side.abort(self.room, "aborted by the scheduler of the prefill server")

    def clear(self) -> None:
        self._side.close_room(self.room)
