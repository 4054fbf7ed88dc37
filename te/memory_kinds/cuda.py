# SPDX-License-Identifier: Apache-2.0
"""CUDA memory: whether an address is some, of which GPU, and a file of it that NICs take.

libcuda is used where the process has loaded it already, as anybody has who owns such memory; te
never loads it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from typing import ClassVar, Final

from te.core import kinds
from te.errors import RegistrationError
from te.memory_kinds.base import MemoryKind, Reach
from te.topology import ANYWHERE

__all__ = ["recognise_cuda"]

LIBRARY: Final = "libcuda.so.1"
PCI_ADDRESS_BYTES: Final = 64
# enum CUpointer_attribute, CUmemorytype and CUmemRangeHandleType of the driver's API.
ATTRIBUTE_MEMORY_TYPE: Final = 2
ATTRIBUTE_DEVICE_ORDINAL: Final = 9
MEMORY_TYPE_DEVICE: Final = 2
HANDLE_TYPE_DMA_BUF_FD: Final = 1


class _Cuda(MemoryKind):
    """Memory of one GPU. Not copied yet: NICs alone move it."""

    description: ClassVar = "CUDA memory"
    reach: ClassVar = Reach.NIC
    compiled = kinds.NIC_ONLY

    def __init__(self, library: ctypes.CDLL, ordinal: int | None) -> None:
        """``ordinal``: CUDA's number of the GPU in this process; None if it does not tell."""
        self._library = library
        self._ordinal = ordinal
        self.name = "cuda" if ordinal is None else f"cuda:{ordinal}"

    def check(self, address: int, nbytes: int) -> None:
        end = address + nbytes
        if attribute(self._library, ATTRIBUTE_MEMORY_TYPE, end - 1) != MEMORY_TYPE_DEVICE:
            raise RegistrationError(
                f"[{address:#x}, {end:#x}) of {nbytes} bytes begins in CUDA memory, but does not"
                " end there"
            )

    def location(self, address: int, gpus: Mapping[str, str]) -> str:
        return gpus.get(self._pci_address(), ANYWHERE)

    def _pci_address(self) -> str:
        """Of the GPU, as sysfs writes it (``0000:1b:00.0``); empty if the driver does not tell.
        CUDA's own numbers are not the machine's: CUDA_VISIBLE_DEVICES."""
        device = ctypes.c_int(-1)
        text = ctypes.create_string_buffer(PCI_ADDRESS_BYTES)
        if (
            self._ordinal is None
            or self._library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(self._ordinal)) != 0
            or self._library.cuDeviceGetPCIBusId(text, PCI_ADDRESS_BYTES, device) != 0
        ):
            return ""
        return text.value.decode().lower()

    def dma_buf(self, address: int, nbytes: int) -> int:
        """The driver's own error is in the text of the ``OSError``."""
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


def attribute(library: ctypes.CDLL, number: int, address: int) -> int | None:
    """A number of the driver's about the address; None if it has none."""
    value = ctypes.c_int(-1)
    result = library.cuPointerGetAttribute(ctypes.byref(value), number, ctypes.c_uint64(address))
    return value.value if result == 0 else None


def recognise_cuda(address: int) -> MemoryKind | None:
    """The GPU's whose memory it is; None for any other, also for host memory that CUDA knows."""
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    if attribute(library, ATTRIBUTE_MEMORY_TYPE, address) != MEMORY_TYPE_DEVICE:
        return None
    return _Cuda(library, attribute(library, ATTRIBUTE_DEVICE_ORDINAL, address))
