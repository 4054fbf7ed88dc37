# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on the store: pages go from the device pools into it, and from it into the
pools layer by layer while the model already computes.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "StoreLinker",
        "linker_module_path": "sglang_mooncake.sglang.store.linker",
        "linker_extra_config": {"memory": "16GiB"}}'

Written against SGLang 0.5.23 (`mem_cache/unified_cache/unified_cache_linker.py`), whose scheduler
calls everything here but the two threads.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from kvstore.changes import Keys, keys_of_hex
from kvstore.loading import Load
from kvstore.outcomes import Got, Put
from kvstore.store import Store
from sglang_mooncake.sglang.store.figures import open_exporter
from sglang_mooncake.sglang.store.kv_pool import KVPool
from sglang_mooncake.sglang.store.options import Options
from sglang_mooncake.sglang.store.signatures import SignatureNow, heads_of_rank, weights_of

__all__ = ["StoreLinker"]

logger = logging.getLogger(__name__)

PAGE_TOKENS_MIN: Final = 16
OFFLOADS_MAX: Final = 1024
"""Offloads that wait; each holds nodes of SGLang's tree. More are refused: their pages are offered
again when they are used again."""
STORED: Final = {Put.STORED, Put.EXISTS, Put.BEING_STORED}
CLOSE_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class _Load:
    keys: Keys
    token_indices: npt.NDArray[np.int64]
    signature: bytes


@dataclass(frozen=True)
class _Batch:
    index: int
    loads: Mapping[str, _Load]


@dataclass(frozen=True)
class _Offload:
    keys: Keys
    signature: bytes
    indices: torch.Tensor
    ready: Sequence[Any]
    #: SGLang keeps the pages as they are until the next `reset`, and no longer.
    resets: int


class StoreLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's part. Lends memory to the store, and uses that of all others."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[ComponentType],
        extra_config: Mapping[str, Any],
        forward_stream: Any = None,
    ) -> None:
        """Raises ``ValueError`` for a model or a setting that the store cannot serve."""
        others = sorted(one.name for one in components if one is not ComponentType.FULL)
        if others:
            raise ValueError(
                f"the store holds pages of full attention alone, and this model has {others} too;"
                " leave --enable-unified-cache-external-linker out for it"
            )
        if params.is_eagle:
            raise ValueError(
                "the store does not hold the draft model's cache, and this server drafts"
                " (--speculative-algorithm); leave --enable-unified-cache-external-linker out"
            )
        if params.page_size < PAGE_TOKENS_MIN:
            logger.warning(
                "--page-size %d makes objects of %d tokens for the store, each of which costs some"
                " microseconds; with --page-size 64 it is much faster",
                params.page_size,
                params.page_size,
            )
        options = Options.of(extra_config)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool}
        self._pool = KVPool(pool, params.page_size)
        heads = (0, 0) if self._pool.is_mla else heads_of_rank(self._pool.heads, server_args)
        weights = weights_of(server_args, options.weights)
        self._signature = SignatureNow(weights, self._pool.facts(heads))
        self.layer_done_counter = LayerWiseLoadCounter(self._pool.layers)
        self._options = options
        self._store = Store(options.store)
        self._pool.register(self._store.register)
        self._exporter = open_exporter(self._store.status)
        self._queued: dict[str, _Load] = {}
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._offloads: queue.SimpleQueue[_Offload | None] = queue.SimpleQueue()
        self._offloads_waiting = 0
        self._offloading = False
        self._resets = 0
        self._completed: deque[bool] = deque()
        self._idle = threading.Condition()
        self._threads = [
            threading.Thread(target=one, name=name, daemon=True)
            for one, name in (
                (self._run_loads, "store-load"),
                (self._run_offloads, "store-offload"),
            )
        ]
        for thread in self._threads:
            thread.start()
        logger.info(
            "the store holds this rank's pages: %d bytes each, %s, %d bytes of memory lent",
            self._pool.page_bytes,
            self._signature,
            options.store.memory,
        )

    # -- look-ups

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:  # noqa: ARG002
        """Every number of pages, from the first on, that the store is known to have."""
        (transfer,) = transfers
        keys = keys_of_hex(transfer.keys)
        found = self._store.exists(keys, self._signature.digest, self._pool.page_bytes)
        run = len(found) if found.all() else int(found.argmin())
        return list(range(1, run + 1))

    # -- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues it. Every rank must give the same answer, so that it is always yes."""
        (transfer,) = transfers
        indices = transfer.device_indices.cpu().numpy()
        self._queued[rid] = _Load(keys_of_hex(transfer.keys), indices, self._signature.digest)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """False if it has begun, or is none."""
        return self._queued.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Begins what is queued; -1 if nothing is."""
        if not self._queued:
            return -1
        index = self.layer_done_counter.update_producer()
        loads, self._queued = self._queued, {}
        with self._idle:
            self._batches.put(_Batch(index, loads))
        return int(index)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits for the batch; whether all of it has landed."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _run_loads(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._load(batch)
            except Exception as exc:
                logger.exception("a load from the store failed; SGLang aborts its requests")
                self.layer_done_counter.fail(batch.index, exc)

    def _load(self, batch: _Batch) -> None:
        """A layer is reported once it is proven to be right, apart from the checksums of whole
        pages. These are compared before the last layer is reported: until then the batch is not
        done, and can fail."""
        loads = list(batch.loads.values())
        pieces = self._pool.pieces(np.concatenate([one.token_indices for one in loads]))
        keys = np.concatenate([one.keys for one in loads])
        # Weights change between batches alone, so that all loads of one have one signature.
        signature = loads[0].signature
        load = Load(self._store, keys, signature, pieces, self._options.load_timeout_s)
        try:
            parts = self._parts()
            for first, end in parts:
                per_layer = self._pool.pieces_per_layer
                load.begin(first * per_layer, end * per_layer)
            for number, (first, end) in enumerate(parts):
                if not load.wait(number):
                    break
                for layer in range(first, min(end, self._pool.layers - 1)):
                    self.layer_done_counter.complete(batch.index, layer)
            outcomes = load.finish()
        finally:
            load.cancel()
        wrong = [one for one in outcomes if one is not Got.RIGHT]
        if wrong:
            raise LookupError(
                f"{len(wrong)} of {len(outcomes)} pages did not come: {wrong[0].value}"
            )
        self.layer_done_counter.complete(batch.index, self._pool.layers - 1)

    def _parts(self) -> list[tuple[int, int]]:
        """Ranges of layers that are read together."""
        step = self._options.layers_per_read
        ends = range(step, self._pool.layers + step, step)
        return [(end - step, min(end, self._pool.layers)) for end in ends]

    # -- offloads

    def offload(
        self,
        transfers: list[PoolTransfer],
        session_id: str | None = None,  # noqa: ARG002
    ) -> bool:
        """Queues it; False if too many wait already."""
        (transfer,) = transfers
        with self._idle:
            if self._offloads_waiting >= OFFLOADS_MAX:
                return False
            self._offloads_waiting += 1
        ready = self.record_offload_ready()
        keys, signature = keys_of_hex(transfer.keys), self._signature.digest
        self._offloads.put(_Offload(keys, signature, transfer.device_indices, ready, self._resets))
        return True

    def num_completed_offloads(self) -> int:
        """Those that wait for ``pop_completed_offload``."""
        return len(self._completed)

    def pop_completed_offload(self) -> bool:
        """Whether all pages of the oldest one are stored."""
        return self._completed.popleft()

    def _run_offloads(self) -> None:
        while (offload := self._offloads.get()) is not None:
            with self._idle:
                self._offloading = offload.resets == self._resets
                self._offloads_waiting -= self._offloading
            if not self._offloading:
                continue  # Its pages may have been used again since.
            stored = False
            try:
                stored = self._offload(offload)
            except Exception:
                logger.exception("pages were not stored")
            with self._idle:
                self._completed.append(stored)
                self._offloading = False
                self._idle.notify_all()

    def _offload(self, offload: _Offload) -> bool:
        for event in offload.ready:
            event.synchronize()
        pieces = self._pool.pieces(offload.indices.cpu().numpy())
        outcomes = self._store.put(offload.keys, offload.signature, pieces)
        return all(one in STORED for one in outcomes)

    # -- the end

    def reset(self) -> None:
        """Waits for what is under way, and drops what is queued: SGLang uses the pages again after
        that. What is stored stays: keys name tokens and weights, which a flush of the device does
        not change. RuntimeError if a page is still being read."""
        self._queued.clear()
        with self._idle:
            self._resets += 1
            self._offloads_waiting = 0
            if not self._idle.wait_for(lambda: not self._offloading, CLOSE_TIMEOUT_S):
                raise RuntimeError(
                    f"pages are being stored since {CLOSE_TIMEOUT_S:g} s and more: they must not be"
                    " used again"
                )
            self._completed.clear()
        for index in list(self.layer_done_counter.futures):
            self.layer_done_counter.finish(index)
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Ends the threads and gives the lent memory back."""
        self.reset()
        self._batches.put(None)
        self._offloads.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        if self._exporter is not None:
            self._exporter.close()
        self._store.close()
