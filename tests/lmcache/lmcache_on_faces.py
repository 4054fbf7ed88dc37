# SPDX-License-Identifier: Apache-2.0
"""A program that uses LMCache as its users do, run as `sglang-mooncake run` runs one: it copies by
the transfer channels of NIXL and Mooncake, and puts and gets by the connector of Mooncake's store.
It says what came in one line of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections.abc import Sequence

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel import factory, impl  # noqa: F401 - impl registers them
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.mooncakestore_connector import MooncakestoreConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

HOST = "127.0.0.1"
PAGE, PAGES = 4096, 16
TIMEOUT_S = 60.0


#: Nobody else takes these before something listens there.
PORTS = itertools.count(int(sys.argv[1]))


def address() -> str:
    return f"{HOST}:{next(PORTS)}"


def level1(seed: int) -> torch.Tensor:
    made = torch.empty(PAGE * PAGES, dtype=torch.uint8)
    return made.random_(generator=torch.Generator().manual_seed(seed))


def copied(channel: str) -> list[bool]:
    """Reads six of a peer's pages into other places: whether LMCache says that all have come,
    whether they are the peer's, and whether nothing else has changed."""
    near, far = level1(1), level1(2)
    before = near.clone()
    contexts = []
    for memory in (near, far):
        desc = L1MemoryDesc(ptr=memory.data_ptr(), size=memory.numel(), align_bytes=PAGE)
        where = address()
        contexts.append(factory.create_transfer_channel_context(channel, desc, where, where))
    here, there = contexts
    client = here.get_transfer_channel_client(there.advertise_url)
    to, of = [1, 2, 3, 8, 12, 13], [4, 5, 0, 15, 7, 6]
    task = client.submit_read(
        here.get_transfer_channel_address([(PAGE * one, PAGE) for one in to]),
        there.get_transfer_channel_address([(PAGE * one, PAGE) for one in of]),
    )
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (result := client.query_read_status(task)).finished:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{channel}: the read has not ended")
        time.sleep(0.01)
    rows, others = near.view(PAGES, PAGE), [one for one in range(PAGES) if one not in to]
    right = torch.equal(rows[to], far.view(PAGES, PAGE)[of])
    untouched = torch.equal(rows[others], before.view(PAGES, PAGE)[others])
    for context in contexts:
        context.close()
    return [all(result.succeeded_mask), right, untouched]


def kept(with_metadata: bool) -> list[bool]:
    """Puts two objects by one connector and gets them by another: whether a third one is not found,
    does not come, and whether the two are as they were put."""
    extra = {
        "save_chunk_meta": with_metadata,
        "transfer_timeout": int(TIMEOUT_S),
        "mooncake_local_hostname": HOST,
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_master_server_address": f"{HOST}:50051",
        "mooncake_global_segment_size": str(16 << 20),
        "mooncake_local_buffer_size": str(4 << 20),
    }
    config = LMCacheEngineConfig.from_defaults(
        local_cpu=True, max_local_cpu_size=0.1, chunk_size=16, extra_config=extra
    )
    about = LMCacheMetadata(
        model_name="tiny",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(2, 2, 16, 2, 8),
        chunk_size=16,
    )
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    ends = [LocalCPUBackend(config, about, dst_device="cpu") for _ in range(2)]
    one, other = (MooncakestoreConnector(loop, end, config) for end in ends)
    first = 20 if with_metadata else 10
    keys = [CacheEngineKey("tiny", 1, 0, first + i, torch.float32) for i in range(3)]
    shapes, dtypes = [torch.Size([2, 2, 16, 16])], [torch.float32]
    given = []
    for i in range(2):
        made = ends[0].allocate(shapes, dtypes, MemoryFormat.KV_2LTD)
        made.tensor.normal_(generator=torch.Generator().manual_seed(i))
        given.append(made)

    def awaited(work: object) -> Sequence[object]:
        return asyncio.run_coroutine_threadsafe(work, loop).result(TIMEOUT_S)  # type: ignore[arg-type]

    awaited(one.batched_put(keys[:2], given))
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(other.exists_sync(key) for key in keys[:2]):
        if time.monotonic() > deadline_s:
            raise TimeoutError("what was put is not found")
        time.sleep(0.01)
    came = awaited(other.batched_get(keys))
    right = [torch.equal(a.tensor, b.tensor) for a, b in zip(came[:2], given, strict=True)]
    found = [not other.exists_sync(keys[2]), came[2] is None, *right]
    for connector in (one, other):
        awaited(connector.close())
    return found


if __name__ == "__main__":
    found = {
        "nixl": copied("nixl"),
        "mooncake_te": copied("mooncake_te"),
        "zero copy": kept(False),
        "with metadata": kept(True),
    }
    sys.stdout.write(json.dumps(found) + "\n")
