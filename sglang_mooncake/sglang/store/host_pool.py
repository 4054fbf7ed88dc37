# SPDX-License-Identifier: Apache-2.0
"""HiCache's host pools as the store sees them: registered memory, and where pages lie in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvstore.objects.pieces import Pieces
from sglang_mooncake.sglang.store.kv_pool import PLAIN, layer_major

__all__ = ["HostPool"]

_MHA = (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost)
#: Layouts of plain pools of which a page can be had layer by layer.
_BY_LAYERS = ("layer_first", "page_first_direct")


class HostPool:
    """The pages of one host pool, of whatever kind: SGLang says where the pieces of a page are.

    An object is one page of one rank. Those of plain MHA and MLA pools are arranged as the linker
    arranges them (`kv_pool.py`) where that costs no piece for each token: servers with the one and
    with the other then share them.
    """

    def __init__(self, pool: Any) -> None:
        """Raises ``ValueError`` for a pool whose pages SGLang cannot name piece by piece, or of
        which the device has the values in another order than SGLang's plain one."""
        _check_plain(pool)
        self._pool = pool
        self.page_size = int(pool.page_size)
        kind = type(pool)
        by_layers = pool.layout in _BY_LAYERS
        #: Into how many pieces each one of SGLang's is cut.
        self._layers = pool.layer_num if kind in _MHA and pool.layout == "page_first_direct" else 1
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (NotImplementedError, ValueError) as exc:
            raise ValueError(
                f"the store cannot hold pages of SGLang's {kind.__name__} with"
                f" --hicache-mem-layout {pool.layout}: {exc}"
            ) from exc
        self._sizes = np.array(sizes, np.uint64)
        if kind in _MHA and by_layers:
            self.layout = layer_major([pool.head_dim, pool.v_head_dim])
        elif kind is MLATokenToKVPoolHost and by_layers:
            self.layout = layer_major([pool.kv_cache_dim])
        else:
            pieces = "+".join(map(str, sizes))
            self.layout = f"sglang-{kind.__name__}-{pool.layout}/1:{pieces}"

    @property
    def page_bytes(self) -> int:
        """One object."""
        return int(self._sizes.sum())

    def register(self, register: Callable[[Any, int | None], Any]) -> None:
        """Registers its memory."""
        owned = getattr(self._pool, "get_hybrid_pool_buffer", lambda: [self._pool.kv_buffer])
        for tensor in owned():
            if tensor.numel():  # A pool without one of its parts has an empty tensor for it.
                register(tensor.detach().view(torch.uint8).numpy().reshape(-1), None)

    def pieces(self, host_indices: torch.Tensor) -> Pieces:
        """The memory of some pages. ``host_indices``: shape (pages x page_size,), token slots of
        the pool, page by page. ``ValueError`` if it is not whole pages."""
        if len(host_indices) % self.page_size:
            raise ValueError(
                f"{len(host_indices)} token slots are no whole pages of {self.page_size}"
            )
        found, sizes = self._pool.get_page_buffer_meta(host_indices)
        addresses = np.array(found, np.uint64).reshape(-1, len(self._sizes))
        if (np.array(sizes, np.uint64).reshape(addresses.shape) != self._sizes).any():
            raise ValueError("pages of one pool have pieces of different sizes")
        return self._cut(addresses)

    def _cut(self, addresses: npt.NDArray[np.uint64]) -> Pieces:
        """SGLang has the keys of all layers in one piece and the values in another: the layers of
        each, one by one."""
        if self._layers == 1:
            return Pieces(addresses, self._sizes)
        parts = self._sizes // np.uint64(self._layers)
        layers = np.arange(self._layers, dtype=np.uint64)
        cut = addresses[:, None, :] + layers[None, :, None] * parts[None, None, :]
        return Pieces(cut.reshape(len(addresses), -1), np.tile(parts, self._layers))


def _check_plain(pool: Any) -> None:
    """SGLang copies rows of the device's tensors as if each were a token. In other layouts they are
    not, and nothing in the host pool's own layout would tell their pages from plain ones."""
    if not isinstance(pool, MHATokenToKVPoolHost):
        return  # Only pools of keys and values have a layout to choose.
    for info in pool._buffer_infos:  # noqa: SLF001 - SGLang says it nowhere else
        layout = info.buffers.layout.value
        if layout != PLAIN:
            raise ValueError(
                f"the store cannot hold pages of a {type(pool).__name__} whose device pool has the"
                f" layout {layout!r}: it knows {PLAIN!r} (SGLANG_USE_HND_KVCACHE,"
                " SGLANG_AITER_KV_CACHE_LAYOUT)"
            )
