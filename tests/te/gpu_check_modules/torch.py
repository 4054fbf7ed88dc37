# SPDX-License-Identifier: Apache-2.0
"""As much of PyTorch as scripts/gpu-check uses, with memory of the stand-in for CUDA's driver.

It shows that the steps run, and nothing about PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

uint8, float32 = "uint8", "float32"
__version__ = "0"
allocators = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


class Tensor:
    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def zeros(nbytes: int, dtype: str, device: str) -> Tensor:
    from te_bench.gpu import Gpu

    assert (dtype, device) == (uint8, "cuda")
    return Tensor(Gpu().allocate(nbytes))


def arange(count: int, device: str, dtype: str) -> Any:
    assert (dtype, device) == (float32, "cuda")
    return np.arange(count, dtype=np.float32)


class CUDAGraph:
    def replay(self) -> None:
        pass


@contextlib.contextmanager
def _graph(graph: CUDAGraph) -> Iterator[None]:
    """Whoever makes a call that a capture does not allow ends it."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_set(0, 1)
    yield
    dead = driver.fake_capture_is_dead()
    driver.fake_set(0, 0)
    if dead:
        raise RuntimeError("operation not permitted when stream is capturing")


cuda = SimpleNamespace(
    is_available=lambda: True,
    synchronize=lambda: None,
    CUDAGraph=CUDAGraph,
    graph=_graph,
)
