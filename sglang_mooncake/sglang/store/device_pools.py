# SPDX-License-Identifier: Apache-2.0
"""The device pools of one rank as the store sees them: one for most models, and two for models with
sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from sglang_mooncake.sglang.store.kv_pool import KVPool
from sglang_mooncake.sglang.store.signatures import PoolFacts, facts_by_rank, heads_of_rank

__all__ = ["DevicePool", "are_shared", "facts_of", "pools_of"]


@dataclass(frozen=True)
class DevicePool:
    """One pool, and which of the model's layers it has."""

    name: PoolName
    #: What SGLang has.
    kvcache: Any
    pages: KVPool
    #: Their numbers in the rank's forward, ascending: those that SGLang waits for.
    layers: Sequence[int]

    @property
    def share(self) -> tuple[int, int]:
        """Which part of its pages this rank stores, and of how many: all ranks of a TP group have
        the same pages of MLA, and would store each as often as there are ranks."""
        if not self.pages.is_mla:
            return 0, 1
        parallel = get_parallel()
        return int(parallel.attn_tp_rank), int(parallel.attn_tp_size)


def pools_of(kvcache: Any, page_size: int) -> list[DevicePool]:
    """The pool of whole prompts first, then that of windows if there is one. ``ValueError`` for
    pools that the store cannot hold."""
    if type(kvcache) is not SWAKVPool:
        pages = KVPool(kvcache, page_size)
        return [DevicePool(PoolName.KV, kvcache, pages, range(pages.layers))]
    mapping = kvcache.layers_mapping
    if sorted(mapping) != list(range(len(mapping))):
        raise ValueError(
            f"this rank has the layers {min(mapping)} to {max(mapping)} of a model with sliding"
            " windows, and SGLang waits for a rank's layers by their numbers from 0 on; leave"
            " --pp-size or --enable-unified-cache-external-linker out"
        )
    found = []
    for name, windows in ((PoolName.KV, False), (PoolName.SWA, True)):
        layers = sorted(
            layer for layer, (_, has_window) in mapping.items() if has_window == windows
        )
        pool = kvcache.swa_kv_pool if windows else kvcache.full_kv_pool
        if not layers:
            raise ValueError(
                f"this model has no layers in its pool {name}; leave"
                " --enable-unified-cache-external-linker out for it"
            )
        found.append(DevicePool(name, pool, KVPool(pool, page_size), layers))
    return found


def are_shared(pools: Sequence[DevicePool]) -> bool:
    """Whether other ranks of this server have the same pages."""
    return all(one.pages.is_mla for one in pools) and get_parallel().attn_tp_size > 1


def facts_of(pool: DevicePool, server_args: Any) -> PoolFacts:
    """What a signature says of a pool's pages: of the pool of whole prompts, which KV heads of the
    model this rank has; of windows, whose heads can be others, which rank it is."""
    pages = pool.pages
    if pool.name == PoolName.KV:
        heads = (0, 0) if pages.is_mla else heads_of_rank(pages.heads, server_args)
        return pages.facts(heads)
    parallel = get_parallel()
    tp = None if pages.is_mla else (parallel.attn_tp_rank, parallel.attn_tp_size)
    pp = parallel.pp_rank, parallel.pp_size
    return facts_by_rank(pages.facts((0, 0)), str(pool.name), tp, pp)
