# SPDX-License-Identifier: Apache-2.0
"""Linkers on SGLang's pools, driven as its tree drives them. For import in tests: importing SGLang
warns on a machine without a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvstore.objects.signature import Signature
from sglang_mooncake.sglang.prometheus import Exporter
from sglang_mooncake.sglang.store import device_pools, options
from sglang_mooncake.sglang.store import linker as linker_module
from sglang_mooncake.sglang.store.linker import StoreLinker
from sglang_mooncake.sglang.store.signatures import PoolFacts

PAGE, PAGES, LAYERS = 4, 16, 5
#: For deadlines that must not pass: a loaded machine stops any thread for seconds.
NEVER_S = 1_000.0
#: What the server's engine is called; a server of SGLang says it of itself.
LABEL = "store of server (dp 0 cp 0 tp 0 pp 0) of m, port 30000"
PATIENT = {"load_timeout_s": NEVER_S, "request_timeout_s": NEVER_S}
SIGNATURE = Signature(
    weights="w", dtype="float32", page_size=PAGE, layers=(0, LAYERS), heads=(0, 2), layout="t/1"
)


def mha_pool() -> Any:
    return MHATokenToKVPool(
        PAGE * PAGES, PAGE, torch.bfloat16, 2, 8, LAYERS, "cpu", enable_memory_saver=False
    )


def mla_pool() -> Any:
    return MLATokenToKVPool(
        PAGE * PAGES, PAGE, torch.float32, 12, 4, LAYERS, "cpu", enable_memory_saver=False
    )


def windows_pool(windows: tuple[int, ...] = (0, 2, 3), layers: int = LAYERS, **more: Any) -> Any:
    """Of a model whose layers ``windows`` have sliding windows, with half as many pages for
    these."""
    return SWAKVPool(
        PAGE * PAGES,
        PAGE * PAGES // 2,
        PAGE,
        torch.bfloat16,
        2,
        8,
        list(windows),
        [one for one in range(layers) if one not in windows],
        "cpu",
        **more,
    )


def windows_mla_pool() -> Any:
    given = {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "page_size": PAGE, "device": "cpu"}
    given["enable_memory_saver"] = False
    return windows_pool(
        token_to_kv_pool_class=MLATokenToKVPool,
        full_kv_pool_kwargs=given,
        swa_kv_pool_kwargs=given,
    )


def tensors_of(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, SWAKVPool):
        return [*tensors_of(pool.full_kv_pool), *tensors_of(pool.swa_kv_pool)]
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


class _Signature:
    """What `SignatureNow` is in a server."""

    def __init__(self, _: object, facts: PoolFacts) -> None:
        self.digest = replace(SIGNATURE, pool=facts.pool).digest


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of stores that are made from now on give no peer up that is silent."""
    monkeypatch.setattr(options, "STALL_TIMEOUT_S", NEVER_S)
    monkeypatch.setattr(options, "CONNECT_TIMEOUT_S", NEVER_S)


def make(
    directory: Path,
    pool: Any,
    monkeypatch: pytest.MonkeyPatch,
    exporter: Callable[..., Exporter | None] = lambda _: None,
    signature: Callable[..., Any] = _Signature,
    **extra: Any,
) -> StoreLinker:
    be_patient(monkeypatch)
    monkeypatch.setattr(linker_module, "SignatureNow", signature)
    monkeypatch.setattr(linker_module, "weights_of", lambda *_: "w")
    monkeypatch.setattr(linker_module, "open_exporter", exporter)
    monkeypatch.setattr(linker_module, "store_label", lambda: LABEL)
    monkeypatch.setattr(device_pools, "heads_of_rank", lambda *_: (0, 2))
    parallel = SimpleNamespace(attn_tp_rank=0, attn_tp_size=1, pp_rank=0, pp_size=1)
    monkeypatch.setattr(device_pools, "get_parallel", lambda: parallel)
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=PAGE)
    config = PATIENT | {"memory": "4MiB", "directory": str(directory), "layers_per_read": 2} | extra
    components = {ComponentType.FULL}
    if isinstance(pool, SWAKVPool):
        components.add(ComponentType.SWA)
    return StoreLinker(None, params, components=components, extra_config=config)


def hashes(count: int, seed: int = 0) -> list[str]:
    return [hashlib.sha256(f"{seed} {i}".encode()).hexdigest() for i in range(count)]


def slots(*pages: int) -> torch.Tensor:
    """The token slots of some pages."""
    return torch.cat([torch.arange(one * PAGE, (one + 1) * PAGE) for one in pages])


def transfer(keys: list[str], *pages: int) -> list[PoolTransfer]:
    return [of_pool(PoolName.KV, keys, *pages)]


def of_pool(name: PoolName, keys: list[str], *pages: int) -> PoolTransfer:
    indices = slots(*pages) if pages else None
    return PoolTransfer(name=name, keys=keys, device_indices=indices)


def fill(linker: StoreLinker) -> list[torch.Tensor]:
    """Random pools; a copy of what is in them."""
    generator = torch.Generator().manual_seed(3)
    tensors = [one for pool in linker.pools.values() for one in tensors_of(pool)]
    for one in tensors:
        one.copy_(torch.randn(one.shape, generator=generator))
    return [one.clone() for one in tensors]


def offloaded(linker: StoreLinker, keys: list[str], *pages: int) -> bool:
    return offloaded_all(linker, transfer(keys, *pages))


def offloaded_all(linker: StoreLinker, transfers: list[PoolTransfer]) -> bool:
    assert linker.offload(transfers)
    with linker._idle:
        assert linker._idle.wait_for(lambda: linker.num_completed_offloads() == 1, 60)
    return linker.pop_completed_offload()


def loaded(linker: StoreLinker, keys: list[str], *pages: int) -> bool:
    return loaded_all(linker, transfer(keys, *pages))


def loaded_all(linker: StoreLinker, transfers: list[PoolTransfer]) -> bool:
    """As SGLang does it: the forward waits for each layer, then asks whether all has landed."""
    assert linker.load("r", transfers)
    index = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(index)
    for layer in range(LAYERS):
        linker.layer_done_counter.wait_until(layer)
    return linker.finish_layer_wise_loading(index)
