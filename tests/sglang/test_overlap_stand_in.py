# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a GPU's streams, with which CPU servers run overlap scheduling, and for KV that
is there layer by layer."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from cpu_serving.overlap import Overlap, OverlapCounts, read_counts
from cpu_serving.servers import SHIM

pytestmark = pytest.mark.sglang

BOUND_S = 30.0
#: Until a process has imported torch, beside much else.
PROCESS_S = 100.0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the shim, as in a server process."""
    monkeypatch.syspath_prepend(str(SHIM))
    import cpu_overlap
    import cpu_published
    import cpu_streams

    before = cpu_streams.device()
    cpu_streams.reset(cpu_streams.Device(delay_s=0.002, seed=1))
    yield SimpleNamespace(overlap=cpu_overlap, published=cpu_published, **vars(cpu_streams))
    cpu_streams.device().wait_all()
    cpu_streams.reset(before)
    for name in ("cpu_overlap", "cpu_published", "cpu_streams"):
        sys.modules.pop(name)


class Gate:
    """Work on a stream that lasts until it is opened."""

    def __init__(self, stream) -> None:
        self._opened = threading.Event()
        stream.launch(self._pass)

    def _pass(self) -> None:
        assert self._opened.wait(BOUND_S)

    def open(self) -> None:
        self._opened.set()


def test_an_event_happens_when_its_stream_gets_there(streams):
    stream, seen = streams.Stream(), []
    gate = Gate(stream)
    for number in range(20):
        stream.launch(lambda number=number: seen.append(number))
    event = stream.record_event()
    stream.launch(lambda: seen.append("behind the event"))
    assert not event.query()
    assert seen == []
    gate.open()
    event.synchronize()
    assert event.query()
    assert seen[:20] == list(range(20))
    stream.synchronize()
    assert seen[20:] == ["behind the event"]


def test_an_event_that_was_never_recorded_has_happened(streams):
    event = streams.Event()
    event.synchronize()
    assert event.query()


def test_the_time_between_two_events_is_that_of_the_work_between_them(streams):
    stream = streams.Stream()
    first, second = streams.Event(enable_timing=True), streams.Event(enable_timing=True)
    first.record(stream)
    gate = Gate(stream)
    second.record(stream)
    first.synchronize()
    between = first.ops[0].done_s
    gate.open()
    second.synchronize()
    assert first.elapsed_time(second) == (second.ops[0].done_s - between) * 1000 > 0


def test_a_stream_waits_for_another_one_when_told_and_not_otherwise(streams):
    first, second, third = streams.Stream(), streams.Stream(), streams.Stream()
    gate = Gate(first)
    done = first.record_event()
    second.wait_event(done)
    third.wait_stream(second)  # which has nothing of its own to do
    behind = third.record_event()
    free = streams.Stream()
    waiting = streams.Event()
    waiting.record(free)
    free.wait_event(done)
    assert not behind.query()
    gate.open()
    behind.synchronize()
    assert done.query()
    waiting.synchronize()


def test_the_current_stream_is_that_of_the_thread(streams):
    stream, seen = streams.Stream(), []
    with streams.StreamContext(stream), streams.StreamContext(None):
        assert streams.current_stream() is stream
        thread = threading.Thread(target=lambda: seen.append(streams.current_stream()))
        thread.start()
        thread.join()
    assert seen == [streams.current_stream()]
    assert streams.current_stream() is not stream


def test_who_waits_is_told_when_a_piece_of_work_failed(streams):
    device = streams.Device()
    streams.reset(device)
    stream = streams.Stream()
    stream.launch(lambda: 1 / 0)
    event = stream.record_event()
    with pytest.raises(RuntimeError, match="failed"):
        event.synchronize()
    streams.reset(streams.Device())


def test_pinned_memory_is_filled_when_the_stream_gets_there(streams):
    stream = streams.Stream()
    gate = Gate(stream)
    source = torch.arange(1, 6)
    pinned = torch.empty(5, dtype=torch.int64).as_subclass(streams.overlap.PinnedTensor)
    assert pinned.is_pinned()
    with streams.StreamContext(stream):
        pinned.copy_(source, non_blocking=True)
        event = streams.Event()
        event.record()
    source.zero_()  # its memory is used anew
    assert pinned.numpy().tolist() == [0] * 5
    gate.open()
    event.synchronize()
    assert pinned.numpy().tolist() == [1, 2, 3, 4, 5]


class Pool:
    """As much of an MHA pool as is patched."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(8, 2), torch.zeros(8, 2)]

    def get_contiguous_buf_infos(self):
        return [b.data_ptr() for b in self.buffers], [b.nbytes for b in self.buffers], [8, 8]

    def write(self, layer: int, slots: torch.Tensor, value: float) -> None:
        self.buffers[layer][slots] = value


