# SPDX-License-Identifier: Apache-2.0
"""Spans of hand-overs between real ranks, below those that SGLang's own trace contexts make."""

from __future__ import annotations

import itertools
import logging
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

ROOM = 1 << 40


@pytest.fixture
def exported(monkeypatch):
    """SGLang's tracing is on in this process; what it exports is kept here."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from sglang.srt.observability import trace

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", provider.get_tracer("sglang server"))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def observability(monkeypatch):
    """SGLang's settings, as with --enable-trace."""
    settings = SimpleNamespace(enable_trace=True, trace_modules="request,mooncake")
    monkeypatch.setattr("sglang_mooncake.sglang.tracing.get_observability", lambda: settings)
    return settings


def request(level: int | None = None, header: dict[str, str] | None = None) -> SimpleNamespace:
    """What a scheduler holds of a request: its trace was begun in SGLang's main process."""
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats, SchedulerReqTimeStats

    begun = APIServerReqTimeStats()
    begun.init_trace_ctx("a request", ROOM, header)
    if level is not None:
        begun.trace_ctx.trace_level = level
    if begun.trace_ctx.tracing_enable:
        begun.trace_ctx.trace_req_start()
    arrived = pickle.loads(pickle.dumps(begun))
    return SimpleNamespace(
        rid="a request",
        begun=begun,
        time_stats=SchedulerReqTimeStats.new_from_obj(arrived),
        bootstrap_host="127.0.0.1",
        bootstrap_port=8998,
        bootstrap_room=ROOM,
        disagg_prefill_dp_rank=0,
        origin_input_ids=[1],
        sampling_params=SimpleNamespace(max_new_tokens=8),
    )


@pytest.fixture
def ranks(exported, observability, monkeypatch):
    """A pair of ranks that are traced, behind SGLang's own queues."""
    from handover import handover
    from sglang.srt.disaggregation import decode, prefill

    from sglang_mooncake.sglang.plugin import serving_classes
    from sglang_mooncake.sglang.tracing import open_tracing

    def classes(backend, kind):
        return serving_classes()[kind.value]

    # What another manager in this process has hooked is put back.
    monkeypatch.setattr(
        prefill.PrefillBootstrapQueue,
        "create_sender",
        prefill.PrefillBootstrapQueue.create_sender,
    )
    monkeypatch.setattr(
        decode.DecodePreallocQueue,
        "_create_receiver_and_enqueue",
        decode.DecodePreallocQueue._create_receiver_and_enqueue,
    )
    for module in (prefill, decode):
        monkeypatch.setattr(module, "get_kv_class", classes)
    with handover() as pair:
        pair.decode.know(pair.address)
        senders = prefill.PrefillBootstrapQueue.__new__(prefill.PrefillBootstrapQueue)
        senders.transfer_backend, senders.max_input_len = None, 100
        senders.bootstrap_port = 8998
        receivers = decode.DecodePreallocQueue.__new__(decode.DecodePreallocQueue)
        receivers.transfer_backend, receivers.queue = None, []
        for queue, rank, role in (
            (senders, pair.prefill, "prefill"),
            (receivers, pair.decode, "decode"),
        ):
            queue.kv_manager = SimpleNamespace(
                prefill_side=rank.side,
                named_port=None,
                decode_side=rank.side,
                context=rank.side._context,
                recorder=rank.recorder,
                pins_host_memory=False,
                stages=None,
                track=lambda room: None,
                untrack=lambda room: None,
                enable_deferred_decode_kv_release=True,
                tracing=open_tracing(role, rank.recorder),
            )
        made = SimpleNamespace(pair=pair, senders=senders, receivers=receivers)
        yield made
        for queue in (senders, receivers):
            if queue.kv_manager.tracing is not None:
                queue.kv_manager.tracing.close()


def told(ranks, exported):
    """Spans by name, once each tracing has said all; of SGLang's own, those that have ended."""
    for queue in (ranks.senders, ranks.receivers):
        queue.kv_manager.tracing.close()
    return {span.name: span for span in exported.get_finished_spans()}


