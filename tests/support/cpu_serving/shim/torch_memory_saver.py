# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the package that gives a GPU's memory back and takes it again at the same addresses
(SGLang's ``--enable-memory-saver``), for KV pools in host memory.

While a pool is paused its pages are not there: who reads or writes them, from whatever process,
gets a fault or an error. When it is resumed they are zeros. Other memory is left as it is.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["torch_memory_saver"]

logger = logging.getLogger(__name__)

KV_CACHE = "kv_cache"
#: Smaller tensors share pages with others.
SMALLEST = 1 << 16
PROT_NONE = 0
MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
]


class _Remembering(TorchDispatchMode):
    """Keeps the large tensors that are made meanwhile."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().nbytes() >= SMALLEST:
            self._kept.append(made.untyped_storage())
        return made


class _MemorySaver:
    def __init__(self) -> None:
        self._pools: list[Any] = []

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        del enable_cpu_backup  # of weights, which stay
        if tag != KV_CACHE:
            yield
            return
        with _Remembering(self._pools):
            yield

    def pause(self, tag: str) -> None:
        if tag == KV_CACHE:
            self._map(PROT_NONE, "gave back")

    def resume(self, tag: str) -> None:
        if tag == KV_CACHE:
            self._map(mmap.PROT_READ | mmap.PROT_WRITE, "took back")

    def _map(self, protection: int, did: str) -> None:
        total = 0
        for begin, nbytes in self._whole_pages().items():
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            if _libc.mmap(begin, nbytes, protection, flags, -1, 0) != begin:
                raise OSError(ctypes.get_errno(), f"mapping {nbytes} bytes anew failed")
            total += nbytes
        logger.warning("the stand-in for a memory saver %s %d bytes", did, total)

    def _whole_pages(self) -> dict[int, int]:
        """Beginning → bytes, of the pages that are a pool's alone."""
        found = {}
        for storage in self._pools:
            begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
            found[begin] = end - begin
        return found


@contextmanager
def configure_subprocess() -> Iterator[None]:
    yield


torch_memory_saver = _MemorySaver()