def written(pool, layer, slots, _value):
    return [pool.buffers[layer]], slots


@pytest.fixture
def pool(streams) -> Pool:
    """Its layers are seen when the stream gets there."""

    class Patched(Pool):
        pass

    def arrive(action) -> None:
        streams.current_stream().launch(action, is_layer=True)

    streams.published.publish(Patched, "write", lambda pool: pool.buffers, written, arrive)
    return Patched()


def published(pool: Pool, layer: int) -> list[float]:
    """What a reader finds at the address that the pool gives out, in the first column."""
    addresses, sizes, _items = pool.get_contiguous_buf_infos()
    assert addresses != [b.data_ptr() for b in pool.buffers]
    assert sizes == [b.nbytes for b in pool.buffers]
    copy = pool.publisher.copies[pool.buffers[layer].data_ptr()]
    assert copy.data_ptr() == addresses[layer]
    return copy[:, 0].tolist()


def test_readers_find_garbage_until_the_event_and_forwards_find_the_truth(streams, pool):
    junk, stream = float(streams.published.GARBAGE), streams.Stream()
    assert published(pool, 1) == [junk] * 8
    slots = torch.tensor([2, 5])
    with streams.StreamContext(stream):
        gate = Gate(stream)
        pool.write(1, slots, 1.0)
        first = stream.record_event()
        second_gate = Gate(stream)
        pool.write(1, torch.tensor([5]), 2.0)
        second = stream.record_event()
    slots.zero_()
    assert pool.buffers[1][:, 0].tolist() == [0, 0, 1, 0, 0, 2, 0, 0], "the next forward's reads"
    assert published(pool, 1) == [junk] * 8
    gate.open()
    first.synchronize()
    assert published(pool, 1)[2] == 1.0
    second_gate.open()
    second.synchronize()
    assert published(pool, 1) == [junk, junk, 1, junk, junk, 2, junk, junk]
    assert published(pool, 0) == [junk] * 8


def test_a_layer_is_there_at_its_event_and_later_layers_are_not(streams, pool):
    junk, stream = float(streams.published.GARBAGE), streams.Stream()
    published(pool, 0)
    slots = torch.tensor([2, 5])
    with streams.StreamContext(stream):
        for layer in range(2):  # of an earlier request
            pool.write(layer, slots, 1.0)
    stream.synchronize()
    with streams.StreamContext(stream):
        pool.publisher.begin(slots)
        gates, events = [], []
        for layer in range(2):
            gates.append(Gate(stream))
            pool.write(layer, slots, 2.0)
            events.append(stream.record_event())
    for layer in range(2):
        assert published(pool, layer)[2] == junk, "what the earlier request left is gone"
    gates[0].open()
    events[0].synchronize()
    assert published(pool, 0)[2] == 2.0
    assert published(pool, 1)[2] == junk
    gates[1].open()
    events[1].synchronize()
    assert published(pool, 1)[2] == 2.0


def test_without_streams_a_layer_is_there_once_it_is_written(streams):
    class Patched(Pool):
        pass

    published_ = streams.published
    garbled: list[int] = []
    published_.publish(
        Patched, "write", lambda pool: pool.buffers, written, published_.at_once, garbled.append
    )
    pool, slots = Patched(), torch.tensor([1, 4])
    published(pool, 0)
    for layer in range(2):
        pool.write(layer, slots, 1.0)
    pool.publisher.begin(slots)
    assert garbled == [4], "two slots of two buffers"
    pool.write(0, slots, 2.0)
    assert published(pool, 0)[4] == 2.0
    assert published(pool, 1)[4] == float(published_.GARBAGE)
    pool.write(1, slots, 2.0)
    assert published(pool, 1)[4] == 2.0


