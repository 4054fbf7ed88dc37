# SPDX-License-Identifier: Apache-2.0
"""CUDA memory: whether an address is some, and a file of it that NICs take.

libcuda is used where the process has loaded it already, as anybody has who owns such memory; te
never loads it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

__all__ = ["Cuda", "cuda_of"]

LIBRARY: Final = "libcuda.so.1"
# enum CUpointer_attribute, CUmemorytype and CUmemRangeHandleType of the driver's API.
ATTRIBUTE_MEMORY_TYPE: Final = 2
MEMORY_TYPE_DEVICE: Final = 2
HANDLE_TYPE_DMA_BUF_FD: Final = 1


class Cuda:
    """The driver's library as it is loaded in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def owns(self, address: int) -> bool:
        """Whether the address is of GPU memory; of host memory that CUDA knows it is not."""
        kind = ctypes.c_uint(0)
        result = self._library.cuPointerGetAttribute(
            ctypes.byref(kind), ATTRIBUTE_MEMORY_TYPE, ctypes.c_uint64(address)
        )
        return result == 0 and kind.value == MEMORY_TYPE_DEVICE

    def export(self, address: int, nbytes: int) -> int:
        """A dma-buf, as a descriptor that the caller closes, of whole pages of GPU memory.

        ``OSError`` that names the call; the driver's own error is in its text.
        """
        if not hasattr(self._library, "cuMemGetHandleForAddressRange"):
            raise OSError(errno.ENOSYS, f"{LIBRARY} has no cuMemGetHandleForAddressRange")
        fd = ctypes.c_int(-1)
        result = self._library.cuMemGetHandleForAddressRange(
            ctypes.byref(fd),
            ctypes.c_uint64(address),
            ctypes.c_size_t(nbytes),
            HANDLE_TYPE_DMA_BUF_FD,
            ctypes.c_ulonglong(0),
        )
        if result != 0:
            text = f"cuMemGetHandleForAddressRange of {nbytes} bytes at {address:#x}"
            raise OSError(errno.EOPNOTSUPP, f"{text}: CUDA error {result}")
        return fd.value


def cuda_of(address: int) -> Cuda | None:
    """What exports the memory if it is CUDA's; None for any other."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    cuda = Cuda(library)
    return cuda if cuda.owns(address) else None
