# SPDX-License-Identifier: Apache-2.0
"""The hooks on forwards that run on a device's streams, later than the thread that launches them:
the stand-in's (tests/support/cpu_serving/shim)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from cpu_serving.servers import SHIM
from forwards import LAYERS, Model, Sink, request

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

BOUND_S = 30.0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """torch with the stand-in's streams, as in a server process."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(SHIM))
    import cpu_overlap
    import cpu_streams

    before = cpu_streams.device()
    cpu_streams.reset(cpu_streams.Device(seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "Event", cpu_streams.Event)
        patch.setattr(torch.cuda, "current_stream", cpu_streams.current_stream)
        patch.setattr(torch, "empty", cpu_overlap._pinning(torch.empty))
        yield SimpleNamespace(**vars(cpu_streams))
    cpu_streams.device().wait_all()
    cpu_streams.reset(before)
    for name in ("cpu_overlap", "cpu_published", "cpu_streams"):
        sys.modules.pop(name, None)


@pytest.fixture
def model(streams, monkeypatch) -> Iterator[Model]:
    """Hooked, and after the first forward, which is only looked at."""
    from sglang_mooncake.sglang.layerwise import internals

    made = Model(Sink(), True, monkeypatch)
    monkeypatch.setattr(internals, "INTERNALS", ())
    assert made.layerwise.install()
    made.run(request(8))
    yield made
    made.layerwise.close()


def test_groups_go_behind_events_between_the_layers_and_nobody_waits(model, streams):
    """The device stands still until the forward has been launched, and then does a layer at a
    time: the events of a group happen behind its last layer and before the next one."""
    opened, written = threading.Event(), []
    stepped, step = threading.Semaphore(0), threading.Semaphore(0)

    def write(number: int) -> None:
        assert step.acquire(timeout=BOUND_S)
        written.append(number)
        stepped.release()

    stream = streams.Stream()
    stream.launch(lambda: opened.wait(BOUND_S))
    model.at_layer = lambda number: stream.launch(lambda: write(number))
    with streams.StreamContext(stream):
        model.run(request(10, row=1))
    assert written == [], "the launching thread has waited for nothing"
    sent = list(zip(model.sink.sent, model.sink.given, strict=True))
    assert len(sent) > 8
    assert all(len(events) == 1 and not events[0].query() for _, (_, events) in sent)
    assert all(pages == [0, 0, 0] for (_, pages, *_), _ in sent), "not there yet"
    opened.set()
    for number in range(LAYERS):
        step.release()
        assert stepped.acquire(timeout=BOUND_S)
        for (_, _, _, below, _), (pages, (event,)) in sent:
            if event.query():
                # at_layer comes before attention of the layer, which is what tells: the layer's
                # own writing is launched by then.
                assert below <= number + 1
                assert pages.tolist() == [16, 17, 18]
            assert not event.query() or below - 1 <= number
    stream.synchronize()
    assert all(event.query() for _, (_, (event,)) in sent)


def test_the_time_of_a_forward_is_taken_from_its_stream(model, streams):
    from sglang_mooncake.layer_groups import ForwardPace

    model.layerwise._pace = ForwardPace()
    stream = streams.Stream()
    opened = threading.Event()
    with streams.StreamContext(stream):
        stream.launch(lambda: opened.wait(BOUND_S))
        model.run(request(10))
        model.run(request(10))
        assert model.layerwise._pace.forward_s(1) >= 0.0
        opened.set()
        stream.synchronize()
        model.run(request(10))
    assert model.layerwise._pace.forward_s(1000) > 0.0


def test_forwards_that_the_device_does_not_finish_are_not_piled_up(model, streams):
    stream = streams.Stream()
    opened = threading.Event()
    with streams.StreamContext(stream):
        stream.launch(lambda: opened.wait(BOUND_S))
        for _ in range(20):
            model.run(request(10))
    assert len(model.layerwise._untimed) < 10
    opened.set()
    stream.synchronize()
