# SPDX-License-Identifier: Apache-2.0
"""HiCache's storage contract, on host pools and a store that are real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_host import store_directory

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

KINDS = [
    pytest.param(kind, layout, id=f"{kind}-{layout}")
    for kind in ("mha", "mla")
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    if (kind, layout) != ("mla", "page_head")
]


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture
def open_store(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes stores of one directory for pools, and closes them."""
    import store_hosting

    store_hosting.in_a_server(monkeypatch)
    made: list[Any] = []

    def make(pool: Any, **more: Any) -> Any:
        made.append(store_hosting.make(directory, pool, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_pages_come_back_into_other_slots(
    kind: str, layout: str, open_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from store_hosting import host_pool, page_of
    from store_linking import LABEL, hashes, slots

    pool = host_pool(kind, layout, monkeypatch)
    store = open_store(pool)
    assert store._store.status().label == LABEL, "kvstore top names the server"
    keys = hashes(4)
    before = [page_of(pool, page) for page in range(pool.page_num)]
    assert store.batch_exists(keys) == 0
    assert store.batch_set_v1(keys[:3], slots(5, 2, 9)) == [True] * 3
    assert store.batch_exists(keys) == 3
    assert store.batch_exists(keys[3:]) == 0
    assert store.exists(keys[1])
    assert store.batch_get_v1(keys, slots(1, 20, 7, 8)) == [True] * 3 + [False]
    moved = {1: 5, 20: 2, 7: 9}
    for page in set(range(pool.page_num)) - {8}:
        assert torch.equal(page_of(pool, page), before[moved.get(page, page)])


@pytest.mark.parametrize("layout", ["hnd", "vectorized_5d"])
@pytest.mark.parametrize("host_layout", ["layer_first", "page_first", "page_first_direct"])
def test_device_pools_in_another_layout_are_refused(
    layout: str, host_layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages would be taken for plain ones, which have as many bytes."""
    import msgspec
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
    from store_hosting import host_pool

    from sglang_mooncake.sglang.store.host_pool import HostPool

    pool = host_pool("mha", host_layout, monkeypatch)
    HostPool(pool)
    (info,) = pool._buffer_infos
    buffers = msgspec.structs.replace(info.buffers, layout=KVBufferLayout(layout))
    pool._buffer_infos = (msgspec.structs.replace(info, buffers=buffers),)
    with pytest.raises(ValueError, match=f"whose device pool has the layout '{layout}'"):
        HostPool(pool)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pools_of_two_layouts_share_objects_that_the_linker_takes_too(
    kind: str,
    open_store: Callable[..., Any],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from store_hosting import host_pool
    from store_linking import (
        LAYERS,
        PAGE,
        hashes,
        loaded,
        mha_pool,
        mla_pool,
        slots,
        tensors_of,
    )
    from store_linking import make as make_linker

    from sglang_mooncake.sglang.store import signatures

    ours, theirs = (
        host_pool(kind, one, monkeypatch) for one in ("layer_first", "page_first_direct")
    )
    keys = hashes(2)
    first, second = open_store(ours), open_store(theirs, memory=0)
    assert first.batch_set_v1(keys, slots(3, 4)) == [True, True]
    until(lambda: second.batch_exists(keys) == 2, "the other one has heard of it")
    assert second.batch_get_v1(keys, slots(0, 1)) == [True, True]
    mla = kind == "mla"
    refs = list(ours.kv_buffer if mla else ours.kv_buffer.flatten(0, 1))
    by_page = theirs.kv_buffer.transpose(-5, -4)  # Pages, layers -> layers, pages.
    others = list(by_page if mla else by_page.flatten(0, 1))
    assert len(refs) == len(others) == (LAYERS if mla else 2 * LAYERS)
    for mine, other in zip(refs, others, strict=True):
        pages = other.reshape(-1, PAGE, *mine.shape[1:])
        assert torch.equal(pages[:2].reshape(-1, *mine.shape[1:]), mine[slots(3, 4)])

    device = mha_pool() if kind == "mha" else mla_pool()
    linker = make_linker(directory, device, monkeypatch, memory=0)
    try:
        heads = (0, 0) if kind == "mla" else (0, 2)
        facts = linker._pools[PoolName.KV].pages.facts(heads)
        linker._signatures[PoolName.KV] = signatures.SignatureNow(first._weights, facts)
        until(lambda: loaded(linker, keys, 8, 9), "the linker takes them")
        for mine, got in zip(refs, tensors_of(linker.pools[PoolName.KV]), strict=True):
            assert torch.equal(got[slots(8, 9)], mine[slots(3, 4)])
    finally:
        linker.close()


def test_ranks_that_have_other_heads_have_other_pages(
    open_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_hosting import host_pool, in_a_server
    from store_linking import hashes, slots

    pool = host_pool("mha", "page_first", monkeypatch)
    first = open_store(pool)
    keys = hashes(1)
    assert first.batch_set_v1(keys, slots(0)) == [True]
    server = in_a_server(monkeypatch)
    server.parallel.attn_tp_size, server.parallel.attn_tp_rank = 2, 1
    second = open_store(pool)
    assert second.batch_exists(keys) == 0
    assert second.batch_get_v1(keys, slots(1)) == [False]


def test_new_weights_have_other_pages(
    open_store: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from store_hosting import host_pool, in_a_server
    from store_linking import hashes, slots

    server = in_a_server(monkeypatch)
    store = open_store(host_pool("mla", "page_first", monkeypatch))
    keys = hashes(1)
    server.updates.computed()
    assert store.batch_set_v1(keys, slots(0)) == [True]
    assert store.batch_exists(keys) == 1
    server.updates.changed()
    for _ in range(2):
        assert store.batch_exists(keys) == 0
        assert store.batch_get_v1(keys, slots(1)) == [False]
    assert store.batch_set_v1(hashes(1, seed=1), slots(0)) == [False], "pages of both are cached"
    store.clear()
    assert "flush first" in caplog.text
    server.updates.flushed()
    assert store.batch_exists(keys) == 0
    assert store.batch_set_v1(keys, slots(0)) == [True]
    assert store.batch_exists(keys) == 1


def test_what_is_cleared_is_gone_for_all_and_others_pages_are_not(
    open_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_hosting import host_pool
    from store_linking import hashes, slots

    first = open_store(host_pool("mha", "page_first", monkeypatch))
    second = open_store(host_pool("mha", "page_first", monkeypatch), memory=0)
    other = open_store(host_pool("mha", "page_head", monkeypatch), memory=0)
    keys = hashes(2)
    until(lambda: second.batch_set_v1(keys, slots(0, 1)) == [True] * 2, "it knows the first one")
    until(lambda: other.batch_set_v1(keys, slots(0, 1)) == [True] * 2, "it knows the first one")
    until(lambda: first.batch_exists(keys) == 2, "it is there")
    until(lambda: other.batch_exists(keys) == 2, "so it is for the other one")
    second.clear()
    until(lambda: not first.batch_exists(keys) + second.batch_exists(keys), "it is gone")
    assert other.batch_exists(keys) == 2
    first.clear()
    assert other.batch_exists(keys) == 2


def test_what_a_full_store_does_not_take_is_told(
    open_store: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from store_hosting import host_pool
    from store_linking import hashes, slots

    store = open_store(host_pool("mha", "page_first", monkeypatch), memory=0)
    assert store.batch_set_v1(hashes(2), slots(0, 1)) == [False, False]
    assert "2 pages of the pool kv were not stored: Counter({'unreachable': 2})" in caplog.text


def test_pages_whose_read_does_not_stop_did_not_come_once_nothing_lands(
    open_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_hosting import host_pool
    from store_linking import hashes, slots

    from kvstore.store import StillLanding

    waited = []

    class Stuck(StillLanding):
        def wait(self, clock: object = None) -> None:
            waited.append(True)

    def stuck(*_: object) -> None:
        raise Stuck([])

    store = open_store(host_pool("mha", "page_first", monkeypatch))
    monkeypatch.setattr(store._store, "get", stuck)
    assert store.batch_get_v1(hashes(2), slots(0, 1)) == [False, False]
    assert waited == [True]


def test_pools_of_one_model_are_kept_apart(
    open_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
    from store_hosting import host_pool, page_of
    from store_linking import hashes, slots

    full = host_pool("mha", "page_first", monkeypatch)
    window = host_pool("mha", "page_first", monkeypatch)
    window.kv_buffer.neg_()
    store = open_store(full)
    store.register_mem_host_pool_v2(full, PoolName.KV)
    store.register_mem_host_pool_v2(window, PoolName.SWA)
    keys = hashes(6)
    assert store.batch_set_v1(keys[:5], slots(0, 1, 2, 3, 4)) == [True] * 5

    def transfer(names: list[str], *pages: int, policy: Any = PoolHitPolicy.TRAILING_PAGES) -> Any:
        indices = slots(*pages) if pages else None
        return PoolTransfer(PoolName.SWA, host_indices=indices, keys=names, hit_policy=policy)

    def found(names: list[str], policy: Any = PoolHitPolicy.TRAILING_PAGES) -> Any:
        return store.batch_exists_v2(keys, [transfer(names, policy=policy)])

    assert found(keys[-2:]).kv_hit_pages == 0
    assert found(keys[-2:]).extra_pool_hit_pages == {PoolName.KV: 5}
    some = [keys[0], keys[1], keys[3], keys[4]]
    assert store.batch_set_v2([transfer(some, 0, 1, 3, 4)]) == {PoolName.SWA: [True] * 4}
    result = found(keys[-2:])
    assert result.restorable_prefix_pages == [1, 2, 5]
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (
        5,
        {PoolName.KV: 5, PoolName.SWA: 5},
    )
    assert found(keys, PoolHitPolicy.ALL_PAGES).restorable_prefix_pages == [1, 2]
    assert store.batch_exists_v2(keys).kv_hit_pages == 5
    with pytest.raises(ValueError, match="does not know the hit policy"):
        found(keys, PoolHitPolicy.BLOCK_GROUPS)
    wanted = page_of(window, 3)
    assert store.batch_get_v2([transfer(keys[3:4], 8)]) == {PoolName.SWA: [True]}
    assert torch.equal(page_of(window, 8), wanted)
    assert not torch.equal(page_of(full, 8), wanted)


def test_which_ranks_share_the_pages_of_other_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    import store_hosting
    from sglang.srt.mem_cache.hicache_storage import PoolName

    from sglang_mooncake.sglang.store.hicache import HiCacheStore
    from sglang_mooncake.sglang.store.host_pool import HostPool

    store_hosting.in_a_server(monkeypatch)
    pool = store_hosting.host_pool("mha", "page_first", monkeypatch)
    host = HostPool(pool)

    def layout(name: PoolName, **more: Any) -> str:
        store = HiCacheStore.__new__(HiCacheStore)
        store._config = store_hosting.storage_config({}, **more)
        store._server_args = None
        return store._facts(name.value, pool, host).layout

    second = {"tp_rank": 1, "tp_size": 2}
    assert layout(PoolName.SWA) != layout(PoolName.SWA, **second)
    assert layout(PoolName.INDEXER, is_mla_model=True) == layout(
        PoolName.INDEXER, is_mla_model=True, **second
    )
    assert layout(PoolName.MAMBA, is_mla_model=True) != layout(
        PoolName.MAMBA, is_mla_model=True, **second
    )
    assert layout(PoolName.SWA) != layout(PoolName.SWA, pp_rank=1, pp_size=2)
    assert layout(PoolName.KV) == layout(PoolName.KV, **second), "heads tell it"
    assert layout(PoolName.KV) != layout(PoolName.KV, attn_cp_rank=1, attn_cp_size=2)


def test_what_cannot_be_served_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import store_hosting

    from sglang_mooncake.sglang.store.hicache import HiCacheStore

    def made(extra: dict[str, Any], **more: Any) -> None:
        HiCacheStore(store_hosting.storage_config(extra, **more), {})

    server = store_hosting.in_a_server(monkeypatch)
    with pytest.raises(ValueError, match='give "interface_v1": 1'):
        made({"memory": 0})
    with pytest.raises(ValueError, match="leave tp_lcm_size out"):
        made({"interface_v1": 1}, should_split_heads=True)
    with pytest.raises(ValueError, match="no setting 'memry'"):
        made({"interface_v1": 1, "memry": 0})
    server.args.speculative_algorithm = "EAGLE"
    with pytest.raises(ValueError, match="does not serve --speculative-algorithm EAGLE"):
        made({"interface_v1": 1})
    server.args.speculative_algorithm = None
    server.args.hicache_storage_backend = None
    with pytest.raises(ValueError, match="give --hicache-storage-backend when the server starts"):
        made({"interface_v1": 1})
    server.args.hicache_storage_backend = "dynamic"
    pool = store_hosting.host_pool("mha", "page_first", monkeypatch)
    monkeypatch.setattr(pool, "layout", "of another kind")
    with pytest.raises(ValueError, match="cannot hold pages of SGLang's MHATokenToKVPoolHost with"):
        store_hosting.make(directory, pool, memory=0)


def test_reading_by_tensors_is_refused(
    open_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_hosting import host_pool
    from store_linking import hashes, slots

    store = open_store(host_pool("mha", "page_first", monkeypatch))
    for call in (store.get, store.set, store.batch_get, store.batch_set):
        with pytest.raises(NotImplementedError, match="by batch_get_v1"):
            call("key")
    with pytest.raises(ValueError, match="3 token slots are no whole pages of 4"):
        store.batch_get_v1(hashes(1), slots(0)[:3])
