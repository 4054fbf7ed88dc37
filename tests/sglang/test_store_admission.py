# SPDX-License-Identifier: Apache-2.0
"""Pages that are computed although the store has them: the linker and HiCache on real pools, and
how a rank learns what computing takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from store_host import store_directory

from kvstore.client.admission import MEASURED_MIN
from kvstore.client.owners import OWN

if TYPE_CHECKING:
    from sglang_mooncake.sglang.store.forwards import Forwards
    from sglang_mooncake.sglang.store.linker import StoreLinker

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

#: Seconds of one page: computing it, and loading it from an owner that is slow or fast. No real
#: load takes as long as computing.
COMPUTE_S, SLOW_S, FAST_S = 1000.0, 5000.0, 0.01


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture
def linker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreLinker]:
    import store_linking

    made = store_linking.make(directory, store_linking.mha_pool(), monkeypatch)
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["no probe", "probe"])
def probe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the prompts are probes at that time."""
    from sglang_mooncake.sglang.store import admission

    monkeypatch.setattr(admission, "is_probe", lambda *_: request.param)
    return bool(request.param)


def computes(target: Any, monkeypatch: pytest.MonkeyPatch, page_s: float | None) -> None:
    """So long takes computing a page of the tests' pools, as far as the rank has seen."""
    from store_linking import PAGE

    token_s = None if page_s is None else page_s / PAGE
    monkeypatch.setattr(target._admission._forwards, "seconds_per_token", lambda: token_s)


def page_bytes(linker: StoreLinker) -> int:
    from store_linking import PoolName

    return linker._page_bytes(PoolName.KV)


def loads(target: Any, page_s: float, page_bytes: int) -> None:
    """So long took reading pages from the own memory; measured often enough to be believed."""
    target._store.load_times.forget(OWN)
    for _ in range(MEASURED_MIN):
        target._store.load_times.measured(OWN, page_s, page_bytes)


def test_pages_are_offered_when_loading_is_faster_or_nothing_is_known(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch, probe: bool
) -> None:
    from store_linking import fill, hashes, offloaded, transfer

    fill(linker)
    keys = hashes(5)
    assert offloaded(linker, keys, 0, 1, 2, 3, 4)
    everything = [1, 2, 3, 4, 5]
    assert linker.lookup("r", transfer(keys)) == everything, "nothing was measured"
    loads(linker, SLOW_S, page_bytes(linker))
    computes(linker, monkeypatch, None)
    assert linker.lookup("r", transfer(keys)) == everything, "computing was not measured"
    computes(linker, monkeypatch, COMPUTE_S)
    assert linker.lookup("r", transfer(keys)) == ([1] if probe else [])
    loads(linker, FAST_S, page_bytes(linker))
    assert linker.lookup("r", transfer(keys)) == everything
    assert linker.lookup("r", transfer(hashes(1, 9))) == []


