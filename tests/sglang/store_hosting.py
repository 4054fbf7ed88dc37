# SPDX-License-Identifier: Apache-2.0
"""HiCache's host pools, and the store behind them, driven as its threads drive them. For import in
tests: importing SGLang warns on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from store_linking import LABEL, LAYERS, PAGE, PATIENT, be_patient, mha_pool, mla_pool

from sglang_mooncake.sglang.store import hicache, refusals, signatures
from sglang_mooncake.sglang.store.hicache import HiCacheStore
from sglang_mooncake.sglang.store.updates import Updates


def host_pool(kind: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With twice as many pages as the device's, and random numbers in them."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    device = mha_pool() if kind == "mha" else mla_pool()
    info = device.get_device_pool_infos()[0].buffer_info
    given: dict[str, Any] = {
        "pin_memory": False,
        "device_capacity_tokens": device.size,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if kind == "mla":
        pool = MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, target_layer_num=LAYERS, **given)
    else:
        pool = MHATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, **given)
    generator = torch.Generator().manual_seed(5)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))
    return pool


def page_of(pool: Any, page: int) -> torch.Tensor:
    """A copy of one page, as SGLang itself finds it."""
    return pool.get_data_page(page * PAGE, flat=True).clone()


def plain_args() -> dict[str, Any]:
    """The flags that the store asks for, of a server that it serves."""
    flags = dict.fromkeys(signatures._CHANGES_VALUES, "x")
    return flags | refusals.SERVED | {"quantization_param_path": None}


def plain_model() -> Any:
    """SGLang's ``ModelConfig``."""
    return SimpleNamespace(
        dtype="torch.bfloat16",
        get_total_num_kv_heads=lambda: 2,
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1}),
    )


def in_a_server(monkeypatch: pytest.MonkeyPatch, **args: Any) -> SimpleNamespace:
    """What the store asks SGLang about the server; the returned parts may be changed."""
    be_patient(monkeypatch)
    given = plain_args() | {"device": "cpu", "hicache_storage_backend": "dynamic"} | args
    model = plain_model()
    server = SimpleNamespace(
        args=SimpleNamespace(**given),
        parallel=SimpleNamespace(attn_tp_size=1, attn_tp_rank=0),
        serving=SimpleNamespace(weight_version="1"),
        model=model,
    )
    server.updates = Updates(lambda: server.serving.weight_version)
    config = SimpleNamespace(from_server_args=lambda _: model)
    monkeypatch.setattr(signatures, "ModelConfig", config)
    monkeypatch.setattr(signatures, "get_parallel", lambda: server.parallel)
    monkeypatch.setattr(signatures, "updates", lambda: server.updates)
    monkeypatch.setattr(signatures, "name_adapters", lambda _: None)
    monkeypatch.setattr(hicache, "get_server_args", lambda: server.args)
    monkeypatch.setattr(hicache, "open_exporter", lambda _: None)
    monkeypatch.setattr(hicache, "store_label", lambda: LABEL)
    return server


def storage_config(extra: dict[str, Any], **more: Any) -> HiCacheStorageConfig:
    given = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "m",
    }
    return HiCacheStorageConfig(**given | more, extra_config=extra)


def make(directory: Path, pool: Any, memory: str = "4MiB", **more: Any) -> HiCacheStore:
    extra = PATIENT | {
        "backend_name": "kvstore",
        "module_path": "sglang_mooncake.sglang.store.hicache",
        "class_name": "HiCacheStore",
        "interface_v1": 1,
        "weights": "w",
        "directory": str(directory),
        "memory": memory,
    }
    made = HiCacheStore(storage_config(extra, **more), {})
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made
