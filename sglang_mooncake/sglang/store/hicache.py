# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache on the store: pages go from its host pools into the store, and from it into
them.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "interface_v1": 1,
        "module_path": "sglang_mooncake.sglang.store.hicache", "class_name": "HiCacheStore",
        "memory": "16GiB"}'

Written against SGLang 0.5.23 (`mem_cache/hicache_storage.py`). Its prefetch and backup threads call
everything here but the constructor and `close`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_server_args

from kvstore.objects.changes import keys_of_hex
from kvstore.objects.outcomes import Got, Put
from kvstore.store import StillLanding, Store
from sglang_mooncake.sglang.store.admission import Admission
from sglang_mooncake.sglang.store.figures import open_exporter, store_label
from sglang_mooncake.sglang.store.forwards import Forwards
from sglang_mooncake.sglang.store.host_pool import HostPool
from sglang_mooncake.sglang.store.options import Options
from sglang_mooncake.sglang.store.prefixes import all_pages, trailing_pages
from sglang_mooncake.sglang.store.signatures import (
    PoolFacts,
    SignatureNow,
    facts_by_rank,
    heads_of_rank,
    weights_of,
)

__all__ = ["HiCacheStore"]

logger = logging.getLogger(__name__)

STORED: Final = {Put.STORED, Put.EXISTS, Put.BEING_STORED}
#: What SGLang reads from the extra config itself.
_SGLANGS: Final = ("backend_name", "module_path", "class_name", "allocator", "file_storage_path")


class _Pool(NamedTuple):
    host: HostPool
    signature: SignatureNow


