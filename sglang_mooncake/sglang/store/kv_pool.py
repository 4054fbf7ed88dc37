# SPDX-License-Identifier: Apache-2.0
"""SGLang's plain KV pools as the store sees them: registered tensors, and where pages lie in
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvstore.objects.pieces import Pieces
from sglang_mooncake.sglang.store.signatures import PoolFacts

__all__ = ["PLAIN", "KVPool", "layer_major"]


PLAIN: Final = "nhd"
"""SGLang's name for the layout with the heads of a token side by side."""


def layer_major(sizes: Sequence[int]) -> str:
    """The layout of objects that have one layer behind the other: for each the keys of all tokens,
    then the values (MLA: the latents). ``sizes``: numbers of a head's key and value, or of a
    latent."""
    kind = "mha" if len(sizes) == 2 else "mla"
    return f"sglang-{kind}-layer-major/1:{'+'.join(map(str, sizes))}"


@dataclass(frozen=True)
class _Buffer:
    """One tensor of one layer."""

    address: int
    token_bytes: int
    tokens: int


class KVPool:
    """The pages of a plain MHA or MLA pool.

    An object is one page of one rank, layer by layer: the keys of a layer, then its values (MLA:
    its latents). So a layer of an object is one range of bytes.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        """Raises ``ValueError`` for a pool of another kind, with its name."""
        self._page_size = page_size
        kind = type(pool)
        if kind is MHATokenToKVPool:
            layers = [[k, v] for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]
            scales = pool.k_scale_buffer
        elif kind is MLATokenToKVPool and not pool.use_dsa:
            layers = [[one] for one in pool.kv_buffer]
            scales = pool.kv_scale_buffer
        else:
            raise ValueError(
                f"the store cannot hold pages of SGLang's {kind.__name__}: it knows plain MHA and"
                " MLA pools; leave --enable-unified-cache-external-linker out for this model"
            )
        # MLA pools have no layout to choose.
        layout = pool.kv_cache_layout if kind is MHATokenToKVPool else PLAIN
        if scales is not None or layout != PLAIN:
            raise ValueError(
                f"the store cannot hold pages of a {kind.__name__} with scales, or in the layout"
                f" {layout!r}: it knows {PLAIN!r} (SGLANG_USE_HND_KVCACHE,"
                " SGLANG_AITER_KV_CACHE_LAYOUT)"
            )
        self.is_mla = kind is MLATokenToKVPool
        self.tensors: list[torch.Tensor] = [one for layer in layers for one in layer]
        self.layers = len(layers)
        self.pieces_per_layer = len(layers[0])
        self.first_layer = int(pool.start_layer or 0)
        self.heads = 0 if self.is_mla else int(pool.head_num)
        self.dtype = str(pool.dtype).removeprefix("torch.")
        self.layout = layer_major([one.shape[-1] for one in layers[0]])
        self._buffers = [_buffer(one) for one in self.tensors]
        self.piece_bytes = np.array(
            [one.token_bytes * page_size for one in self._buffers], np.uint64
        )

    @property
    def on_gpu(self) -> bool:
        """Whether forwards that fill it run on a GPU's streams."""
        return bool(self.tensors[0].is_cuda)

    @property
    def page_bytes(self) -> int:
        """One object."""
        return int(self.piece_bytes.sum())

    def facts(self, heads: tuple[int, int]) -> PoolFacts:
        """What a signature says of it. ``heads``: see ``heads_of_rank``."""
        layers = self.first_layer, self.first_layer + self.layers
        return PoolFacts(self.dtype, self._page_size, layers, heads, self.layout)

    def register(self, register: Callable[[Any, int | None], Any]) -> None:
        """Registers all tensors: as a buffer where the processor can read them, else by address."""
        for tensor, buffer in zip(self.tensors, self._buffers, strict=True):
            nbytes = buffer.token_bytes * buffer.tokens
            if tensor.device.type == "cpu":
                register(tensor.detach().view(torch.uint8).numpy().reshape(-1), None)
            else:
                register(buffer.address, nbytes)

    def pieces(self, token_indices: npt.NDArray[np.int64]) -> Pieces:
        """The memory of some pages. ``token_indices``: shape (pages x page_size,), the pool's token
        slots, page by page. ``ValueError`` if the slots of a page do not lie side by side."""
        rows = token_indices.reshape(-1, self._page_size)
        if (rows != rows[:, :1] + np.arange(self._page_size)).any():
            raise ValueError("the token slots of a page do not lie side by side")
        first = rows[:, 0].astype(np.uint64)
        bases = np.array([one.address for one in self._buffers], np.uint64)
        strides = np.array([one.token_bytes for one in self._buffers], np.uint64)
        return Pieces(bases[None, :] + first[:, None] * strides[None, :], self.piece_bytes)


def _buffer(tensor: torch.Tensor) -> _Buffer:
    if not tensor.is_contiguous():
        raise ValueError(f"a KV tensor of shape {tuple(tensor.shape)} is not contiguous")
    token_bytes = tensor[0].numel() * tensor.element_size()
    return _Buffer(tensor.data_ptr(), token_bytes, tensor.shape[0])
