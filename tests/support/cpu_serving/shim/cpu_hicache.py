# SPDX-License-Identifier: Apache-2.0
"""Test support: HiCache's host pools without a GPU.

Memory of the host is not made known to CUDA, and the copies between the host's and the device's
pools, which SGLang has as CUDA kernels alone, are torch's. They are those of `--hicache-io-backend
direct`. SGLang leaves 10 GiB of the machine's memory free; here all of it may be used, since the
pools are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["allocate_plainly", "copy_by_torch", "use_all_memory"]


def allocate_plainly(module: ModuleType) -> None:
    """For `pool_host.common`."""

    def allocate(dims: tuple[int, ...], dtype: Any, device: str, allocator: Any, **_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def use_all_memory(module: ModuleType) -> None:
    """For `pool_host.base`."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def copy_by_torch(module: ModuleType) -> None:
    """For the modules of pools."""
    module.transfer_kv_direct = _copy_layers
    module.transfer_kv_per_layer_direct_pf_lf = _layer_to_device
    module.transfer_kv_all_layer_direct_lf_pf = _layers_to_host


def _copy_layers(
    src_layers: Sequence[Any],
    dst_layers: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def _layer_to_device(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    page_size: int,
) -> None:
    """Host tensors have shape (pages, layers, page_size, ...)."""
    pages = src_indices.view(-1, page_size)[:, 0] // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices.view(-1, page_size)] = src[pages, layer_id]


def _layers_to_host(
    src_ptrs: Sequence[Any],
    dst_ptrs: Sequence[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """`src_ptrs`: all layers of the first host tensor, then of the second, if there is one."""
    pages = dst_indices.view(-1, page_size)[:, 0] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        dst_ptrs[i // layers][pages, i % layers] = src[src_indices.view(-1, page_size)]
