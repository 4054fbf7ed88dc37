# SPDX-License-Identifier: Apache-2.0
"""SGLang's linker contract, on pools and a store that are real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from store_host import store_directory

from bootstrap_server.admission.secret_file import write_secret_file
from kvstore.config import Config
from kvstore.objects.outcomes import Put

if TYPE_CHECKING:
    from sglang_mooncake.sglang.store.linker import StoreLinker

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture(params=["mha_pool", "mla_pool"])
def linker(
    request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreLinker]:
    import store_linking

    pool = getattr(store_linking, request.param)()
    made = store_linking.make(directory, pool, monkeypatch)
    yield made
    made.close()


def test_pages_come_back_into_other_slots(linker: StoreLinker) -> None:
    import torch
    from store_linking import PoolName, fill, hashes, loaded, offloaded, slots, tensors_of, transfer

    before = fill(linker)
    keys = hashes(3)
    assert linker.lookup("r", transfer(keys)) == []
    assert offloaded(linker, keys, 5, 2, 9)
    assert linker.lookup("r", transfer([*keys, *hashes(2, 1)])) == [1, 2, 3]
    assert linker.lookup("r", transfer(hashes(2, 1))) == []
    assert loaded(linker, keys, 1, 14, 7)
    for old, new in zip(before, tensors_of(linker.pools[PoolName.KV]), strict=True):
        assert torch.equal(new[slots(1, 14, 7)], old[slots(5, 2, 9)])
        rest = torch.ones(len(new), dtype=torch.bool)
        rest[slots(1, 14, 7)] = False
        assert torch.equal(new[rest], old[rest]), "nothing else has changed"


def test_several_requests_load_in_one_batch(linker: StoreLinker) -> None:
    import torch
    from store_linking import (
        LABEL,
        PoolName,
        fill,
        hashes,
        offloaded,
        slots,
        tensors_of,
        transfer,
    )

    assert linker._store.status().label == LABEL, "kvstore top names the server"
    before = fill(linker)
    assert offloaded(linker, hashes(4), 0, 1, 2, 3)
    assert linker.load("a", transfer(hashes(2), 10, 11))
    assert linker.load("b", transfer(hashes(4)[2:], 12, 13))
    assert linker.load("c", transfer(hashes(1), 14))
    assert linker.cancel_queued_load("c")
    assert not linker.cancel_queued_load("c")
    index = linker.start_layer_wise_loading()
    assert not linker.cancel_queued_load("a"), "it has begun"
    assert linker.finish_layer_wise_loading(index)
    new = tensors_of(linker.pools[PoolName.KV])
    for old, one in zip(before, new, strict=True):
        assert torch.equal(one[slots(10, 11, 12, 13)], old[slots(0, 1, 2, 3)])
        assert torch.equal(one[slots(14)], old[slots(14)])
    assert linker.start_layer_wise_loading() == -1


def test_a_page_that_is_gone_fails_its_batch_alone(linker: StoreLinker) -> None:
    from store_linking import SIGNATURE, fill, hashes, loaded, offloaded, transfer

    fill(linker)
    keys = hashes(3)
    assert offloaded(linker, keys, 0, 1, 2)
    linker._store.remove(
        np.frombuffer(bytes.fromhex(keys[1]), np.uint8)[None, :16], SIGNATURE.digest
    )
    assert linker.lookup("r", transfer(keys)) == [1]
    assert not loaded(linker, keys, 4, 5, 6)
    assert loaded(linker, keys[:1], 7)


class _SlowPuts:
    """The puts of a linker wait until they may go on."""

    def __init__(self, linker: StoreLinker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._put = linker._store.put
        monkeypatch.setattr(linker._store, "put", self)

    def __call__(self, *args: Any, **more: Any) -> list[Put]:
        self.begun.set()
        assert self.go_on.wait(60)
        return self._put(*args, **more)


def completed(linker: StoreLinker, count: int) -> list[bool]:
    """In order, once so many offloads have ended."""
    with linker._idle:
        assert linker._idle.wait_for(lambda: linker.num_completed_offloads() == count, 60)
    return [linker.pop_completed_offload() for _ in range(count)]


def test_offloads_that_are_too_many_fail_in_their_turn(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow rank must accept as many as the others: what all have accepted is counted together."""
    from store_linking import fill, hashes, linker_module, transfer

    fill(linker)
    puts = _SlowPuts(linker, monkeypatch)
    monkeypatch.setattr(linker_module, "OFFLOADS_MAX", 2)
    assert linker.offload(transfer(hashes(1), 0))
    assert puts.begun.wait(60)
    for page in range(1, 6):
        assert linker.offload(transfer(hashes(1, page), page))
    puts.go_on.set()
    assert completed(linker, 6) == [True, False, False, False, True, True]
    assert linker._offloads_dropped == 3
    assert "dropped, as the store is slower than they come" in caplog.text
    assert "stored again: 1 wait, and 3 were dropped" in caplog.text