def test_a_request_is_counted_once_however_often_sglang_looks(
    linker: StoreLinker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from store_linking import fill, hashes, offloaded, transfer

    from sglang_mooncake.sglang.store import admission

    monkeypatch.setattr(admission, "is_probe", lambda *_: False)
    monkeypatch.setattr(admission, "COUNTED_MAX", 2)
    caplog.set_level("INFO")
    fill(linker)
    keys = hashes(3)
    assert offloaded(linker, keys, 0, 1, 2)
    computes(linker, monkeypatch, COMPUTE_S)
    loads(linker, SLOW_S, page_bytes(linker))
    for rid in "aaabbb":
        assert linker.lookup(rid, transfer(keys)) == []
    counts = linker._store.status().admission
    assert (counts.admitted, counts.declined, counts.probes) == (0, 6, 0)
    said = (
        "3 of 3 pages that the store has are computed: loading all is expected to take 15000000 ms"
    )
    assert caplog.text.count(said) == 1, "and the log has one line a minute"
    assert linker.lookup("c", transfer(keys)) == []
    assert len(linker._admission._counted) == 2, "which requests were counted is forgotten in time"
    monkeypatch.setattr(admission, "TOLD_EVERY_S", 0.0)
    assert linker.lookup("d", transfer(keys)) == []
    assert caplog.text.count(said) == 2


def test_what_was_expected_is_compared_with_what_a_load_took(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_linking import fill, hashes, loaded, offloaded, transfer

    from sglang_mooncake.sglang.store import admission

    monkeypatch.setattr(admission, "is_probe", lambda *_: True)
    fill(linker)
    keys = hashes(4)
    assert offloaded(linker, keys, 0, 1, 2, 3)
    computes(linker, monkeypatch, COMPUTE_S)
    assert loaded(linker, keys, 5, 6, 7, 8)
    assert linker._store.status().admission.loads == 0, "nothing was expected of it"
    for _ in range(MEASURED_MIN):
        assert loaded(linker, keys, 5, 6, 7, 8)
    assert linker._store.load_times.bytes_per_s(OWN) > 0, "loads are measured"
    before = linker._store.status().admission
    loads(linker, SLOW_S, page_bytes(linker))
    assert linker.lookup("a", transfer(keys)) == [1]
    assert loaded(linker, keys[:1], 9)
    after = linker._store.status().admission
    assert (after.loads, after.probes) == (before.loads + 1, 1)
    assert (after.admitted, after.declined) == (1, 3)
    assert after.expected_s - before.expected_s == pytest.approx(SLOW_S)
    assert after.took_s - before.took_s > 0
    assert after.unpaid == before.unpaid
    computes(linker, monkeypatch, 1e-9)
    assert loaded(linker, keys[:1], 9)
    assert linker._store.status().admission.unpaid == before.unpaid + 1


def test_the_rank_that_offers_least_decides(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own reduction over the ranks, with another rank that offers all five pages."""
    import torch
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
    from store_linking import fill, hashes, offloaded, transfer

    from sglang_mooncake.sglang.store import admission

    monkeypatch.setattr(admission, "is_probe", lambda *_: False)

    def reduce(mask: Any, op: Any) -> None:
        assert op is torch.distributed.ReduceOp.MIN
        other = torch.tensor([0, 1, 1, 1, 1, 1])
        mask.copy_(torch.minimum(mask, other))

    wrapper = object.__new__(UnifiedCacheLinkerWrapper)
    wrapper.cache = SimpleNamespace(_all_reduce_attn_groups=reduce)
    fill(linker)
    keys = hashes(5)
    assert offloaded(linker, keys, 0, 1, 2, 3, 4)

    def agreed() -> int:
        offered = linker.lookup("r", transfer(keys))
        return wrapper._sync_restorable_prefix(offered, num_pages=5, device_hit_pages=0)

    assert agreed() == 5
    computes(linker, monkeypatch, COMPUTE_S)
    loads(linker, SLOW_S, page_bytes(linker))
    assert agreed() == 0


def test_a_setting_turns_it_off(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import store_linking
    from sglang.srt.model_executor.model_runner import ModelRunner
    from store_linking import fill, hashes, offloaded, transfer

    before = ModelRunner.forward
    made = store_linking.make(directory, store_linking.mha_pool(), monkeypatch, admission=False)
    try:
        assert ModelRunner.forward is before, "SGLang's forwards are left alone"
        fill(made)
        assert offloaded(made, hashes(2), 0, 1)
        loads(made, SLOW_S, page_bytes(made))
        assert made.lookup("r", transfer(hashes(2))) == [1, 2]
    finally:
        made.close()
    with pytest.raises(ValueError, match="admission='no' must be true or false"):
        store_linking.make(directory, store_linking.mha_pool(), monkeypatch, admission="no")


def test_hicache_is_offered_what_is_worth_loading(
    directory: Path, monkeypatch: pytest.MonkeyPatch, probe: bool
) -> None:
    from store_hosting import host_pool, in_a_server, storage_config
    from store_linking import PATIENT, hashes, slots

    from sglang_mooncake.sglang.store import hicache
    from sglang_mooncake.sglang.store.hicache import HiCacheStore

    in_a_server(monkeypatch)
    monkeypatch.setattr(hicache, "weights_of", lambda *_: "w")
    extra = PATIENT | {"interface_v1": 1, "memory": "4MiB", "directory": str(directory)}
    store = HiCacheStore(storage_config(extra))
    try:
        pool = host_pool("mha", "page_first_direct", monkeypatch)
        store.register_mem_pool_host(pool)
        keys = hashes(4)
        assert store.batch_set_v1(keys, slots(0, 1, 2, 3)) == [True] * 4
        nbytes = store._pools["kv"].host.page_bytes
        computes(store, monkeypatch, COMPUTE_S)
        loads(store, SLOW_S, nbytes)
        assert store.batch_exists(keys) == (1 if probe else 0)
        assert store.batch_exists_v2(keys).kv_hit_pages == (1 if probe else 0)
        assert store.exists(keys[0]), "it is there all the same"
        assert store.batch_get_v1(keys, slots(4, 5, 6, 7)) == [True] * 4
        counts = store._store.status().admission
        assert (counts.loads, counts.expected_s) == (1, pytest.approx(4 * SLOW_S))
        assert counts.declined == 2 * (3 if probe else 4)
        loads(store, FAST_S, nbytes)
        assert store.batch_exists(keys) == 4
    finally:
        store.close()


# -- what computing takes


class Runner:
    """SGLang's ModelRunner, as the hook sees it."""

    def __init__(self, consumer_index: int = -1, is_draft_worker: bool = False) -> None:
        self.is_draft_worker = is_draft_worker
        counter = SimpleNamespace(consumer_index=consumer_index)
        self.token_to_kv_pool = SimpleNamespace(layer_transfer_counter=counter)


def batch(tokens: int | None, mode: str = "EXTEND") -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), extend_num_tokens=tokens, seconds=1.0
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of forwards, each of which takes its batch's ``seconds``, and returns the batch."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mooncake.sglang.store import forwards

    now = SimpleNamespace(s=100.0)

    def forward(self: Runner, forward_batch: Any) -> Any:
        now.s += forward_batch.seconds
        return forward_batch

    monkeypatch.setattr(ModelRunner, "forward", forward)
    monkeypatch.setattr(forwards, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


@pytest.fixture
def watch(clock: SimpleNamespace) -> Iterator[Callable[..., Forwards]]:
    from sglang_mooncake.sglang.store.forwards import Forwards

    made: list[Forwards] = []

    def make(**given: Any) -> Forwards:
        made.append(Forwards(**{"has_streams": False} | given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(runner: Runner, forward_batch: Any, times: int = 1) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    for _ in range(times):
        assert ModelRunner.forward(runner, forward_batch) is forward_batch


def test_forwards_over_prompts_are_timed(watch: Callable[..., Forwards]) -> None:
    forwards = watch()
    run(Runner(), batch(100), MEASURED_MIN - 1)
    assert forwards.seconds_per_token() is None
    run(Runner(), batch(100))
    assert forwards.seconds_per_token() == pytest.approx(0.01)
    for other, runner in (
        (batch(100, "DECODE"), Runner()),
        (batch(100, "MIXED"), Runner()),
        (batch(63), Runner()),
        (batch(None), Runner()),
        (batch(100), Runner(consumer_index=0)),
        (batch(100), Runner(is_draft_worker=True)),
    ):
        other.seconds = 50.0
        run(runner, other)
    assert forwards.seconds_per_token() == pytest.approx(0.01)
    one = batch(1000)
    one.seconds = 5.0
    run(Runner(), one, 30)
    assert forwards.seconds_per_token() == pytest.approx(0.005, rel=1e-3)


def test_a_gpu_is_not_waited_for(
    watch: Callable[..., Forwards], clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_mooncake.sglang.store import forwards as module

    reached = SimpleNamespace(s=0.0)

    class Event:
        def __init__(self, timing: bool) -> None:
            assert timing
            self.s = clock.s

        def query(self) -> bool:
            return self.s <= reached.s

        def elapsed_time(self, other: Event) -> float:
            return (other.s - self.s) * 1e3

    monkeypatch.setattr(module, "Streams", lambda: SimpleNamespace(event=Event))
    forwards = watch(has_streams=True)
    run(Runner(), batch(100), MEASURED_MIN)
    assert forwards.seconds_per_token() is None
    reached.s = clock.s
    assert forwards.seconds_per_token() == pytest.approx(0.01)
    reached.s = 0.0
    run(Runner(), batch(100), 2 * module.UNTIMED_MAX)
    assert len(forwards._untimed) == module.UNTIMED_MAX


@pytest.mark.parametrize("fails", ["its end", "a question"])
def test_a_gpu_whose_events_fail_fails_no_forward(
    watch: Callable[..., Forwards],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    from sglang_mooncake.sglang.store import forwards as module

    made: list[Any] = []

    class Event:
        def __init__(self, timing: bool) -> None:
            made.append(timing)
            if fails == "its end" and len(made) == 2:
                raise RuntimeError("no more events")

        def query(self) -> bool:
            raise RuntimeError("an illegal address")

    monkeypatch.setattr(module, "Streams", lambda: SimpleNamespace(event=Event))
    forwards = watch(has_streams=True)
    run(Runner(), batch(100), MEASURED_MIN)
    assert forwards.seconds_per_token() is None
    assert caplog.text.count("the store loads whatever it finds") == 1
    assert len(made) == 2, "it is not tried again"


def test_an_sglang_that_cannot_be_watched_loads_everything(
    watch: Callable[..., Forwards],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    forwards = watch()
    run(SimpleNamespace(), batch(100), 3)  # type: ignore[arg-type]
    assert forwards.seconds_per_token() is None
    assert caplog.text.count("the store loads whatever it finds") == 1
    caplog.clear()
    monkeypatch.setattr(ModelRunner, "forward", lambda self, work: work)
    watch()
    assert "forward takes no forward_batch" in caplog.text
    run(Runner(), batch(100))


def test_sglangs_class_is_as_before_once_it_is_closed(watch: Callable[..., Forwards]) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    before = ModelRunner.forward
    forwards = watch()
    assert ModelRunner.forward is not before
    forwards.close()
    assert ModelRunner.forward is before