class HiCacheStore(HiCacheStorage):  # type: ignore[misc]
    """One rank's part, which uses the store by the owner of its host."""

    def __init__(self, storage_config: HiCacheStorageConfig, _: Any = None) -> None:
        """Raises ``ValueError`` for a server or a setting that the store cannot serve."""
        extra = dict(storage_config.extra_config or {})
        if not extra.pop("interface_v1", 0):
            raise ValueError(
                'the store reads into HiCache\'s own memory: give "interface_v1": 1 in'
                " --hicache-storage-backend-extra-config"
            )
        if storage_config.should_split_heads:
            raise ValueError(
                "the store keeps the pages of different TP sizes apart: leave tp_lcm_size out of"
                " --hicache-storage-backend-extra-config"
            )
        self._server_args = get_server_args()
        if self._server_args.hicache_storage_backend is None:
            raise ValueError(
                "the store must see every update of weights, and this server may have been updated"
                " before: give --hicache-storage-backend when the server starts"
            )
        ours = {k: v for k, v in extra.items() if k not in _SGLANGS}
        self._options = Options.of(ours, store_label())
        self._config = storage_config
        self._weights = weights_of(self._server_args, self._options.weights)
        self._pools: dict[str, _Pool] = {}
        shared = storage_config.is_mla_model and storage_config.tp_size > 1
        self._store = Store(self._options.store.of_rank(shared=shared))
        #: From the registration of the KV cache's pool on.
        self._admission: Admission | None = None
        self._exporter = open_exporter(self._store.figures)

    def close(self) -> None:
        """Gives the lent memory back."""
        if self._admission is not None:
            self._admission.close()
        if self._exporter is not None:
            self._exporter.close()
        self._store.close()

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the KV cache. ``ValueError`` if its pages cannot be stored."""
        super().register_mem_pool_host(mem_pool_host)
        if self._admission is None:
            forwards = None
            if self._options.admission:
                forwards = Forwards(has_streams=self._server_args.device == "cuda")
            self._admission = Admission(self._store, forwards, int(mem_pool_host.page_size))
        if _has_memory(mem_pool_host):  # Else only other pools have memory.
            self._add(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool of a model that has several."""
        if str(host_pool_name) not in self._pools and _has_memory(host_pool):
            self._add(host_pool_name, host_pool)

    def _add(self, name: Any, pool: Any) -> None:
        host = HostPool(pool)
        signature = SignatureNow(self._weights, self._facts(str(name), pool, host))
        host.register(self._store.register)
        self._pools[str(name)] = _Pool(host, signature)
        logger.info(
            "the store holds this rank's pages of the pool %s: %d bytes each, %s, %d bytes of"
            " memory lent",
            name,
            host.page_bytes,
            signature,
            self._options.store.memory,
        )

    def _facts(self, name: str, pool: Any, host: HostPool) -> PoolFacts:
        """Ranks that have the same must have the same signature, and no others: of the KV cache it
        is known which layers and heads a rank has, of other pools only which rank it is."""
        config = self._config
        dtype = str(pool.dtype).removeprefix("torch.")
        layout = host.layout
        if config.attn_cp_size > 1:
            layout += f" cp {config.attn_cp_rank}/{config.attn_cp_size}"
        if name == PoolName.KV:
            first = int(pool.start_layer or 0)
            is_mla = isinstance(pool, MLATokenToKVPoolHost)
            heads = (0, 0) if is_mla else heads_of_rank(int(pool.head_num), self._server_args)
            layers = first, first + int(pool.layer_num)
            return PoolFacts(dtype, host.page_size, layers, heads, layout)
        # As SGLang says who writes (`HybridCacheController.should_backup`).
        has_ranks = not config.is_mla_model or name == PoolName.MAMBA
        tp = (config.tp_rank, config.tp_size) if has_ranks else None
        facts = PoolFacts(dtype, host.page_size, (0, 0), (0, 0), layout)
        return facts_by_rank(facts, name, tp, (config.pp_rank, config.pp_size))

    # -- what is there

    def batch_exists(
        self,
        keys: list[str],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> int:
        """How many pages, from the first on, the store is known to have and are worth loading."""
        return self._offered(keys)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> PoolTransferResult:
        """Which prefixes of the pages can be loaded, with what their other pools need."""
        pages = self._offered(keys) if PoolName.KV in self._pools else len(keys)
        hits = {PoolName.KV: pages} if pages else {}
        restorable = set(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            good = self._prefixes(transfer, keys[:pages])
            if good:
                hits[transfer.name] = good[-1]
            restorable &= set(good)
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _prefixes(self, transfer: PoolTransfer, keys: list[str]) -> Sequence[int]:
        found = self._found(transfer.name, keys)
        match transfer.hit_policy:
            case PoolHitPolicy.ALL_PAGES:
                return all_pages(found)
            case PoolHitPolicy.TRAILING_PAGES:
                return trailing_pages(found, max(1, len(transfer.keys or ())))
        raise ValueError(f"the store does not know the hit policy {transfer.hit_policy}")

    def _offered(self, keys: Sequence[str]) -> int:
        pool = self._pools[PoolName.KV]
        assert self._admission is not None
        digest = pool.signature.digest
        if digest is None:
            return 0
        return self._admission.offered(keys_of_hex(keys), digest, pool.host.page_bytes)

    def _found(self, name: str, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        pool = self._pools[str(name)]
        digest = pool.signature.digest
        if digest is None:
            return np.zeros(len(keys), np.bool_)
        return self._store.exists(keys_of_hex(keys), digest, pool.host.page_bytes)

    # -- pages

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Reads pages into the pool; blocks. Whether each is there and right."""
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> list[bool]:
        """Stores pages of the pool; blocks. Whether each is stored now."""
        return self._set(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """As ``batch_get_v1``, for pages of several pools."""
        return {
            one.name: self._get(one.name, one.keys or [], one.host_indices) for one in transfers
        }

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """As ``batch_set_v1``, for pages of several pools."""
        return {
            one.name: self._set(one.name, one.keys or [], one.host_indices) for one in transfers
        }

    def _get(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        pool = self._pools[str(name)]
        packed, digest, pieces = keys_of_hex(keys), pool.signature.digest, pool.host.pieces(indices)
        timeout_s = self._options.load_timeout_s
        if digest is None:
            return [False] * len(keys)
        with contextlib.ExitStack() as stack:
            if self._admission is not None and name == PoolName.KV:
                stack.enter_context(self._admission.loading(packed, digest, pool.host.page_bytes))
            try:
                outcomes = self._store.get(packed, digest, pieces, timeout_s)
            except StillLanding as exc:
                exc.wait()  # Whatever is returned or raised, SGLang uses the pages again.
                outcomes = [Got.TIMED_OUT] * len(keys)
        _tell("read", name, [one.value for one in outcomes if one is not Got.RIGHT])
        return [one is Got.RIGHT for one in outcomes]

    def _set(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        pool = self._pools[str(name)]
        digest = pool.signature.digest
        if digest is None:
            return [False] * len(keys)
        outcomes = self._store.put(keys_of_hex(keys), digest, pool.host.pieces(indices))
        _tell("stored", name, [one.value for one in outcomes if one not in STORED])
        return [one in STORED for one in outcomes]

    def clear(self) -> None:
        """Removes what has this rank's signatures, for all servers that share the store."""
        for name, pool in self._pools.items():
            digest = pool.signature.digest
            if digest is None:
                logger.warning("no page of the pool %s has the weights of now: flush first", name)
            else:
                self._store.clear(digest)

    # -- the interface that SGLang does not use with interface_v1

    def get(self, key: str, *_: Any) -> torch.Tensor | None:
        """Not there: SGLang reads by ``batch_get_v1``."""
        raise NotImplementedError(_ONLY_V1)

    batch_get = set = batch_set = get

    def exists(self, key: str) -> bool:
        """Whether the store is known to have a page."""
        return bool(self._found(PoolName.KV, [key]).all())


_ONLY_V1: Final = "the store's pages are read and written by batch_get_v1 and batch_set_v1"


def _tell(action: str, name: str, why: Sequence[str]) -> None:
    if why:
        logger.warning(
            "%d pages of the pool %s were not %s: %s", len(why), name, action, Counter(why)
        )


def _has_memory(pool: Any) -> bool:
    return getattr(pool, "kv_buffer", None) is not None
