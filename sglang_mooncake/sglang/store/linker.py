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
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.utils import get_device_module
from sglang.version import __version__

from kvstore.client.deadline import Deadline
from kvstore.client.placement import share_of
from kvstore.loading import Load
from kvstore.objects.changes import Keys, keys_of_hex
from kvstore.objects.outcomes import Put
from kvstore.store import Store
from sglang_mooncake.sglang.releases import Mode, lacking
from sglang_mooncake.sglang.store.admission import Admission
from sglang_mooncake.sglang.store.device_pools import (
    DevicePool,
    are_shared,
    facts_of,
    pools_of,
)
from sglang_mooncake.sglang.store.figures import open_exporter, store_label
from sglang_mooncake.sglang.store.forwards import Forwards
from sglang_mooncake.sglang.store.layer_loads import LayerLoads, PoolLoad
from sglang_mooncake.sglang.store.options import Options
from sglang_mooncake.sglang.store.prefixes import trailing_pages
from sglang_mooncake.sglang.store.signatures import SignatureNow, weights_of

try:
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
        LayerWiseLoadCounter,
        UnifiedCacheLinker,
    )
except ImportError as error:
    raise ImportError(lacking(Mode.LINKER, __version__) or str(error)) from error

__all__ = ["StoreLinker"]

logger = logging.getLogger(__name__)

PAGE_TOKENS_MIN: Final = 16
OFFLOADS_MAX: Final = 1024
OFFLOAD_WAIT_MAX_S: Final = 30.0
"""Offloads that wait, and for how long; each holds nodes of SGLang's tree. What is more is dropped
in its turn, as one that has failed: its pages are offered again when they are used again."""
OFFLOAD_TIMEOUT_S: Final = 10.0
COMPONENTS: Final = {ComponentType.FULL, ComponentType.SWA}
STORED: Final = {Put.STORED, Put.EXISTS, Put.BEING_STORED}
CLOSE_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class _Pages:
    """Pages of one pool: what they are called, and the pool's token slots, page by page."""

    keys: Keys
    indices: torch.Tensor
    signature: bytes


Pages = Mapping[PoolName, _Pages]


@dataclass(frozen=True)
class _Load:
    pages: Pages
    #: Happens once the pages' indices are in the host's memory.
    ready: Any


@dataclass(frozen=True)
class _Batch:
    index: int
    #: Of each request.
    loads: Sequence[_Load]


@dataclass(frozen=True)
class _Offload:
    pages: Pages
    ready: Sequence[Any]
    #: SGLang keeps the pages as they are until the next `reset`, and no longer.
    resets: int
    #: By the monotonic clock.
    since_s: float


class StoreLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """One rank's part, which uses the store by the owner of its host."""

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
        others = sorted(one.name for one in components - COMPONENTS)
        if others:
            raise ValueError(
                "the store holds pages of full attention and of sliding windows, and this model has"
                f" {others} too; leave --enable-unified-cache-external-linker out for it"
            )
        if params.page_size < PAGE_TOKENS_MIN:
            logger.warning(
                "--page-size %d makes objects of %d tokens for the store, each of which costs some"
                " microseconds; with --page-size 64 it is much faster",
                params.page_size,
                params.page_size,
            )
        options = Options.of(extra_config, store_label())
        pools = pools_of(params.token_to_kv_pool_allocator.get_kvcache(), params.page_size)
        self.forward_stream = forward_stream
        self.pools = {one.name: one.kvcache for one in pools}
        self._pools = {one.name: one for one in pools}
        self._layers = sum(one.pages.layers for one in pools)
        weights = weights_of(server_args, options.weights)
        self._signatures = {
            one.name: SignatureNow(weights, facts_of(one, server_args)) for one in pools
        }
        self.layer_done_counter = LayerWiseLoadCounter(self._layers)
        self._options = options
        self._store = Store(options.store.of_rank(shared=are_shared(pools)))
        for one in pools:
            one.pages.register(self._store.register)
        self._exporter = open_exporter(self._store.figures)
        forwards = Forwards(has_streams=pools[0].pages.on_gpu) if options.admission else None
        self._admission = Admission(self._store, forwards, params.page_size)
        self._queued: dict[str, _Load] = {}
        self._batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._offloads: queue.SimpleQueue[_Offload | None] = queue.SimpleQueue()
        self._offloads_waiting = 0
        self._offloads_dropped = 0
        self._is_dropping = False
        #: Of the offload under way; None while there is none.
        self._offloading: Deadline | None = None
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
        for one in pools:
            logger.info(
                "the store holds this rank's pages: %d bytes each, %s; the host should lend %d B",
                one.pages.page_bytes,
                self._signatures[one.name],
                options.store.memory,
            )

    # -- look-ups

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of pages, from the first on, that the store is known to have and that are
        worth loading: with windows, those whose last pages it has in the pool of windows, too."""
        whole, *windows = transfers
        keys = keys_of_hex(whole.keys)
        signature, page_bytes = self._signatures[whole.name].digest, self._page_bytes(whole.name)
        if signature is None:
            return []
        pages = self._admission.offered(keys, signature, page_bytes, rid)
        lengths = set(range(1, pages + 1))
        for one in windows:
            # SGLang names as many pages as a window has, or all if there are fewer.
            found = self._found(one.name, keys[:pages])
            lengths &= set(trailing_pages(found, len(one.keys)))
        return sorted(lengths)

    def _found(self, name: PoolName, keys: Keys) -> npt.NDArray[np.bool_]:
        signature = self._signatures[name].digest
        assert signature is not None, "all pools have signatures, or none has"
        return self._store.exists(keys, signature, self._page_bytes(name))

    def _page_bytes(self, name: PoolName) -> int:
        return self._pools[name].pages.page_bytes

    # -- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queues it. Every rank must give the same answer, so that it is yes, unless the weights
        were updated since the look-up: all ranks are told of that before the same batch."""
        if self._signatures[PoolName.KV].digest is None:
            return False
        # The scheduler's own stream may have yet to compute the indices: the thread waits for it.
        pages = {
            one.name: self._pages_of(one, one.device_indices.to("cpu", non_blocking=True))
            for one in transfers
        }
        ready = get_device_module().Event()
        ready.record()
        self._queued[rid] = _Load(pages, ready)
        return True

    def _pages_of(self, transfer: PoolTransfer, indices: torch.Tensor) -> _Pages:
        signature = self._signatures[transfer.name].digest
        assert signature is not None, "nothing is queued without a signature"
        return _Pages(keys_of_hex(transfer.keys), indices, signature)

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
            self._batches.put(_Batch(index, list(loads.values())))
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
        for one in batch.loads:
            one.ready.synchronize()
        loaded = [one.pages for one in batch.loads]
        whole = [one[PoolName.KV] for one in loaded]
        keys = np.concatenate([one.keys for one in whole])
        with self._admission.loading(keys, whole[0].signature, self._page_bytes(PoolName.KV)):
            loads = [
                self._load_of(pool, [one[pool.name] for one in loaded])
                for pool in self._pools.values()
            ]
            with LayerLoads(loads, self._layers, self._options.layers_per_read) as reads:
                for layer in reads.layers():
                    self.layer_done_counter.complete(batch.index, layer)

    def _load_of(self, pool: DevicePool, pages: Sequence[_Pages]) -> PoolLoad:
        """Of one pool, for all requests of a batch."""
        indices = torch.cat([one.indices for one in pages]).numpy()
        keys = np.concatenate([one.keys for one in pages])
        # Weights change between batches alone, so that all loads of one have one signature.
        signature = pages[0].signature
        pieces = pool.pages.pieces(indices)
        load = Load(self._store, keys, signature, pieces, self._options.load_timeout_s)
        return PoolLoad(str(pool.name), load, pool.layers, pool.pages.pieces_per_layer)

    # -- offloads

    def offload(
        self,
        transfers: list[PoolTransfer],
        session_id: str | None = None,  # noqa: ARG002
    ) -> bool:
        """Queues it. Every rank must give the same answer, since SGLang counts what was accepted by
        all of them together: so it is yes, however many wait at this one, unless pages may be of
        other weights than the signature says, which all ranks know before the same batch."""
        if self._signatures[PoolName.KV].digest is None:
            return False
        ready = self.record_offload_ready()
        pages = {one.name: self._pages_of(one, one.device_indices) for one in transfers}
        with self._idle:
            self._offloads_waiting += 1
            self._offloads.put(_Offload(pages, ready, self._resets, time.monotonic()))
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
                if offload.resets != self._resets:
                    continue  # Its pages may have been used again since.
                self._offloads_waiting -= 1
                deadline = self._offloading = Deadline(OFFLOAD_TIMEOUT_S)
                is_late = time.monotonic() - offload.since_s > OFFLOAD_WAIT_MAX_S
                is_dropped = is_late or self._offloads_waiting >= OFFLOADS_MAX
            self._tell_dropped(is_dropped)
            stored = False
            try:
                stored = not is_dropped and self._offload(offload, deadline)
            except Exception:
                logger.exception("pages were not stored")
            with self._idle:
                if offload.resets == self._resets:
                    self._completed.append(stored)
                self._offloading = None
                self._idle.notify_all()

    def _tell_dropped(self, is_dropped: bool) -> None:
        """Each time that it begins, and ends."""
        self._offloads_dropped += is_dropped
        if is_dropped != self._is_dropping:
            self._is_dropping = is_dropped
            logger.warning(
                "offloads to the store are %s: %d wait, and %d were dropped since the start",
                "dropped, as the store is slower than they come" if is_dropped else "stored again",
                self._offloads_waiting,
                self._offloads_dropped,
            )

    def _offload(self, offload: _Offload, deadline: Deadline) -> bool:
        """Windows first: prompts whose windows are not stored cannot be loaded, so that they are
        not stored either. The other way round nothing is lost, since a look-up asks for both."""
        for event in offload.ready:
            event.synchronize()
        return all(
            self._is_stored(name, offload.pages[name], deadline)
            for name in sorted(offload.pages, key=lambda name: name == PoolName.KV)
        )

    def _is_stored(self, name: PoolName, pages: _Pages, deadline: Deadline) -> bool:
        """Whether this rank's share of the pages is."""
        pool = self._pools[name]
        keys, pieces = pages.keys, pool.pages.pieces(pages.indices.cpu().numpy())
        mine = share_of(keys, *pool.share)
        if len(mine) < len(keys):
            keys, pieces = keys[mine], pieces.of(mine)
        outcomes = self._store.put(keys, pages.signature, pieces, deadline=deadline)
        return all(one in STORED for one in outcomes)

    # -- the end

    def reset(self) -> None:
        """Waits for what is under way, and drops what is queued: SGLang uses the pages again after
        that. What is stored stays: keys name tokens and weights, which a flush of the device does
        not change."""
        self._queued.clear()
        with self._idle:
            self._resets += 1
            self._offloads_waiting = 0
            if self._offloading is not None:
                self._offloading.end()
            if not self._idle.wait_for(lambda: self._offloading is None, CLOSE_TIMEOUT_S):
                logger.error(
                    "pages are being read for the store since %g s and more; they are used again"
                    " now, and what was read is not stored",
                    CLOSE_TIMEOUT_S,
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
        self._admission.close()
        self._store.close()
