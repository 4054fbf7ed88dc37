# SPDX-License-Identifier: Apache-2.0
"""CUDA memory: whether an address is some, of which GPU, and a file of it that NICs take.

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
PCI_ADDRESS_BYTES: Final = 64
# enum CUpointer_attribute, CUmemorytype and CUmemRangeHandleType of the driver's API.
ATTRIBUTE_MEMORY_TYPE: Final = 2
ATTRIBUTE_DEVICE_ORDINAL: Final = 9
MEMORY_TYPE_DEVICE: Final = 2
HANDLE_TYPE_DMA_BUF_FD: Final = 1


class Cuda:
    """The driver's library as it is loaded in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def owns(self, address: int) -> bool:
        """Whether the address is of GPU memory; of host memory that CUDA knows it is not."""
        return self._attribute(ATTRIBUTE_MEMORY_TYPE, address) == MEMORY_TYPE_DEVICE

    def pci_address(self, address: int) -> str:
        """Of the GPU that the memory is on, as sysfs writes it (``0000:1b:00.0``); empty if the
        driver does not tell. CUDA's own numbers are not the machine's: CUDA_VISIBLE_DEVICES."""
        ordinal = self._attribute(ATTRIBUTE_DEVICE_ORDINAL, address)
        device = ctypes.c_int(-1)
        text = ctypes.create_string_buffer(PCI_ADDRESS_BYTES)
        if (
            ordinal is None
            or self._library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)) != 0
            or self._library.cuDeviceGetPCIBusId(text, PCI_ADDRESS_BYTES, device) != 0
        ):
            return ""
        return text.value.decode().lower()

    def _attribute(self, attribute: int, address: int) -> int | None:
        """A number of the driver's about the address; None if it has none."""
        value = ctypes.c_int(-1)
        result = self._library.cuPointerGetAttribute(
            ctypes.byref(value), attribute, ctypes.c_uint64(address)
        )
        return value.value if result == 0 else None

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
