# SPDX-License-Identifier: Apache-2.0
"""Our receiver when a request fails: which pages SGLang may use again, and when."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def receiver():
    """One that has named its pages, with deferred release switched off."""
    from handover import handover, until

    from sglang_mooncake.rooms.states import RoomState
    from sglang_mooncake.sglang.manager import KVManager
    from sglang_mooncake.sglang.receiver import KVReceiver

    with handover() as pair:
        pair.decode.know(pair.address)
        manager = KVManager.__new__(KVManager)
        manager.decode_side, manager._rooms = pair.decode.side, {}
        manager.enable_deferred_decode_kv_release = False
        manager.recorder = SimpleNamespace(scheduler_call=lambda name: nullcontext())
        made = KVReceiver(manager, pair.address, 7)
        made.init(0)
        until(lambda: made._room.view.state is RoomState.READY, "it is ready")
        made.send_metadata(np.array([4, 5], np.int32), 0, decode_prefix_len=0)
        assert made.abort_notified
        yield made


def _broken(room):
    from sglang_mooncake.rooms.events import Broken

    return Broken(room, "a rank died")


def test_pages_may_be_named_in_the_step_that_chooses_linked_sources(receiver):
    from handover import until

    from sglang_mooncake.rooms.states import RoomState
    from sglang_mooncake.sglang.receiver import KVReceiver
    from sglang_mooncake.sglang.seam import KVPoll

    another = KVReceiver(receiver.kv_mgr, receiver.bootstrap_addr, 8)
    assert another.poll() == KVPoll.Bootstrapping
    another.init(0)
    assert another.poll() == KVPoll.WaitingForInput, "whatever the loop has heard of it by now"
    another.send_metadata(np.array([6], np.int32), 1, decode_prefix_len=0)
    until(lambda: another._room.view.state is RoomState.REQUESTED, "its pages are asked for")
    assert another.poll() == KVPoll.Transferring


def test_a_receiver_that_was_given_up_has_ended_at_once(receiver):
    """A retracted request that waits to be computed again is left out then."""
    from handover import until

    from sglang_mooncake.sglang.receiver import KVReceiver

    assert not receiver.ended
    receiver.abort()
    assert receiver.ended
    over = KVReceiver(receiver.kv_mgr, receiver.bootstrap_addr, 9)
    over._side._loop.post(_broken(over._room))
    until(lambda: over.ended, "its end is known")
    assert not over._room.withdrawn, "by the loop"


def test_without_deferred_release_the_failure_comes_when_the_pages_are_safe(receiver, monkeypatch):
    from sglang_mooncake.sglang.seam import KVTransferError

    monkeypatch.setattr("sglang_mooncake.sglang.receiver.FENCE_NOW_TIMEOUT_S", 60.0)
    with pytest.raises(KVTransferError) as caught:
        receiver.failure_exception()
    assert caught.value.is_from_another_rank
    # SGLang's tests know a request that was not served by this word.
    assert "abort" in str(caught.value)
    assert receiver._room.view.safe
    assert not receiver.abort_notified
    assert receiver.kv_mgr.is_abort_release_safe(7, 0)


def test_a_write_that_is_stuck_does_not_hide_the_transfers_error_and_the_log_names_the_pages(
    receiver, monkeypatch, caplog
):
    from handover import until

    import te
    from sglang_mooncake.rooms.states import RoomState
    from sglang_mooncake.sglang.seam import KVTransferError

    def late(tag: int, timeout_s: float) -> None:
        raise te.FenceTimeout("stuck")

    monkeypatch.setattr("sglang_mooncake.sglang.receiver.FENCE_NOW_TIMEOUT_S", 0.2)
    until(lambda: receiver._room.view.exposed, "its pages are published")
    fencer = receiver._side._fencer
    with monkeypatch.context() as patch:
        patch.setattr(fencer, "_fence", late)
        receiver._side.fail(receiver._room, "out of memory")
        until(lambda: receiver._room.view.state is RoomState.ENDING, "its end is decided")
        with caplog.at_level(logging.CRITICAL), pytest.raises(KVTransferError) as caught:
            receiver.failure_exception()
        assert "out of memory" in str(caught.value)
        assert "Pages: [4 5]" in caplog.text
        assert not receiver.kv_mgr.is_abort_release_safe(7, 0)
        receiver.clear()
    until(lambda: receiver._room.view.safe, "the fence is confirmed after all")


def test_a_room_that_is_cleared_without_a_word_is_fenced_first(receiver):
    """As some releases do it when HiCache cannot restore a prefix: the pages are free already."""
    assert receiver.conclude_state is None
    receiver.clear()
    assert receiver._room.view.safe


def test_ranks_that_must_agree_hold_whatever_they_have_named(receiver, monkeypatch):
    from sglang_mooncake.sglang import manager
    from sglang_mooncake.sglang.seam import KVTransferError

    receiver.kv_mgr.ranks_must_agree = True
    with pytest.raises(KVTransferError):
        receiver.failure_exception()
    assert receiver._room.view.safe
    assert receiver.abort_notified, "another rank may have to wait"
    said = []
    monkeypatch.setattr(manager, "agreed", lambda flag: said.append(flag) or False)
    assert not receiver.kv_mgr.is_abort_release_safe(7, 0)
    assert said == [True]


def unmoved(state):
    """A receiver whose room is in this state, and of which SGLang has named no pages."""
    from sglang_mooncake.rooms.room import Room, RoomView
    from sglang_mooncake.sglang.receiver import KVReceiver

    made = KVReceiver.__new__(KVReceiver)
    made.kv_mgr = SimpleNamespace(
        recorder=SimpleNamespace(scheduler_call=lambda name: nullcontext()),
        enable_deferred_decode_kv_release=True,
    )
    made._side = SimpleNamespace(
        abort=lambda room, reason: None, check_served=lambda room, address: None
    )
    made.bootstrap_room, made.conclude_state = 7, None
    made.bootstrap_addr, made._chosen = "127.0.0.1:8998", False
    made._room = Room(7, 0.0, RoomView(state, "a rank died"))
    return made


def test_sglang_takes_every_state_that_a_room_without_pages_can_show(monkeypatch):
    """`rooms_automata.UNMOVED` is what the model of the rooms lets other threads see."""
    from rooms_automata import UNMOVED
    from sglang.srt.disaggregation import decode

    from sglang_mooncake.rooms.states import RoomState

    def poll(receivers, group):
        return [one.poll() for one in receivers]

    monkeypatch.setattr(decode, "poll_and_all_reduce", poll)
    monkeypatch.setattr(decode, "prepare_abort", lambda request, message, status_code: None)

    def handshake(state):
        stats = SimpleNamespace(set_bootstrap_done_time=lambda: None)
        request = SimpleNamespace(rid="r", bootstrap_room=7, time_stats=stats)
        entry = SimpleNamespace(req=request, kv_receiver=unmoved(state), waiting_for_input=False)
        queue = SimpleNamespace(
            queue=[entry],
            pp_size=1,
            tp_rank=0,
            gloo_group=None,
            scheduler=SimpleNamespace(metrics_reporter=SimpleNamespace(enable_metrics=False)),
        )
        decode.DecodePreallocQueue._update_handshake_waiters(queue)

    for state in UNMOVED:
        handshake(state)
    with pytest.raises(ValueError, match="Unexpected poll"):
        handshake(RoomState.ENDING)
