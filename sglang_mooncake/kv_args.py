# SPDX-License-Identifier: Apache-2.0
"""From SGLang's `KVArgs` to our `Layout`; the only place that knows `KVArgs`
(sglang/srt/disaggregation/base/conn.py)."""

from __future__ import annotations

from typing import Protocol

from sglang_mooncake.layout import Buffers, Layout

__all__ = ["KVArgsLike", "UnsupportedPool", "layout_from_kv_args"]


class KVArgsLike(Protocol):
    """The members of SGLang's KVArgs that we read."""

    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    kv_layer_ids: list[int]
    kv_cache_dtype_str: str  # may be "auto": seam.py resolves it
    kv_layout: str | None
    aux_data_ptrs: list[int]
    aux_data_lens: list[int]
    aux_item_lens: list[int]
    state_types: list[object]
    page_size: int


class UnsupportedPool(ValueError):
    """SGLang gave us a kind of cache that this version cannot hand over."""


def layout_from_kv_args(kv_args: KVArgsLike, dtype: str, is_mla: bool, seals: Buffers) -> Layout:
    """The rank's memory as SGLang's schedulers describe it.

    Args:
        dtype: of the cached numbers, by name.

    Raises:
        UnsupportedPool: state pools (SWA, Mamba, indexer, …), which need plans of their own.
        ValueError: descriptions that contradict themselves.
    """
    if kv_args.state_types:
        kinds = ", ".join(str(getattr(kind, "value", kind)) for kind in kv_args.state_types)
        raise UnsupportedPool(
            f"this model keeps state beside its KV cache ({kinds}); this version hands over MHA "
            "and MLA pools alone. Use another --disaggregation-transfer-backend for this model"
        )
    return Layout(
        page_size=int(kv_args.page_size),
        dtype=dtype,
        kv_layout=kv_args.kv_layout,
        is_mla=bool(is_mla),
        layer_ids=tuple(int(layer) for layer in kv_args.kv_layer_ids),
        kv=_buffers(kv_args.kv_data_ptrs, kv_args.kv_item_lens, kv_args.kv_data_lens),
        aux=_buffers(kv_args.aux_data_ptrs, kv_args.aux_item_lens, kv_args.aux_data_lens),
        seals=seals,
    )


def _buffers(addresses: list[int], item_nbytes: list[int], nbytes: list[int]) -> Buffers:
    return Buffers(
        tuple(int(address) for address in addresses),
        tuple(int(item) for item in item_nbytes),
        tuple(int(length) for length in nbytes),
    )
