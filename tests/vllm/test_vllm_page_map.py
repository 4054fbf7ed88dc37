# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of vLLM's blocks lie, against numpy's own arrays."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.vllm.page_map import CacheTensor, PageMap


def tensor(array: npt.NDArray[np.float32]) -> CacheTensor:
    strides = tuple(one // array.itemsize for one in array.strides)
    return CacheTensor(array.ctypes.data, array.shape, strides, array.itemsize)


def caches(order: list[int], layers: int = 2) -> npt.NDArray[np.float32]:
    """Of shape (layers, blocks 5, heads 2, tokens 3, numbers 4), arranged in memory by ``order`` of
    these dimensions; no two numbers alike."""
    shape = (layers, 5, 2, 3, 4)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape([shape[i] for i in order])
    return whole.transpose(np.argsort(order))


# Blocks of one layer lie side by side: layers and blocks are the outermost two.
ORDERS = st.tuples(st.permutations([0, 1]), st.permutations([2, 3, 4])).map(
    lambda one: [*one[0], *one[1]]
)


@pytest.mark.slow
@given(ORDERS, st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_a_page_is_the_bytes_of_its_block_in_every_layer(order: list[int], rows: list[int]) -> None:
    whole = caches(order)
    pages = PageMap([tensor(layer) for layer in whole], 5)
    pieces = pages.pieces(rows)
    assert pages.page_bytes == pieces.object_bytes == whole[:, 0].nbytes
    for row, addresses in zip(rows, pieces.addresses.tolist(), strict=True):
        for layer, address in enumerate(addresses):
            block = whole[layer, row]
            read = np.frombuffer(ctypes.string_at(address, block.nbytes), np.float32)
            assert set(read.tolist()) == set(block.reshape(-1).tolist())


@given(ORDERS, ORDERS)
def test_caches_in_another_order_have_another_layout(first: list[int], second: list[int]) -> None:
    one, two = (PageMap([tensor(layer) for layer in caches(o)], 5) for o in (first, second))
    assert (one.layout == two.layout) == (first[2:] == second[2:])


def test_blocks_with_gaps_are_refused() -> None:
    whole = caches([0, 1, 2, 3, 4])[:, :, :, :2]
    with pytest.raises(ValueError, match="has blocks with gaps in them"):
        PageMap([tensor(layer) for layer in whole], 5)


def test_keys_apart_from_values_are_refused() -> None:
    # (2, blocks, …): the block is not the first dimension.
    with pytest.raises(ValueError, match="has 2 blocks, but vLLM's scheduler numbers 5"):
        PageMap([tensor(np.zeros((2, 5, 3, 4), np.float32))], 5)


def test_layers_that_differ_are_refused() -> None:
    layers = [np.zeros((5, 2, 3), np.float32), np.zeros((5, 2, 4), np.float32)]
    with pytest.raises(ValueError, match="the layers' KV caches differ"):
        PageMap([tensor(layer) for layer in layers], 5)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="no KV cache that could be stored"):
        PageMap([], 5)


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_that_is_none_is_refused(block: int) -> None:
    pages = PageMap([tensor(layer) for layer in caches([0, 1, 2, 3, 4])], 5)
    with pytest.raises(ValueError, match="are not all below 5"):
        pages.pieces([0, block])
