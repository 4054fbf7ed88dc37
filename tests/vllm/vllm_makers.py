# SPDX-License-Identifier: Apache-2.0
"""Requests' hashes, a server's configuration, and a rank's KV cache without vLLM."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from store_meeting import owning

import te
from kvstore.config import Config
from kvstore.objects.changes import keys_of_digests
from sglang_mooncake.vllm.page_map import CacheTensor, PageMap
from sglang_mooncake.vllm.requests import Work
from sglang_mooncake.vllm.store_worker import StoreWorker

TIMEOUT_S = 60.0
LAYERS, BLOCKS, BLOCK_BYTES = 3, 8, 512
SIGNATURE = b"one signature..."


def hashes(count: int, prompt: str = "a") -> list[bytes]:
    """Of a prompt's blocks, as vLLM makes them: 32 bytes each."""
    return [hashlib.sha256(f"{prompt} {i}".encode()).digest() for i in range(count)]


def work(request_id: str, blocks: Sequence[int], prompt: str = "a") -> Work:
    """These blocks are the prompt's first ones."""
    return Work(request_id, list(blocks), keys_of_digests(hashes(len(blocks), prompt)))


def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.002)


def server(model: str | Path = "m", **changed: Any) -> Any:
    """As much of a ``VllmConfig`` as is read. ``changed``: fields, by names with two underscores
    for a dot."""
    model_config = SimpleNamespace(
        model=str(model),
        revision=None,
        dtype="torch.float32",
        quantization=None,
        hf_overrides={},
        model_impl="auto",
        max_model_len=4096,
        enable_sleep_mode=False,
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1}),
        use_mla=False,
        heads=2,
    )
    model_config.get_total_num_kv_heads = lambda: model_config.heads
    model_config.get_num_kv_heads = lambda parallel: max(
        1, model_config.heads // parallel.tensor_parallel_size
    )
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        speculative_config=None,
        lora_config=None,
        weight_transfer_config=None,
        cache_config=SimpleNamespace(
            block_size=32, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=model_config,
    )
    for name, value in changed.items():
        part, _, field = name.partition("__")
        if field:
            setattr(getattr(config, part), field, value)
        else:
            setattr(config, part, value)
    return config


def caches(*kinds: str) -> Any:
    """As much of a ``KVCacheConfig``: a group for each of these classes of vLLM."""
    return SimpleNamespace(kv_cache_groups=[_group(_spec(kind)) for kind in kinds])


def mixed_caches(*kinds: str) -> Any:
    """One group, whose layers have caches of these classes."""
    specs = {str(at): _spec(kind) for at, kind in enumerate(kinds)}
    return SimpleNamespace(kv_cache_groups=[_group(SimpleNamespace(kv_cache_specs=specs))])


def _spec(kind: str) -> Any:
    return type(kind, (), {})()


def _group(spec: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec)


class Rank:
    """A worker with a KV cache of its own: shape (layers, blocks, bytes)."""

    def __init__(
        self,
        directory: Path,
        memory: int,
        signature: bytes = SIGNATURE,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.cache = np.zeros((LAYERS, BLOCKS, BLOCK_BYTES), np.uint8)
        tensors = [
            CacheTensor(layer.ctypes.data, layer.shape, (BLOCK_BYTES, 1), 1) for layer in self.cache
        ]
        self.store = owning(  # So that tests can spoil what lies there.
            Config(
                directory=directory,
                memory=memory,
                request_timeout_s=TIMEOUT_S,
                engine=te.Config(
                    status_dir=None, connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S
                ),
            )
        )
        self.store.register(self.cache.reshape(-1))
        self.pages = PageMap(tensors, BLOCKS)
        self.signature = signature
        self.worker = StoreWorker(self.store, self.pages, signature, TIMEOUT_S, share)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.worker.close()
        self.store.close()

    def fill(self, seed: int) -> None:
        """All blocks with bytes that no other seed has."""
        self.cache[:] = np.random.default_rng(seed).integers(0, 256, self.cache.shape, np.uint8)

    def save(self, one: Work) -> None:
        """And waits until it is stored, and vLLM may have the blocks back."""
        self.worker.save(one, [])
        saved: set[str] = set()
        finished = {one.request_id}
        until(lambda: saved.update(self.worker.take_saved(finished)) or saved, "a save")

    def load(self, one: Work) -> set[int]:
        """And waits until it is told: the blocks that have failed."""
        self.worker.load(one)
        loaded: set[str] = set()
        until(lambda: loaded.update(self.worker.take_loaded()) or loaded, "a load")
        assert loaded == {one.request_id}
        return self.worker.take_failed()

    def knows(self, one: Work) -> bool:
        """Whether all of its pages are stored, as far as this process knows."""
        return bool(self.store.exists(one.keys, self.signature, self.pages.page_bytes).all())