def hand_over(ranks, sent, received):
    """A request of three pages, by SGLang's queues."""
    import numpy as np
    from handover import until

    from sglang_mooncake.rooms.states import RoomState

    pair = ranks.pair
    ranks.senders.create_sender(sent, 1)
    received.bootstrap_port = int(pair.address.rpartition(":")[2])
    receiver = ranks.receivers._create_receiver_and_enqueue(received).kv_receiver
    receiver.init(0)
    room, sender = receiver._room, sent.disagg_kv_sender
    until(lambda: room.nameable, "the decode room is ready")
    receiver.send_metadata(np.array([10, 11, 12], np.int32), 0, decode_prefix_len=0)
    until(lambda: sender.room.view.state is RoomState.READY, "the prefill room is ready")
    sender.init(3, 0)
    sender.send(np.array([0, 1, 2], np.int32), [])
    # As the scheduler does, which sees by that what has arrived.
    until(lambda: sender.poll() == receiver.poll() == 4, "both are done")
    sender.clear()
    receiver.clear()
    for queue, one in ((ranks.senders, pair.prefill), (ranks.receivers, pair.decode)):
        until(lambda one=one: one.recorder.rooms()["done"], "it is over")
        until(lambda queue=queue: not queue.kv_manager.tracing._parents, "nothing is kept of it")


def test_both_sides_spans_are_in_the_requests_trace_below_sglangs(ranks, exported):
    sent, received = request(), request()
    hand_over(ranks, sent, received)
    spans = told(ranks, exported)
    for name, req in (("send KV cache", sent), ("receive KV cache", received)):
        span, parent = spans[name], req.time_stats.trace_ctx.thread_context.thread_span
        assert span.context.trace_id == req.begun.trace_ctx.root_span.context.trace_id
        assert span.parent.span_id == parent.context.span_id
        assert parent.start_time <= span.start_time < span.end_time
        assert span.attributes["bootstrap_room"] == hex(ROOM)
        assert span.attributes["sglang_mooncake.pages"] == 3
        assert span.status.status_code.name == "UNSET"
        below = [
            one
            for one in exported.get_finished_spans()
            if one.parent is not None and one.parent.span_id == span.context.span_id
        ]
        assert below[0].name == "bootstrap"
        assert below[0].start_time == span.start_time
        assert below[-1].end_time == span.end_time
        times = [(one.start_time, one.end_time) for one in below]
        assert all(one[1] == other[0] for one, other in itertools.pairwise(times))
        assert len(below) == 5
    assert [event.name for event in spans["send KV cache"].events] == ["write landed"]


def test_a_request_that_failed_is_an_error_with_its_reason(ranks, exported):
    from handover import until

    req = request()
    ranks.senders.create_sender(req, 1)
    assert len(ranks.senders.kv_manager.tracing._parents) == 1
    of_nobody = ranks.pair.prefill.side.new_room(ROOM + 1)
    assert of_nobody.serial not in ranks.senders.kv_manager.tracing._parents
    ranks.pair.prefill.side.fail(req.disagg_kv_sender.room, "out of memory")
    until(lambda: ranks.pair.prefill.recorder.rooms()["failed"], "it is over")
    span = told(ranks, exported)["send KV cache"]
    assert span.status.status_code.name == "ERROR"
    assert span.status.description == "out of memory"
    assert span.attributes["error.type"] == "failed"


@pytest.mark.parametrize(
    "untraced",
    [
        {"level": 0},
        {"header": {"traceparent": f"00-{7:032x}-{9:016x}-00"}},  # its client does not sample it
    ],
    ids=str,
)
def test_a_request_that_is_not_traced_has_no_spans(untraced, ranks, exported):
    req = request(**untraced)
    ranks.senders.create_sender(req, 1)
    assert not ranks.senders.kv_manager.tracing._parents
    ranks.pair.prefill.side.fail(req.disagg_kv_sender.room, "out of memory")
    assert "send KV cache" not in told(ranks, exported)