def test_every_forward_begins_with_garbage(streams, pool):
    class Runner:
        def __init__(self, pool) -> None:
            self.token_to_kv_pool, self.seen = pool, []

        def forward(self, batch, reinit_attn_backend=False):
            addresses, _sizes, _items = pool.get_contiguous_buf_infos()
            self.seen.append([published(pool, layer)[3] for layer in range(len(addresses))])
            return batch, reinit_attn_backend

    module = SimpleNamespace(ModelRunner=Runner)
    patch = streams.published.patches(streams.published.at_once)
    patch["sglang.srt.model_executor.model_runner"](module)
    junk = float(streams.published.GARBAGE)
    published(pool, 0)
    for layer in range(2):
        pool.write(layer, torch.tensor([3]), 1.0)
    streams.device().wait_all()
    batch = SimpleNamespace(out_cache_loc=torch.tensor([3]))
    runner = Runner(pool)
    assert runner.forward(batch, reinit_attn_backend=True) == (batch, True)
    windows = Runner(SimpleNamespace(full_kv_pool=pool))
    windows.forward(batch)
    idle = SimpleNamespace(out_cache_loc=None)
    runner.forward(idle)
    assert runner.seen == [[junk, junk]] * 2
    assert windows.seen == [[junk, junk]]
    assert list(inspect.signature(Runner.forward).parameters)[1] == "batch", "others look at it"


def test_layers_take_a_seeded_time(streams):
    def durations(seed: int) -> list[float]:
        device = streams.Device(layer_s=0.004, seed=seed)
        return [device.submit(None, [], is_layer=True).duration_s for _ in range(20)]

    assert durations(1) == durations(1) != durations(2)
    assert all(0.002 <= duration_s <= 0.004 for duration_s in durations(1))
    assert streams.Device(layer_s=0.004).submit(None, []).duration_s == 0.0


def test_a_pool_that_nobody_asked_for_its_addresses_is_left_alone(streams, pool):
    pool.write(0, torch.tensor([1]), 3.0)
    assert not hasattr(pool, "publisher")


def test_counts_are_summed_over_processes_and_read_while_they_run(streams, tmp_path):
    counts = streams.overlap.Counts(tmp_path)
    counts.add("events", 5)
    counts.add("waits", 2)
    (file,) = tmp_path.glob("*.counts")
    (tmp_path / "another.counts").write_bytes(file.read_bytes())
    counts.add("early_prefixes")
    counts.add("garbled_slots", 7)
    got = read_counts(tmp_path)
    assert got == OverlapCounts(
        events=10, waits=4, early_prefixes=1, pinned_copies=0, garbled_slots=7
    )
    assert got.taken


SCRIPT = """
import threading
import sitecustomize, torch, cpu_streams
from pathlib import Path
torch.cuda.synchronize()
opened = threading.Event()
stream = torch.cuda.Stream()
stream.launch(opened.wait)
event = torch.cuda.Event()
event.record(stream)
with torch.cuda.stream(stream):
    assert torch.cpu.current_stream() is torch.cuda.current_stream() is stream
    assert not torch.cuda.is_current_stream_capturing()
    late = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=True)
    late.copy_(torch.tensor([3, 4]), non_blocking=True)
found = []
def look():
    event.query() or event.query()
    (Path(FOLDER) / "ignore-events").touch()
    event.synchronize()
    found.append(event.query())
thread = threading.Thread(target=look)
thread.start()
thread.join()
assert found == [True], "the control ignores events"
assert not event.query(), "but not those that the scheduler waits for"
assert late.numpy().tolist() == [0, 0]
with torch.cuda.stream(stream):
    again = torch.empty(1, pin_memory=True)
    again.copy_(torch.ones(1), non_blocking=True)
assert again.item() == 1.0
opened.set()
event.synchronize()
torch.cpu.synchronize()
assert late.numpy().tolist() == [3, 4]
"""


def test_a_process_with_the_shim_has_streams_events_and_pinned_memory(tmp_path):
    env = {**os.environ, **Overlap().environment("prefill", tmp_path), "PYTHONPATH": str(SHIM)}
    script = SCRIPT.replace("FOLDER", repr(str(tmp_path)))
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=PROCESS_S)
    got = read_counts(tmp_path)
    assert (got.events, got.waits, got.pinned_copies) == (1, 1, 2)
