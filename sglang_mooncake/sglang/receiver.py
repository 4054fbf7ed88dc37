# SPDX-License-Identifier: Apache-2.0
"""The receiver that SGLang's decode scheduler makes for each request."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_mooncake.decode_side import FENCE_NOW_TIMEOUT_S
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.manager import KVManager
from sglang_mooncake.sglang.seam import (
    BaseKVReceiver,
    KVPoll,
    KVTransferError,
)
from sglang_mooncake.side import state_lists

__all__ = ["KVReceiver"]

logger = logging.getLogger(__name__)

#: `KVTransferDestination.DEVICE`, which is this text and came with 0.5.21.
_DEVICE = "device"
_POLL = {
    RoomState.OPEN: KVPoll.Bootstrapping,
    RoomState.COMPUTING: KVPoll.Bootstrapping,
    RoomState.READY: KVPoll.WaitingForInput,
    RoomState.REQUESTED: KVPoll.Transferring,
    # Bytes may still land in the pages: the scheduler must not take them back yet.
    RoomState.ENDING: KVPoll.Transferring,
    RoomState.DONE: KVPoll.Success,
}


class KVReceiver(BaseKVReceiver):  # type: ignore[misc]
    """Names and semantics are SGLang's (BaseKVReceiver). No call waits for anything, except
    `failure_exception` with deferred release switched off (see there)."""

    #: GPU staging of head slices is refused at start-up (seam.py).
    require_staging = False
    supports_host_destination = False

    def __init__(
        self, mgr: KVManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        assert mgr.decode_side is not None
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = int(bootstrap_room or 0)
        self._side = mgr.decode_side
        #: The final answer of `poll()`, once given.
        self.conclude_state: int | None = None
        #: SGLang counts its entries as the acknowledgements to wait for; we need none
        #: (`KVManager.is_abort_release_safe`).
        self.bootstrap_infos: list[Any] = []
        self._room: Room = self._side.new_room(self.bootstrap_room)
        mgr.track(self._room)
        #: Whether the prefill instance is known: its ranks say the rest.
        self._chosen = False
        #: What the log names when SGLang takes pages back that are not safe.
        self._pages: npt.NDArray[np.int64] | None = None
        refusal = self._side.instances.refusal(bootstrap_addr)
        if refusal is not None:
            self._side.fail(self._room, refusal)
        else:
            # So that the answer is likely there when the scheduler asks for it.
            self._side.instances.ensure(bootstrap_addr)

    def init(self, prefill_dp_rank: int) -> None:
        """SGLang knows which DP rank of the prefill instance has the request."""
        self._chosen = True
        self._side.choose_sources(self._room, self.bootstrap_addr, prefill_dp_rank)

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: str = _DEVICE,
        device_kv_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Names the pages and the metadata slot that wait for this request's KV."""
        if destination != _DEVICE:
            # SGLang asks `supports_host_destination` before; its server would not have started.
            raise NotImplementedError(
                "sglang-mooncake writes into the KV pool that it was given when the server started:"
                " start with --disaggregation-decode-host-receive-threshold 1"
            )
        if aux_index is None:
            self._side.fail(
                self._room,
                "the decode server's scheduler allocated no metadata slot for the request",
            )
            return
        pages = np.array(kv_indices, dtype=np.int64)
        if not self.kv_mgr.enable_deferred_decode_kv_release:
            self._pages = pages
        self._side.name_pages(
            self._room,
            pages,
            aux_index,
            decode_prefix_len or 0,
            state_lists(state_indices),
            None if device_kv_indices is None else np.array(device_kv_indices, dtype=np.int64),
        )

    def poll(self) -> int:
        with self.kv_mgr.recorder.scheduler_call("poll"):
            if self.conclude_state is not None:
                return self.conclude_state
            state = self._room.view.state
            if state is RoomState.OPEN and not self._chosen:
                self._side.check_served(self._room, self.bootstrap_addr)
            if state is RoomState.REQUESTED and self._side.has_arrived(self._room):
                self._side.arrived(self._room)
                self.conclude_state = KVPoll.Success
                return int(KVPoll.Success)
            known = KVPoll.WaitingForInput if self._room.nameable else _POLL.get(state)
            status = int(KVPoll.Failed if known is None else known)
            if status in (KVPoll.Success, KVPoll.Failed):
                self.conclude_state = status
            return status

    def failure_exception(self) -> None:
        """Raises the reason.

        With SGLang's deferred release (the default) the pages stay reserved until
        `KVManager.is_abort_release_safe`, and this does not wait. Without it SGLang uses them again
        right after this call, so it waits until nothing can land in them: as a rule less than a
        millisecond, at most `FENCE_NOW_TIMEOUT_S`. If a write is stuck in the middle for longer
        than that, an error in the log names the pages, which SGLang uses all the same: it leaves
        no way to hold them back. The write that is stuck can still land in them, no other can.
        """
        self.conclude_state = KVPoll.Failed
        room, reason = self._room, self._room.view.reason
        self._side.abort(room, "aborted, since another rank of the decode server failed")
        if not self.kv_mgr.enable_deferred_decode_kv_release and room.named:
            self._wait_for_fence()
        raise KVTransferError(
            self.bootstrap_room,
            reason or "aborted, since another rank of the group failed",
            is_from_another_rank=reason is None,
        )

    def _wait_for_fence(self) -> None:
        if not self._side.wait_until_safe(self._room, FENCE_NOW_TIMEOUT_S):
            logger.critical(
                "room %d: a write into its pages has not ended within %g s, and SGLang uses them "
                "again now: what other requests cache there may be overwritten. Pages: %s. Without "
                "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0 they would stay reserved",
                self.bootstrap_room,
                FENCE_NOW_TIMEOUT_S,
                self._pages,
            )

    @property
    def abort_notified(self) -> bool:
        """SGLang: whether the pages of this failed request must be kept until they are safe. Those
        that the loop has not published yet count, too: it may be about to. Where its ranks must
        agree, all hold what they have named, as they name at the same steps."""
        room = self._room
        return room.named if self.kv_mgr.ranks_must_agree else not room.releasable

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang calls this for failed rooms that need not be kept; ending them is all there is."""
        del force_arm
        self._side.abort(self._room, "aborted, since another rank of the decode server failed")

    def is_abort_release_safe(self) -> bool:
        return self._room.releasable

    def abort(self) -> None:
        problem = self._side.instances.problem(self.bootstrap_addr)
        if self._room.view.state is RoomState.OPEN and problem is not None:
            # SGLang gives up on an instance that it cannot get to know; say why it could not.
            self._side.fail(self._room, f"prefill instance at {self.bootstrap_addr}: {problem}")
        else:
            self._side.abort(self._room, "aborted by the scheduler of the decode server")

    @property
    def ended(self) -> bool:
        """For the manager: whether the room was given up, or is over. Any thread may ask."""
        return self._room.withdrawn or self._room.view.over

    def fail(self, reason: str) -> None:
        """For the manager: this room cannot succeed any more."""
        self._side.fail(self._room, reason)

    def clear(self) -> None:
        if self.conclude_state is None and self._room.named and not self.ended:
            # Some releases release the pages without a word (`differences.py`): nothing uses them
            # before this returns.
            self._side.abort(self._room, "given up by the scheduler of the decode server")
            if not self.kv_mgr.enable_deferred_decode_kv_release:
                self._wait_for_fence()
        self.kv_mgr.untrack(self._room)
        self._side.close_room(self._room)
