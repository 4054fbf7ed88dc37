# SPDX-License-Identifier: Apache-2.0
"""The hooks on SGLang's forwards: its own classes, with a model of nothing but layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from forwards import LAYERS, Model, Seeming, Sink, request, sender

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def model(monkeypatch) -> Iterator[Model]:
    """Hooked, and after the first forward, which is only looked at."""
    pytest.importorskip("torch")
    from sglang_mooncake.sglang.layerwise import internals

    made = Model(Sink(), False, monkeypatch)
    monkeypatch.setattr(internals, "INTERNALS", ())
    assert made.layerwise.install()
    made.run(request(8))
    assert made.sink.sent == []
    yield made
    made.layerwise.close()


def test_layers_are_handed_over_when_attention_of_a_later_one_begins(model):
    seen: list[tuple[int, int]] = []
    model.at_layer = lambda number: seen.append((number, len(model.sink.sent)))
    req = request(10, row=1)
    assert model.run(req) == "logits"
    assert model.ran == list(range(LAYERS))
    room = req.disagg_kv_sender.room
    assert {(sent[0], *map(str, sent[1:3])) for sent in model.sink.sent} == {
        (room, str([16, 17, 18]), "0")
    }, "the last page is partial, and goes with the prompt's last chunk"
    belows = [below for *_, below, _events in model.sink.sent]
    assert belows == sorted(set(belows))
    assert len(belows) > 8
    assert belows[-1] == LAYERS, "what is left goes when the forward returns"
    assert all(model.sink.wakes)
    for number, sent in seen:
        assert all(below <= number for below in belows[:sent]), "never a layer that has not run"
    assert len(model.sink.hooked) == 1


def test_the_requests_of_a_batch_wake_the_loop_once_at_each_border(model):
    model.run(request(16, row=1), request(8, row=2), request(12, row=0))
    assert len(model.sink.wakes) > 3
    assert model.sink.wakes == [False, False, True] * (len(model.sink.wakes) // 3)


def test_pages_that_a_chunk_does_not_fill_go_with_the_next_one(model):
    req = request(tokens=20, end=10, sent=4, row=2)
    model.run(req)
    assert {str(sent[1:3]) for sent in model.sink.sent} == {str(([33], 1))}
    assert req.disagg_kv_sender.told_tokens == 8


def test_the_chunk_behind_one_that_is_not_sent_yet_begins_behind_it(model):
    """Overlap scheduling: the second forward is launched before the first chunk is sent."""
    req = request(tokens=20, end=10)
    model.run(req)
    model.sink.sent.clear()
    req.prefix_len, req.extend_end = 10, 20
    model.run(req)
    assert {str(sent[1:3]) for sent in model.sink.sent} == {str(([2, 3, 4], 2))}


def test_the_chunk_behind_one_that_is_sent_begins_there(model):
    req = request(tokens=20, end=10)
    model.run(req)
    model.sink.sent.clear()
    req.start_send_idx, req.disagg_kv_sender.next_page = 8, 2
    req.prefix_len, req.extend_end = 10, 20
    model.run(req)
    assert {str(sent[1:3]) for sent in model.sink.sent} == {str(([2, 3, 4], 2))}


def test_a_chunk_that_is_computed_again_goes_the_old_way(model):
    req = request(tokens=20, end=10)
    model.run(req)
    model.sink.sent.clear()
    model.run(req)
    assert model.sink.sent == []
    assert model.sink.fallbacks["chunks that are computed again"] == 1


@pytest.mark.parametrize(
    ("req", "reason"),
    [
        (lambda: request(8, disagg_kv_sender=object()), "health checks"),
        (lambda: request(8, disagg_kv_sender=None), "health checks"),
        (lambda: request(8, pending_bootstrap=True), "not known yet"),
        (lambda: request(8, disagg_kv_sender=sender(aux_slot=None)), "not known yet"),
        (lambda: request(8, to_finish=object()), "aborted"),
        (lambda: request(8, finished_reason=object()), "aborted"),
        (lambda: request(12, sent=6), "within a page"),
        (lambda: request(12, end=3), "without a whole page"),
    ],
)
def test_requests_that_cannot_go_early_are_left_out_and_counted(model, req, reason):
    other = request(8, row=3)
    model.run(req(), other)
    assert {sent[0] for sent in model.sink.sent} == {other.disagg_kv_sender.room}
    model.sink.sent.clear()
    model.run(req())
    assert model.sink.sent == []
    (counted,) = [key for key in model.sink.fallbacks if reason in key]
    assert model.sink.fallbacks[counted] == 2


def test_batches_of_other_kinds_are_left_alone(model):
    for mode in ("DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "SPLIT_PREFILL", "PREBUILT"):
        model.run(request(8), mode=mode)
    model.run(request(8), load=3)
    model.run()
    assert model.sink.sent == []
    assert [key for key in model.sink.fallbacks if "HiCache" in key]


def test_a_draft_models_forward_says_nothing(model):
    from sglang.srt.model_executor.model_runner import ModelRunner

    draft = ModelRunner.__new__(ModelRunner)
    draft.is_draft_worker, draft.attn_backend = True, model.backend()
    model.runners = [draft, model.runner, draft]
    model.run(request(8))
    belows = [below for *_, below, _events in model.sink.sent]
    assert belows == sorted(set(belows))
    model.runners = [draft]
    model.sink.sent.clear()
    model.run(request(8))
    model.runner.forward(None)  # outside any batch, as for a graph
    assert model.sink.sent == []


def test_short_prompts_take_the_old_way(model):
    model.layerwise._pace = Seeming(1e-4)
    model.run(request(8))
    assert model.sink.sent == []
    assert model.sink.fallbacks["forwards too short to gain anything"] == 1


def test_a_forward_whose_layers_are_not_seen_is_counted(model):
    """As in a graph of the whole forward."""
    model.layers = []
    model.run(request(8))
    assert model.sink.sent == []
    assert model.sink.fallbacks["forwards whose layers the hooks do not see"] == 1


def test_layers_that_run_again_after_they_were_sent_fail_the_request(model):
    model.layers = [*range(LAYERS), 0, 1]
    req = request(8)
    model.run(req)
    assert [room for room, _ in model.sink.failed] == [req.disagg_kv_sender.room]
    assert "ran again" in model.sink.failed[0][1]
    model.sink.sent.clear()
    model.run(request(8))
    assert model.sink.sent == []


def test_a_model_that_runs_its_layers_in_another_order_is_served_the_old_way(monkeypatch):
    from sglang_mooncake.sglang.layerwise import internals

    monkeypatch.setattr(internals, "INTERNALS", ())
    model = Model(Sink(), False, monkeypatch)
    model.layers = [1, 0, 2]
    model.layerwise.install()
    try:
        for _ in range(2):
            assert model.run(request(8)) == "logits"
    finally:
        model.layerwise.close()
    assert model.sink.sent == []
    assert "order" in model.layerwise.off


@pytest.mark.parametrize(
    ("layers", "by_position", "goes"),
    [
        (range(LAYERS), True, True),
        (range(LAYERS // 2), True, False),  # layers with windows have caches of their own
        (range(1, LAYERS, 4), False, True),  # SGLang gives the numbers
        (range(1, LAYERS + 4, 4), False, False),
    ],
)
def test_layers_must_be_counted_by_attention_as_by_the_layout(
    monkeypatch, layers, by_position, goes
):
    from sglang_mooncake.sglang.layerwise import internals

    monkeypatch.setattr(internals, "INTERNALS", ())
    model = Model(Sink(), False, monkeypatch)
    model.layerwise._kv_layers = frozenset(layers)
    model.layerwise._by_position = by_position
    model.layerwise.install()
    try:
        for _ in range(2):
            assert model.run(request(8)) == "logits"
    finally:
        off = model.layerwise.off
        model.layerwise.close()
    assert bool(model.sink.sent) == goes
    assert ("caches are those of" in (off or "")) != goes


def test_groups_are_cut_by_layers_with_kv(monkeypatch):
    """Of a model with linear attention in three of four layers, no group is of those alone."""
    from sglang_mooncake.sglang.layerwise import internals

    monkeypatch.setattr(internals, "INTERNALS", ())
    model = Model(Sink(), False, monkeypatch)
    model.layerwise._kv_layers = frozenset(range(3, LAYERS, 4))
    model.layerwise._by_position = False
    model.layerwise.install()
    try:
        for _ in range(2):
            model.run(request(8))
    finally:
        model.layerwise.close()
    belows = [below for *_, below, _events in model.sink.sent]
    assert belows == [7, 15, LAYERS], "each when attention of a layer with KV begins"


def test_an_error_in_the_hooks_leaves_the_forward_alone(model, caplog):
    model.sink.error = ZeroDivisionError("a bug")
    with caplog.at_level(logging.ERROR):
        assert model.run(request(8)) == "logits"
    assert model.ran == list(range(LAYERS))
    assert "a bug" in caplog.text
    model.sink.error = None
    model.run(request(8))
    assert model.sink.sent == []
    model.layerwise.off = None
    model.scheduler.req_to_token_pool = None
    assert model.run(request(8)) == "logits"
    assert model.layerwise.off is not None


def test_an_error_in_the_forward_is_sglangs_own(model):
    def fails(number: int) -> None:
        if number == 9:
            raise MemoryError("of the device")

    model.at_layer = fails
    with pytest.raises(MemoryError):
        model.run(request(8))
    model.at_layer = None
    model.sink.sent.clear()
    model.run(request(8))
    assert model.sink.sent[-1][3] == LAYERS


def test_another_pool_or_device_is_served_the_old_way(model, monkeypatch):
    class Another(type(model.runner.attn_backend)):
        pass

    model.runner.attn_backend = Another()
    for change in ("pool", "device", "layer"):
        model.layerwise.off = None
        with monkeypatch.context() as patch:
            if change == "pool":
                patch.setattr(model, "pool", object())
            elif change == "device":
                patch.setattr(model.runner, "device", "npu")
            else:
                patch.setattr(model.backend, "forward", lambda self, *args, **kwargs: None)
            model.run(request(8))
        assert model.sink.sent == []
        assert model.layerwise.off is not None
        assert {"pool": "KV pool", "device": "npu", "layer": "takes no layer"}[
            change
        ] in model.layerwise.off


def test_another_backend_of_the_same_server_is_hooked_too(model):
    class Another(type(model.runner.attn_backend)):
        pass

    model.runner.attn_backend = Another()
    model.run(request(8))
    belows = [below for *_, below, _events in model.sink.sent]
    assert belows[-1] == LAYERS
    assert belows == sorted(set(belows))


def test_close_takes_the_hooks_off(model):
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    assert (Scheduler.run_batch, ModelRunner.forward) != model.originals
    model.layerwise.close()
    assert (Scheduler.run_batch, ModelRunner.forward) == model.originals
    assert model.backend.forward is AttentionBackend.forward
    model.layerwise.close()
    model.run(request(8))
    assert model.sink.sent == []


def test_hooks_that_others_have_wrapped_stay_and_do_nothing(model):
    from sglang.srt.managers.scheduler import Scheduler

    ours = Scheduler.run_batch
    Scheduler.run_batch = lambda *args: ours(*args)
    model.layerwise.close()
    assert model.run(request(8)) == "logits"
    assert model.sink.sent == []