def test_with_asynchronous_tracing_the_requests_root_is_the_parent(ranks, exported, monkeypatch):
    """SGLang's exporter process makes the rank's own span there, under an id of its own."""
    from handover import until
    from sglang.srt.observability import trace_async

    # Only asked whether it lives: without its address, what it would be sent is dropped.
    alive = SimpleNamespace(is_alive=lambda: True)
    monkeypatch.setattr(trace_async, "_exporter_process", alive)
    req = request()
    assert isinstance(req.time_stats.trace_ctx, trace_async.TraceReqContextAsync)
    ranks.senders.create_sender(req, 1)
    ranks.pair.prefill.side.fail(req.disagg_kv_sender.room, "out of memory")
    until(lambda: ranks.pair.prefill.recorder.rooms()["failed"], "it is over")
    span, root = told(ranks, exported)["send KV cache"], req.begun.trace_ctx.root_span
    assert span.parent.span_id == root.context.span_id
    assert span.context.trace_id == root.context.trace_id


def test_trace_contexts_of_another_release_cost_the_spans_and_no_request(ranks, exported, caplog):
    for _ in range(2):
        req = request()
        req.time_stats.trace_ctx = SimpleNamespace(tracing_enable=True)
        assert ranks.senders.create_sender(req, 1)
    assert caplog.text.count("this version of SGLang has other trace contexts") == 1
    assert not ranks.senders.kv_manager.tracing._parents


def test_a_sdk_that_fails_costs_one_rooms_spans(ranks, exported, monkeypatch, caplog):
    from handover import until

    tracing = ranks.senders.kv_manager.tracing
    real, failing = tracing._make, [OSError("of the SDK")]

    def make(one, parent):
        if failing:
            raise failing.pop()
        real(one, parent)

    monkeypatch.setattr(tracing, "_make", make)
    for _ in range(2):
        req = request()
        ranks.senders.create_sender(req, 1)
        ranks.pair.prefill.side.fail(req.disagg_kv_sender.room, "out of memory")
    until(lambda: ranks.pair.prefill.recorder.rooms()["failed"] == 2, "both are over")
    assert "send KV cache" in told(ranks, exported)
    assert f"cannot make the OpenTelemetry spans of room {ROOM}" in caplog.text


def test_without_enable_trace_nothing_is_hooked(observability, exported, caplog):
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    from sglang_mooncake.sglang.tracing import open_tracing

    before = PrefillBootstrapQueue.create_sender
    observability.enable_trace = False
    assert open_tracing("prefill", None) is None
    assert PrefillBootstrapQueue.create_sender is before
    assert not caplog.text


@pytest.mark.parametrize("modules", ["request", "mooncake", ""])
def test_modules_that_are_left_out_are_named(modules, observability, exported, caplog):
    from sglang_mooncake.sglang.tracing import open_tracing

    observability.trace_modules = modules
    with caplog.at_level(logging.WARNING):
        assert open_tracing("prefill", None) is None
    assert f"--trace-modules is {modules!r}" in caplog.text
    assert "--trace-modules request,mooncake" in caplog.text


def test_without_sglangs_tracing_the_extra_to_install_is_named(observability, caplog):
    from sglang_mooncake.sglang.tracing import open_tracing

    observability.trace_modules = None
    assert open_tracing("prefill", None) is None
    assert "pip install 'sglang-mooncake[trace]'" in caplog.text


class _WithoutIt:
    """A queue that makes its senders elsewhere."""


class _OfOtherArguments:
    def create_sender(self, room):
        return nullcontext()


@pytest.mark.parametrize("another", [_WithoutIt, _OfOtherArguments])
def test_a_queue_that_the_hook_does_not_fit_costs_the_spans_alone(
    another, observability, exported, monkeypatch, caplog
):
    from sglang.srt.disaggregation import prefill

    from sglang_mooncake.sglang.tracing import open_tracing

    monkeypatch.setattr(prefill, "PrefillBootstrapQueue", another)
    assert open_tracing("prefill", None) is None
    assert "has no PrefillBootstrapQueue.create_sender(req)" in caplog.text


def test_a_manager_without_tracing_is_served_by_a_queue_that_is_hooked(ranks, exported):
    """As after a role switch of a process, or for SGLang's fake transfers."""
    ranks.receivers.kv_manager.tracing, kept = None, ranks.receivers.kv_manager.tracing
    made = ranks.receivers._create_receiver_and_enqueue(request())
    assert ranks.receivers.queue == [made]
    ranks.receivers.kv_manager.tracing = kept
    assert not kept._parents
