# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV caches as plain values. See `vllm/v1/attention`."""

from __future__ import annotations

from typing import Any

import torch

from sglang_mooncake.vllm.page_map import CacheTensor
from sglang_mooncake.vllm.seam import (
    cpu_attn,
    current_platform,
    extract_layer_index,
    get_current_attn_backend,
)

__all__ = ["cache_tensors", "kernel_of", "plain"]


def cache_tensors(caches: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The layers' KV caches in the order of layers. Layers that share one have it once."""
    named = sorted(caches.items(), key=lambda one: int(extract_layer_index(one[0])))
    return list({one.data_ptr(): one for _, one in named}.values())


def plain(tensor: torch.Tensor) -> CacheTensor:
    """Of a tensor, what says where its bytes lie."""
    return CacheTensor(
        tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    )


def kernel_of(config: Any) -> str:
    """Kernels arrange the numbers of a block in ways of their own; on a CPU, by its instructions,
    too."""
    backend = str(get_current_attn_backend(config).full_cls_name())
    if not current_platform.is_cpu():
        return backend
    cache, model = config.cache_config, config.model_config
    return f"{backend} {_instructions(model, cache)}"


def _instructions(model: Any, cache: Any) -> str:
    choose = cpu_attn._get_attn_isa  # noqa: SLF001 - vLLM says it nowhere else
    return str(choose(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))
