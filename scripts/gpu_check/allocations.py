# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU in the ways in which applications come by it."""

from __future__ import annotations

import ctypes
import importlib
from abc import ABC, abstractmethod
from typing import Any, Final

from gpu_check.child import Skipped
from te_bench.gpu import Gpu

__all__ = ["ALLOCATIONS", "Allocation", "Virtual", "allocate"]

#: By cuMemAlloc; virtual memory whose handles other processes can have, as PyTorch's expandable
#: segments; whose handles nobody can have, as the memory saver's; in the order of a stream.
ALLOCATIONS: Final = ("plain", "virtual-fd", "virtual-private", "pool")
HANDLE_TYPES: Final = {"virtual-fd": 1, "virtual-private": 0}
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
#: What torch gives begins at multiples of 512 bytes.
TORCH_ODD_BYTES: Final = 4099


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_uint),
        ("handle_types", ctypes.c_uint),
        ("location_type", ctypes.c_uint),
        ("location_id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int), ("flags", ctypes.c_uint))


class Allocation(ABC):
    """So many bytes at one address."""

    address: int
    nbytes: int

    @abstractmethod
    def free(self) -> None:
        """Once no copy touches it."""


class Plain(Allocation):
    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, self.nbytes = gpu, nbytes
        self.address = gpu.allocate(nbytes)

    def free(self) -> None:
        self._gpu.free(self.address)


class Pool(Allocation):
    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu, self.nbytes = gpu, nbytes
        address = ctypes.c_uint64()
        gpu.call("cuMemAllocAsync", ctypes.byref(address), nbytes, gpu.stream)
        gpu.synchronise()
        self.address = address.value

    def free(self) -> None:
        self._gpu.call("cuMemFreeAsync", self.address, self._gpu.stream)
        self._gpu.synchronise()


class Virtual(Allocation):
    """Across the border between two handles, one behind the other."""

    HANDLES: Final = 2

    def __init__(self, gpu: Gpu, nbytes: int, handle_types: int) -> None:
        self._gpu, self.nbytes = gpu, nbytes
        self._properties = Properties(PINNED, handle_types, ON_DEVICE, gpu.ordinal)
        granularity, start = ctypes.c_size_t(), ctypes.c_uint64()
        about = ctypes.byref(self._properties)
        gpu.call("cuMemGetAllocationGranularity", ctypes.byref(granularity), about, 0)
        step = granularity.value * self.HANDLES
        self._reserved_nbytes = -(-nbytes // step) * step
        gpu.call("cuMemAddressReserve", ctypes.byref(start), self._reserved_nbytes, 0, 0, 0)
        self._start = start.value
        self.address = self._start + (self._reserved_nbytes - nbytes) // 2
        self.back()

    @property
    def _parts(self) -> list[tuple[int, int]]:
        nbytes = self._reserved_nbytes // self.HANDLES
        return [(self._start + i * nbytes, nbytes) for i in range(self.HANDLES)]

    def back(self) -> None:
        """New memory at the addresses."""
        gpu = self._gpu
        for address, nbytes in self._parts:
            handle = ctypes.c_uint64()
            about = ctypes.byref(self._properties)
            gpu.call("cuMemCreate", ctypes.byref(handle), nbytes, about, 0)
            gpu.call("cuMemMap", address, nbytes, 0, handle.value, 0)
            gpu.call("cuMemRelease", handle.value)  # The mapping keeps it.
            access = Access(ON_DEVICE, gpu.ordinal, READ_WRITE)
            gpu.call("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def unback(self) -> None:
        """The memory is given back; the addresses stay reserved."""
        for address, nbytes in self._parts:
            self._gpu.call("cuMemUnmap", address, nbytes)

    def free(self) -> None:
        self.unback()
        self._gpu.call("cuMemAddressFree", self._start, self._reserved_nbytes)


class Torch(Allocation):
    """A part of a tensor, at an odd address; its environment says by which allocator."""

    def __init__(self, nbytes: int) -> None:
        torch = importlib.import_module("torch")
        self.nbytes = nbytes
        self._tensor: Any = torch.zeros(nbytes + TORCH_ODD_BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.address = int(self._tensor.data_ptr()) + TORCH_ODD_BYTES

    def free(self) -> None:
        del self._tensor


def allocate(gpu: Gpu, name: str, nbytes: int) -> Allocation:
    """``name``: one of ``ALLOCATIONS``, or ``"torch"``. ``Skipped`` where there is no such way."""
    if name == "torch":
        return Torch(nbytes)
    if name == "plain":
        return Plain(gpu, nbytes)
    if name == "pool":
        if not gpu.has("cuMemAllocAsync"):
            raise Skipped("the driver has no cuMemAllocAsync")
        return Pool(gpu, nbytes)
    return Virtual(gpu, nbytes, HANDLE_TYPES[name])
