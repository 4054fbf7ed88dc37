# SPDX-License-Identifier: Apache-2.0
"""LMCache's own storage manager with the store below it: what leaves its memory is found again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache_makers import MIB, TIMEOUT_S, keys, layout
from store_makers import until

from kvstore.lmcache.adapter import StoreL2Adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # LMCache imports its own adapters

N = 6


@pytest.fixture
def manager(directory: Path) -> Iterator[StorageManager]:
    spec = {
        "type": "plugin",
        "module_path": "kvstore.lmcache.adapter",
        "class_name": "StoreL2Adapter",
        "adapter_params": {
            "memory": "8MiB",
            "directory": str(directory),
            "timeout_s": TIMEOUT_S,
            "request_timeout_s": TIMEOUT_S,
        },
    }
    memory = L1MemoryManagerConfig(size_in_bytes=4 * MIB, use_lazy=False, shm_name="")
    one = StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(memory),
            EvictionConfig("noop"),
            l2_adapter_config=parse_args_to_l2_adapters_config(
                argparse.Namespace(l2_adapter=[json.dumps(spec)])
            ),
        )
    )
    yield one
    one.close()


def adapter_of(manager: StorageManager) -> StoreL2Adapter:
    ((_, adapter),) = manager.l2_adapters()
    assert isinstance(adapter, StoreL2Adapter)
    return adapter


def prefetch(manager: StorageManager, count: int) -> tuple[int, int]:
    """Chunks that LMCache finds: in its own memory, and in the store."""
    spec = PrefetchTaskSpec([GroupedObjectKeys(keys(count), 0, layout())])
    handle = manager.submit_prefetch_task(spec)
    assert manager.wait_prefetch_status(handle, TIMEOUT_S)
    found = manager.query_prefetch_status(handle)
    return found.l1_hit_count, found.l2_hit_count


def test_chunks_that_left_lmcaches_memory_come_back(manager: StorageManager) -> None:
    reserved = manager.reserve_write(keys(N), layout())
    contents = {}
    for one, place in reserved.items():
        place.tensor.random_(generator=torch.Generator().manual_seed(one.chunk_hash[-1]))
        contents[one] = place.tensor.clone()
    manager.finish_write(keys(N))
    adapter = adapter_of(manager)
    until(lambda: adapter.report_status()["puts"].get("stored") == N, "LMCache stores chunks")
    until(lambda: manager.clear() or not manager.get_l1_usage()[0], "LMCache lets chunks go")
    assert prefetch(manager, N + 2) == (0, N)
    with manager.read_prefetched_results(keys(N)) as places:
        for one, place in zip(keys(N), places, strict=True):
            assert torch.equal(place.tensor, contents[one])
    assert adapter.report_status()["gets"] == {"right": N}
