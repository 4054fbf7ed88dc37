# SPDX-License-Identifier: Apache-2.0
"""vLLM's prefix cache on the store: blocks go from the KV cache into it, and from it into the cache
while other requests are computed.

    --kv-transfer-config '{"kv_connector": "StoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "sglang_mooncake.vllm.store_connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"memory": "16GiB"}}'

Written against vLLM's `vllm/distributed/kv_transfer/kv_connector/v1/base.py`. vLLM makes one
in the scheduler's process, and one in each worker's; each is asked its own half of the methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.objects.changes import Keys
from kvstore.store import Store
from sglang_mooncake.context import engine_label
from sglang_mooncake.vllm.facts import block_tokens, check_server, share_of_rank, signature_of
from sglang_mooncake.vllm.kernels import cache_tensors, kernel_of, plain
from sglang_mooncake.vllm.options import Options
from sglang_mooncake.vllm.page_map import PageMap
from sglang_mooncake.vllm.requests import Requests, Work, held_by_all
from sglang_mooncake.vllm.seam import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
    get_tensor_model_parallel_rank,
    logger,
    release,
)
from sglang_mooncake.vllm.store_worker import Ready, StoreWorker

__all__ = ["StoreConnector"]


@dataclass
class RankPages(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker tells the scheduler's process as it starts: what its pages are."""

    signature: bytes
    page_bytes: int


@dataclass
class StepWork(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler wants of the workers beside one step."""

    loads: list[Work] = field(default_factory=list)
    saves: list[Work] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)


class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One process's part."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ``ValueError`` for a server or a setting that the store cannot serve."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_server(vllm_config, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        is_scheduler = role == KVConnectorRole.SCHEDULER
        who = f"store of vLLM {'scheduler' if is_scheduler else 'worker'}"
        label = engine_label(who, str(vllm_config.model_config.model))
        self._options = Options.of(extra, label)
        #: The scheduler's half.
        self._ranks: list[RankPages] = []
        self._requests = Requests(block_tokens(vllm_config), self._stored)
        self._running: dict[str, Any] = {}
        self._loads: list[Work] = []
        #: A worker's half.
        self._worker: StoreWorker | None = None
        self._device = torch.device("cpu")
        shared = vllm_config.model_config.use_mla
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self._store = Store(self._options.store.of_rank(shared=shared and ranks > 1))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """vLLM 0.33 and later ask before the server starts. Registrations of the KV cache
        stay for the server's life, and sleep takes the memory away."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not stored costs a computation, and nothing else."""
        return False

    # -- the scheduler's process

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """What all TP ranks have said, by rank."""
        self._ranks = [one for _, one in sorted(metadata.items())]

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens the store has behind those; they are loaded while others are computed."""
        tokens = self._requests.match(request.request_id, request.block_hashes, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks, into which this many tokens are loaded."""
        name = request.request_id
        self._running[name] = request
        (numbers,) = blocks.get_block_ids()
        load = self._requests.given(name, request.block_hashes, numbers, num_external_tokens)
        if load is not None:
            self._loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        """What the workers are to load and to store beside this step."""
        loads, self._loads = self._loads, []
        saves: list[Work] = []
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._running[name]
            (blocks,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
            end = request.num_computed_tokens + tokens
            save = self._requests.computed(name, request.block_hashes, blocks, end)
            if save is not None:
                saves.append(save)
        return StepWork(loads, saves, set(scheduler_output.preempted_req_ids or ()))

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the workers may still read its blocks."""
        self._running.pop(request.request_id, None)
        return self._requests.finished(request.request_id), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``; there is one group."""
        return self.request_finished(request, block_ids[0])

    def _stored(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which pages every rank can load. Asks nobody."""
        ranks = [(one.signature, one.page_bytes) for one in self._ranks]
        return held_by_all(keys, ranks, self._store.exists)

    # -- a worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV cache, by the names of layers: it is what pages are read into."""
        tensors = cache_tensors(kv_caches)
        pages = PageMap([plain(one) for one in tensors], self._kv_cache_config.num_blocks)
        rank = get_tensor_model_parallel_rank()
        kernel = kernel_of(self._vllm_config)
        weights = self._options.weights
        signature = signature_of(self._vllm_config, pages, kernel, rank, weights, release)
        self._device = tensors[0].device
        for storage in {one.untyped_storage().data_ptr(): one for one in tensors}.values():
            self._register(storage.untyped_storage())
        share = share_of_rank(self._vllm_config, rank)
        timeout_s = self._options.load_timeout_s
        self._worker = StoreWorker(self._store, pages, signature.digest, timeout_s, share)
        self._ranks = [RankPages(signature.digest, pages.page_bytes)]
        logger.info("the store holds this rank's pages: %s", signature)

    def _register(self, storage: torch.UntypedStorage) -> None:
        """As a buffer where the processor can read it, else by address."""
        if self._device.type == "cpu":
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._store.register(whole.numpy())
        else:
            self._store.register(storage.data_ptr(), storage.nbytes())

    def get_handshake_metadata(self) -> RankPages | None:
        """For the scheduler's process."""
        return self._ranks[0] if self._ranks else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Leaves the step's loads to a thread."""
        for work in self._work.loads:
            self._pages.load(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests are computed once all of their pages are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are stored once all of their layers are there."""

    def wait_for_save(self) -> None:
        """Leaves the step's saves to a thread."""
        saves = self._work.saves
        ready = self._events() if saves else []
        for work in saves:
            self._pages.save(work, ready)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before blocks of preempted requests are written again."""
        assert isinstance(kv_connector_metadata, StepWork)
        if kv_connector_metadata.preempted:
            self._pages.preempted(kv_connector_metadata.preempted)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are not read any more, and those whose pages are there."""
        return self._pages.take_saved(finished_req_ids), self._pages.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose page did not come; vLLM computes them."""
        return self._pages.take_failed()

    def _events(self) -> list[Ready]:
        """Of the device's stream, behind the forward."""
        if self._device.type == "cpu":
            return []
        event = torch.Event(self._device)
        event.record()
        return [event]

    @property
    def _pages(self) -> StoreWorker:
        assert self._worker is not None, "vLLM registers its KV cache first"
        return self._worker

    @property
    def _work(self) -> StepWork:
        work = self._get_connector_metadata()
        assert isinstance(work, StepWork)
        return work

    # -- both

    def shutdown(self) -> None:
        """Nothing reads or writes the KV cache after this; what is lent is given back."""
        if self._worker is not None:
            self._worker.close()
        self._store.close()