def test_an_offload_that_has_waited_for_too_long_fails_in_its_turn(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_linking import fill, hashes, linker_module, transfer

    fill(linker)
    monkeypatch.setattr(linker_module, "OFFLOAD_WAIT_MAX_S", -1.0)
    assert linker.offload(transfer(hashes(1), 0))
    assert completed(linker, 1) == [False]


def test_what_is_offloaded_at_a_reset_is_not_stored(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pages are used again. However long it takes, SGLang's scheduler gets no exception."""
    from store_linking import fill, hashes, linker_module, offloaded, transfer

    fill(linker)
    puts = _SlowPuts(linker, monkeypatch)
    assert linker.offload(transfer(hashes(1), 0))
    assert puts.begun.wait(60)
    assert linker.offload(transfer(hashes(2), 0, 1))
    monkeypatch.setattr(linker_module, "CLOSE_TIMEOUT_S", 0.0)
    linker.reset()
    assert "they are used again now, and what was read is not stored" in caplog.text
    monkeypatch.setattr(linker_module, "CLOSE_TIMEOUT_S", 60.0)
    puts.go_on.set()
    linker.reset()
    assert linker.num_completed_offloads() == 0, "SGLang has forgotten it"
    assert offloaded(linker, hashes(1, 7), 5)
    assert linker.lookup("r", transfer(hashes(2))) == []


def test_an_offload_that_raises_is_one_that_failed(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from store_linking import PoolName, PoolTransfer, fill, hashes, slots, transfer

    fill(linker)
    assert linker.offload(transfer(hashes(1), 0))
    torn = [
        PoolTransfer(name=PoolName.KV, keys=hashes(1, 5), device_indices=slots(1)[[0, 2, 1, 3]])
    ]
    assert linker.offload(torn)
    assert linker.offload(transfer(hashes(1, 6), 2))
    with linker._idle:
        assert linker._idle.wait_for(lambda: linker.num_completed_offloads() == 3, 60)
    assert [linker.pop_completed_offload() for _ in range(3)] == [True, False, True]
    assert "the token slots of a page do not lie side by side" in caplog.text


def test_ranks_with_the_same_pages_store_each_of_them_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_linking import device_pools, fill, hashes, make, mla_pool, offloaded

    keys = hashes(16)
    ranks = [make(directory, mla_pool(), monkeypatch) for _ in range(2)]
    stored = []
    for number, rank in enumerate(ranks):
        fill(rank)
        parallel = SimpleNamespace(attn_tp_rank=number, attn_tp_size=2)
        monkeypatch.setattr(device_pools, "get_parallel", lambda parallel=parallel: parallel)
        assert offloaded(rank, keys, *range(16))
        stored.append(rank._store.status().puts["stored"])
    assert sum(stored) == len(keys)
    assert all(stored)
    for rank in ranks:
        rank.close()


def test_a_load_does_not_wait_for_the_device_in_the_schedulers_thread(
    linker: StoreLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_linking import fill, hashes, linker_module, offloaded, transfer

    computed = threading.Event()

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            assert computed.wait(60)

    fill(linker)
    assert offloaded(linker, hashes(1), 0)
    device = SimpleNamespace(Event=Event)
    monkeypatch.setattr(linker_module, "get_device_module", lambda: device)
    assert linker.load("r", transfer(hashes(1), 1))
    index = linker.start_layer_wise_loading()
    assert not linker.layer_done_counter.futures[index][0].done()
    computed.set()
    assert linker.finish_layer_wise_loading(index)


def test_a_second_server_of_the_same_weights_reads_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from store_linking import (
        PoolName,
        fill,
        hashes,
        loaded,
        make,
        mha_pool,
        offloaded,
        slots,
        tensors_of,
        transfer,
    )

    first = make(directory, mha_pool(), monkeypatch)
    second = make(directory, mha_pool(), monkeypatch)
    before = fill(first)
    assert offloaded(first, hashes(2), 3, 4)
    for _ in range(3000):
        if second.lookup("r", transfer(hashes(2))):
            break
        threading.Event().wait(0.02)
    assert loaded(second, hashes(2), 8, 9)
    for old, new in zip(before, tensors_of(second.pools[PoolName.KV]), strict=True):
        assert torch.equal(new[slots(8, 9)], old[slots(3, 4)])
    second.close()
    first.close()


# -- what is refused


def test_other_pools_and_components_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_linking import PAGE, ComponentType, StoreLinker, mha_pool

    from sglang_mooncake.sglang.store.kv_pool import KVPool

    with pytest.raises(ValueError, match=r"of sliding windows, and this model has .*MAMBA"):
        StoreLinker(None, None, components=set(ComponentType), extra_config={})

    pool = mha_pool()
    pool.__class__ = type("Another", (type(pool),), {})
    with pytest.raises(ValueError, match="cannot hold pages of SGLang's Another"):
        KVPool(pool, PAGE)
    pool = mha_pool()
    pool.k_scale_buffer = []
    with pytest.raises(ValueError, match="with scales"):
        KVPool(pool, PAGE)
    for layout in ("hnd", "vectorized_5d"):
        pool = mha_pool()
        pool.kv_cache_layout = layout
        with pytest.raises(ValueError, match=f"in the layout '{layout}'"):
            KVPool(pool, PAGE)


def test_options_are_checked() -> None:
    from sglang_mooncake.sglang.store.options import Options

    options = Options.of({"memory": "1.5GiB", "weights": "mine", "layers_per_read": 2})
    assert options.store.memory == 3 << 29
    assert (options.weights, options.layers_per_read) == ("mine", 2)
    for given, said in (
        ({"memry": 1}, "no setting 'memry'; did you mean 'memory'"),
        ({"memory": "16 gigs"}, "'16 gigs' is no size: write it like 16GiB"),
        ({"policy": "fifo"}, "policy='fifo' is none of arc, lru"),
        ({"layers_per_read": 0}, "layers_per_read=0 and load_timeout_s=10.0 must be positive"),
        ({"copies": 0}, "copies=0 must be between 1 and 8"),
        ({"free_low": 0.6}, "give two parts between 0 and 0.5"),
        ({"claim_timeout_s": 0}, "claim_timeout_s=0 must be a positive number of seconds"),
        ({"chunk_bytes": 5000}, "chunk_bytes=5000 must be a multiple of 4096"),
        ({"memory": -1}, "memory=-1"),
    ):
        with pytest.raises(ValueError, match=said.replace("(", r"\(")):
            Options.of(given)


def test_the_stores_settings_are_those_that_options_take() -> None:
    from sglang_mooncake.sglang.store.options import Options

    store = Options.of({}).store
    assert store == Config(engine=store.engine)
    assert store.engine.host == "127.0.0.1"


def test_pages_of_other_hosts_come_as_the_hand_over_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encrypted, for one."""
    from sglang_mooncake.sglang.store.options import Options

    secret = tmp_path / "secret"
    write_secret_file(secret)
    for name, value in {
        "SECRET_FILE": str(secret),
        "ENCRYPT": "1",
        "PORTS": "20000-20010",
        "TRANSPORTS": "tcp",
        "NICS": "mlx5_*",
        "RAILS": "3",
    }.items():
        monkeypatch.setenv(f"SGLANG_MOONCAKE_{name}", value)
    engine = Options.of({"index": "redis://127.0.0.1/0"}).store.engine
    assert engine.encrypt
    assert engine.keys
    assert (engine.port, engine.port_last) == (20000, 20010)
    assert engine.transports == ("tcp",)
    assert (engine.nics, engine.rails) == (("mlx5_*",), 3)
    # Processes of one host need none of it.
    assert not Options.of({}).store.engine.encrypt


def test_flags_that_change_keys_and_values_are_in_the_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.server_args import ServerArgs
    from store_hosting import in_a_server, plain_args
    from store_linking import PAGE, mha_pool

    from sglang_mooncake.sglang.store import signatures
    from sglang_mooncake.sglang.store.kv_pool import KVPool

    fields = dict.fromkeys(signatures._CHANGES_VALUES, "x")
    assert all(hasattr(ServerArgs, name) for name in plain_args()), "what SGLang calls them"
    pool = KVPool(mha_pool(), PAGE)
    server = in_a_server(monkeypatch, model_path=str(tmp_path))
    scales = tmp_path / "scales.json"

    def digest(weights: str | None = "w", **more: object) -> bytes | None:
        args = SimpleNamespace(**vars(server.args) | more)
        facts = pool.facts(signatures.heads_of_rank(pool.heads, args))
        return signatures.SignatureNow(signatures.weights_of(args, weights), facts).digest

    known = {digest()}
    assert digest() in known
    for name in fields:
        known.add(digest(**{name: "y"}))
    known.add(digest("other"))
    for text in ("1", "2"):
        scales.write_text(text)
        known.add(digest(quantization_param_path=str(scales)))
    server.model.hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": 2})
    known.add(digest())
    server.model.dtype = "torch.float16"
    known.add(digest())
    monkeypatch.setattr(signatures, "__version__", "another release")
    known.add(digest())
    server.serving.weight_version = "2"
    known.add(digest())
    server.parallel.attn_tp_size, server.parallel.attn_tp_rank = 2, 1
    known.add(digest())
    assert len(known) == len(fields) + 9
    assert None not in known


def test_where_a_model_lies_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from store_hosting import in_a_server

    from sglang_mooncake.sglang.store import signatures

    server = in_a_server(monkeypatch)
    first = signatures.weights_of(server.args, "w")
    said = {"rope_theta": 1, "_name_or_path": "/elsewhere", "transformers_version": "9"}
    server.model.hf_config = SimpleNamespace(to_dict=lambda: said)
    assert signatures.weights_of(server.args, "w") == first


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({}, "has no safetensors files"),
        ({"load_format": "dummy"}, "--load-format dummy is none of those"),
        ({"load_format": "remote_instance"}, "--load-format remote_instance is none of those"),
        ({"quantization": "bitsandbytes"}, "--quantization bitsandbytes is none of those"),
    ],
)
def test_weights_that_files_do_not_tell_take_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], sentence: str
) -> None:
    from store_hosting import in_a_server

    from sglang_mooncake.sglang.store import signatures

    plain = {"model_path": str(tmp_path), "load_format": "auto", "quantization": None}
    args = in_a_server(monkeypatch, **plain | changed).args
    with pytest.raises(ValueError, match=f"{sentence}.*give a text of your own"):
        signatures.weights_of(args, None)
    assert signatures.weights_of(args, "mine")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dcp_size", 2),
        ("speculative_algorithm", "NGRAM"),
        ("speculative_algorithm", "EAGLE"),
        ("weight_cache_mode", "daemon"),
        ("enable_kv_cache_sharding", True),
    ],
)
def test_a_server_in_a_mode_that_was_not_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    from store_hosting import in_a_server

    from sglang_mooncake.sglang.store import signatures

    args = in_a_server(monkeypatch, **{name: value}).args
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"the store does not serve {flag} {value}"):
        signatures.weights_of(args, "mine")


def test_modes_are_served_that_are_sglangs_own() -> None:
    from msgspec.structs import fields
    from sglang.srt.server_args import ServerArgs

    from sglang_mooncake.sglang.store.refusals import SERVED

    defaults = {one.name: one.default for one in fields(ServerArgs)}
    assert {name: defaults[name] for name in SERVED} == SERVED


def test_nothing_is_stored_or_loaded_while_pages_of_several_weights_are_cached(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_hosting import in_a_server
    from store_linking import fill, hashes, make, mha_pool, offloaded, transfer

    from sglang_mooncake.sglang.store import linker as linker_module
    from sglang_mooncake.sglang.store import signatures

    server = in_a_server(monkeypatch)
    real = signatures.SignatureNow
    linker = make(directory, mha_pool(), monkeypatch, signature=real)
    assert linker_module.SignatureNow is real
    try:
        fill(linker)
        keys, others = hashes(2), hashes(2, seed=1)
        server.updates.computed()
        assert offloaded(linker, keys, 0, 1)
        assert linker.lookup("r", transfer(keys)) == [1, 2]
        server.updates.changed("updated")
        assert not linker.offload(transfer(others, 2, 3)), "they may be of the former weights"
        assert linker.lookup("r", transfer(keys)) == []
        assert not linker.load("r", transfer(keys, 4, 5))
        assert linker.start_layer_wise_loading() == -1
        server.updates.flushed()
        assert linker.lookup("r", transfer(keys)) == [], "they are of the former weights"
        assert offloaded(linker, others, 2, 3)
        assert linker.lookup("r", transfer(others)) == [1, 2]
    finally:
        linker.close()
