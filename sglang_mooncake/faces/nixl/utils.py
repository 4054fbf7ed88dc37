# SPDX-License-Identifier: Apache-2.0
"""``nixl._utils``: memory for programs that try transfers out, NIXL's own tests above all."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["ba_buf", "free_passthru", "malloc_passthru", "verify_transfer"]

_FILLING: Final = 0xBA
_libc: Final = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]


def malloc_passthru(size: int) -> int:
    """The address of so many bytes. ``MemoryError``."""
    address: int | None = _libc.malloc(size)
    if address is None:
        raise MemoryError(f"no {size} bytes")
    return address


def free_passthru(address: int) -> None:
    """What `malloc_passthru` gave."""
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills the memory with a value that a test can tell from zeros."""
    ctypes.memset(address, _FILLING, size)


def verify_transfer(first: int, second: int, size: int) -> None:
    """``RuntimeError`` unless both have the same bytes."""
    if ctypes.string_at(first, size) != ctypes.string_at(second, size):
        raise RuntimeError(f"the {size} bytes at {first:#x} and {second:#x} differ")
