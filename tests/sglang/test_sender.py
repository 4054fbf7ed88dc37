# SPDX-License-Identifier: Apache-2.0
"""SGLang's calls of a sender, over real ranks: what it sends early, and what it is told."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()


@pytest.fixture
def pair():
    from handover import handover

    with handover() as ranks:
        ranks.decode.know(ranks.address)
        yield ranks


def manager_of(side, named_port: int | None = None):
    """As much of a KVManager as senders use."""
    return SimpleNamespace(
        prefill_side=side,
        named_port=named_port,
        context=side._context,
        recorder=side._recorder,
        pins_host_memory=False,
        stages=None,
    )


def sender_and_view(pair, room: int, prefix: int = 0, pages: int = 3):
    from handover import until

    from sglang_mooncake.rooms.states import RoomState
    from sglang_mooncake.sglang.sender import KVSender

    manager = manager_of(pair.prefill.side)
    sender = KVSender(manager, pair.address, room, req_has_disagg_prefill_dp_rank=True)
    target = pair.decode.side.new_room(room)
    pair.decode.side.choose_sources(target, pair.address, 0)
    until(lambda: target.view.state is RoomState.READY, "the decode room is ready")
    pair.name_pages(target, list(range(10, 10 + pages)), aux=0, prefix=prefix)
    until(lambda: sender.room.view.state is RoomState.READY, "the prefill room is ready")
    return sender, target


def test_what_is_sent_early_is_not_overtaken_by_the_last_chunk(pair):
    from handover import until

    sender, target = sender_and_view(pair, 1)
    sender.init(3, aux_index=1)
    sender._early_send_wait_event = event = Event()
    sender.send(np.array([0, 1], np.int32))
    assert sender._early_send_wait_event is None, "it is of one chunk alone"
    sender.send(np.array([2], np.int32), state_indices=[])
    sender.poll()
    assert not pair.decode.side.has_arrived(target)
    event.happened.set()
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    np.testing.assert_array_equal(pair.target.kv[:, 10:13], pair.source.kv[:, :3])


def test_a_decode_rank_that_holds_more_tokens_than_the_prompt_has_fails_the_request(pair):
    from handover import until
    from sglang.srt.mem_cache.common import kv_to_page_num

    sender, target = sender_and_view(pair, 2, prefix=1_000)
    pages = kv_to_page_num(10 - sender.pop_decode_prefix_len(), 4)
    sender.init(pages, aux_index=1)
    until(lambda: sender.room.view.over and target.view.over, "both sides let go of the room")
    assert "holds 1000 tokens of the prompt, which has fewer" in (target.view.reason or "")


def test_sglang_takes_seconds_and_bytes_of_a_request_for_its_figures(pair):
    """As its prefill scheduler asks for them when the request is done."""
    from handover import LAYERS, PAGE_BYTES, until
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

    from sglang_mooncake.rooms.states import RoomState

    sender, target = sender_and_view(pair, 3)
    sender.init(3, aux_index=1)
    sender.send(np.array([0, 1], np.int32))
    assert sender.get_transfer_metric().transfer_latency_s is None
    sender.send(np.array([2], np.int32), state_indices=[])
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    pair.decode.side.arrived(target)
    until(lambda: sender.room.view.state is RoomState.DONE, "the prefill room is done")
    assert sender.poll() == KVPoll.Success
    nbytes = 3 * LAYERS * PAGE_BYTES
    assert sender.get_transfer_metric().transfer_total_bytes == nbytes
    stats = SchedulerReqTimeStats()
    figures = stats.compute_and_observe_kv_transfer_metrics(sender.get_transfer_metric())
    assert figures["total_mb"] == nbytes / 2**20
    assert figures["latency_ms"] == sender.get_transfer_metric().transfer_latency_s * 1000
    assert figures["speed_gb_s"] > 0


def test_a_request_that_failed_has_sent_nothing_that_counts(pair):
    from handover import until

    sender, target = sender_and_view(pair, 4)
    sender.init(3, aux_index=1)
    sender.abort()
    until(lambda: sender.room.view.over and target.view.over, "both sides let go of the room")
    metric = sender.get_transfer_metric()
    assert (metric.transfer_latency_s, metric.transfer_total_bytes) == (None, None)


@pytest.mark.parametrize(("beside", "is_elsewhere"), [(None, False), (0, False), (1, True)])
def test_a_request_that_names_another_port_than_its_servers_does_not_wait_long(
    pair, monkeypatch, beside, is_elsewhere
):
    from bootstrap_server import split_address
    from sglang_mooncake.sglang.sender import KVSender

    side = pair.prefill.side
    _, own = split_address(side._context.bootstrap_address)
    manager = manager_of(side, None if beside is None else own + beside)
    misdirected = []
    monkeypatch.setattr(side, "misdirect", lambda *what: misdirected.append(what))
    sender = KVSender(manager, pair.address, 5, req_has_disagg_prefill_dp_rank=True)
    assert [room for room, _ in misdirected] == [sender.room] * is_elsewhere
    sender.clear()


def unmoved(state):
    """A sender whose room is in this state, and of which SGLang has sent nothing."""
    from sglang_mooncake.rooms.room import Room, RoomView
    from sglang_mooncake.sglang.sender import KVSender

    made = KVSender.__new__(KVSender)
    made.kv_mgr = SimpleNamespace(
        recorder=SimpleNamespace(scheduler_call=lambda name: nullcontext())
    )
    made._side = SimpleNamespace(polled=lambda room, sent: None)
    made.next_page, made._num_pages = 0, None
    made.room = Room(7, 0.0, RoomView(state, "a rank died"))
    return made


def test_sglang_takes_every_state_that_a_room_can_show_of_which_nothing_was_sent(monkeypatch):
    """`rooms_automata.UNMOVED` is what the model of the rooms lets other threads see."""
    from rooms_automata import UNMOVED
    from sglang.srt.disaggregation import prefill

    from sglang_mooncake.rooms.states import RoomState

    def poll(senders, *groups):
        return [one.poll() for one in senders]

    monkeypatch.setattr(prefill, "poll_and_all_reduce_attn_cp_tp_group", poll)

    def bootstrap(state):
        stats = SimpleNamespace(set_wait_queue_entry_time=lambda: None)
        request = SimpleNamespace(
            rid="r", is_retracted=False, time_stats=stats, disagg_kv_sender=unmoved(state)
        )
        scheduler = SimpleNamespace(
            attn_cp_cpu_group=None,
            attn_tp_cpu_group=None,
            processed_tokens_counter=0,
            handle_bootstrap_failure=lambda request: None,
        )
        queue = SimpleNamespace(
            queue=[request],
            pp_size=1,
            scheduler=scheduler,
            scheduler_stage_metrics=None,
            finalize_bootstrap=lambda request: True,
            can_prefill_before_bootstrap=lambda request: False,
        )
        prefill.PrefillBootstrapQueue.pop_bootstrapped(queue)

    for state in UNMOVED - {RoomState.COMPUTING}:  # of decode alone
        bootstrap(state)
    with pytest.raises(RuntimeError, match="Unexpected poll"):
        bootstrap(RoomState.ENDING)
