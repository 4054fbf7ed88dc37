# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of vLLM's KV blocks lie. Pure: tensors are given as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.objects.pieces import Pieces

__all__ = ["CacheTensor", "PageMap"]

#: The dimension that counts KV heads.
HEADS_AT: Final = 1


@dataclass(frozen=True)
class CacheTensor:
    """One layer's KV cache, as vLLM hands it over: dimension 0 is the block, dimension 1 the KV
    head. A latent (MLA) counts as one head.

    address: of its first number.
    strides: in numbers, not bytes.
    item_bytes: of one number.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def block_bytes(self) -> int:
        """What one block has in this layer."""
        return math.prod(self.shape[1:]) * self.item_bytes

    @property
    def heads(self) -> int:
        """How many KV heads this rank has."""
        return self.shape[HEADS_AT]

    @property
    def head_bytes(self) -> int:
        """What lies side by side of one head. A block is made of equal rows, and each of these has
        so many bytes of every head."""
        return self.strides[HEADS_AT] * self.item_bytes

    @property
    def rows(self) -> int:
        """Of a block without gaps (see `head_bytes`).

        Raises:
            ValueError: the heads are not what makes up a row.
        """
        rows, rest = divmod(self.block_bytes, self.heads * self.head_bytes)
        if rest or not rows:
            raise ValueError(
                f"a KV cache of shape {self.shape} with strides {self.strides} is not made of rows"
                f" that have the {self.heads} heads of dimension 1 side by side"
            )
        return rows

    @property
    def arrangement(self) -> str:
        """How the numbers of a block are arranged: the same text for ranks that have
        other heads, or more of them. Raises as `rows` and `order` do."""
        rest = [i for i in self.order if i != HEADS_AT]
        sizes = ", ".join(str(self.shape[i]) for i in rest)
        return (
            f"{self.rows} rows of heads of {self.head_bytes} bytes, numbers ({sizes}) in the order"
            f" {tuple(rest)}"
        )

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of a block from the outermost in memory to the innermost, numbered as in
        ``shape``.

        Raises:
            ValueError: the numbers of a block do not lie side by side.
        """
        inner = [i for i in range(1, len(self.shape)) if self.shape[i] > 1]
        order = sorted(inner, key=lambda i: -self.strides[i])
        expected = 1
        for i in reversed(order):
            if self.strides[i] != expected:
                raise ValueError(
                    f"a KV cache of shape {self.shape} with strides {self.strides} has blocks with"
                    " gaps in them: the store needs the bytes of a block of one layer side by side"
                )
            expected *= self.shape[i]
        return tuple(order)


class PageMap:
    """The memory of one rank's KV blocks: each has one piece in every layer."""

    def __init__(self, tensors: Sequence[CacheTensor], blocks: int) -> None:
        """``tensors``: the layers' caches, in the order of layers. ``blocks``: how many vLLM's
        scheduler numbers.

        Raises:
            ValueError: the caches are not arrays of so many blocks, all arranged alike.
        """
        if not tensors:
            raise ValueError("this model has no KV cache that could be stored")
        kinds = {(one.shape, one.order, one.item_bytes, one.head_bytes) for one in tensors}
        if len(kinds) > 1:
            raise ValueError(f"the layers' KV caches differ: {sorted(kinds)}")
        shape = tensors[0].shape
        if shape[0] != blocks:
            raise ValueError(
                f"a layer's KV cache has {shape[0]} blocks, but vLLM's scheduler numbers {blocks}:"
                " the attention kernel splits blocks; give a --block-size that the kernel has"
            )
        self._bases = np.array([one.address for one in tensors], np.uint64)
        self._steps = np.array([one.strides[0] * one.item_bytes for one in tensors], np.uint64)
        self._nbytes = np.array([one.block_bytes for one in tensors], np.uint64)
        self._blocks, self._one = blocks, tensors[0]
        self.layers = len(tensors)
        #: How the bytes of a page are arranged, as a text for its signature.
        self.layout = f"layers of {shape[1:]} in the order {tensors[0].order}"

    @property
    def arrangement(self) -> str:
        """See `CacheTensor.arrangement`."""
        return self._one.arrangement

    @property
    def page_bytes(self) -> int:
        """One block in all layers."""
        return int(self._nbytes.sum())

    def pieces(self, blocks: npt.ArrayLike) -> Pieces:
        """The memory of some blocks, shape (n,). ``ValueError`` for a number that is none."""
        numbers = np.asarray(blocks, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self._blocks:
            raise ValueError(f"blocks {numbers.tolist()} are not all below {self._blocks}")
        rows = numbers.astype(np.uint64)[:, None]
        return Pieces(self._bases[None, :] + rows * self._steps[None, :], self._nbytes)
