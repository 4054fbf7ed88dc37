# SPDX-License-Identifier: Apache-2.0
"""A GPU through CUDA's driver, as an application has one: allocations, streams, copies.

te itself loads no driver; who has memory of a GPU has loaded it, and here this module does.
Source: the CUDA Driver API Reference Manual, 12.9 and 13.0.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["LIBRARY", "PROTOTYPES", "CudaError", "Gpu", "NoGpu", "rows"]

LIBRARY: Final = "libcuda.so.1"
#: By the names that the library exports, with the types of cuda.h: tests/testbed compares them.
PROTOTYPES: Final = """
cuInit(unsigned)
cuDriverGetVersion(int *)
cuGetErrorName(CUresult, const char **)
cuDeviceGetCount(int *)
cuDeviceGet(CUdevice *, int)
cuDeviceGetName(char *, int, CUdevice)
cuDeviceGetAttribute(int *, CUdevice_attribute, CUdevice)
cuDeviceGetPCIBusId(char *, int, CUdevice)
cuDevicePrimaryCtxRetain(CUcontext *, CUdevice)
cuDevicePrimaryCtxRelease_v2(CUdevice)
cuCtxSetCurrent(CUcontext)
cuCtxGetCurrent(CUcontext *)
cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *)
cuPointerGetAttribute(void *, CUpointer_attribute, CUdeviceptr)
cuMemGetInfo_v2(size_t *, size_t *)
cuMemAlloc_v2(CUdeviceptr *, size_t)
cuMemFree_v2(CUdeviceptr)
cuMemAllocManaged(CUdeviceptr *, size_t, unsigned)
cuMemAllocAsync(CUdeviceptr *, size_t, CUstream)
cuMemFreeAsync(CUdeviceptr, CUstream)
cuMemHostAlloc(void **, size_t, unsigned)
cuMemFreeHost(void *)
cuMemHostRegister_v2(void *, size_t, unsigned)
cuMemHostUnregister(void *)
cuMemGetAllocationGranularity(size_t *, const CUmemAllocationProp *, \
CUmemAllocationGranularity_flags)
cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)
cuMemRelease(CUmemGenericAllocationHandle)
cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)
cuMemAddressFree(CUdeviceptr, size_t)
cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
cuMemUnmap(CUdeviceptr, size_t)
cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)
cuStreamCreate(CUstream *, unsigned)
cuStreamSynchronize(CUstream)
cuStreamDestroy_v2(CUstream)
cuEventCreate(CUevent *, unsigned)
cuEventRecord(CUevent, CUstream)
cuEventQuery(CUevent)
cuEventDestroy_v2(CUevent)
cuMemcpyAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream)
cuMemcpyBatchAsync(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, \
size_t *, size_t, size_t *, CUstream)
cuMemcpyBatchAsync_v2(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, \
size_t *, size_t, CUstream)
"""
_TYPES: Final[dict[str, Any]] = {
    "int": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "CUresult": ctypes.c_uint,
    "CUdevice_attribute": ctypes.c_uint,
    "CUpointer_attribute": ctypes.c_uint,
    "CUmemAllocationGranularity_flags": ctypes.c_uint,
    "size_t": ctypes.c_size_t,
    "CUdeviceptr": ctypes.c_uint64,
    "unsigned long long": ctypes.c_uint64,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
}
STREAM_NON_BLOCKING: Final = 1
EVENT_DISABLE_TIMING: Final = 2
SOURCE_ORDER_STREAM: Final = 1
BOUNCE_BYTES: Final = 4 << 20

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class NoGpu(Exception):
    """There is none here that can be used; the message says why."""


class CudaError(Exception):
    """What a function of the driver gave."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.result = result


class Gpu:
    """One GPU in its primary context, which is that of the calling thread from then on. One thread
    at a time; a thread of its own calls ``enter`` first."""

    def __init__(self, ordinal: int = 0) -> None:
        """Loads the driver; ``NoGpu`` where there is no driver, or it finds no GPU."""
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as exc:
            raise NoGpu(f"CUDA's driver cannot be loaded: {exc}") from exc
        self.functions = dict(_functions(self._library))
        found = ctypes.c_int()
        try:
            self.call("cuInit", 0)
            self.call("cuDeviceGetCount", ctypes.byref(found))
        except CudaError as exc:
            raise NoGpu(f"CUDA's driver finds no GPU: {exc}") from exc
        if ordinal >= found.value:
            raise NoGpu(f"CUDA's driver knows {found.value} GPUs, and none of number {ordinal}")
        self.count = found.value
        self.ordinal = ordinal
        self.device = self._get("cuDeviceGet", ctypes.c_int(), ordinal)
        self._context = self._get("cuDevicePrimaryCtxRetain", ctypes.c_void_p(), self.device)
        self.enter()
        self.stream = self.new_stream()
        self._bounce = self.host(BOUNCE_BYTES)

    # -- calls

    def has(self, name: str) -> bool:
        """Whether the driver exports the function."""
        return name in self.functions

    def try_call(self, name: str, *arguments: Any) -> int:
        """What it gives."""
        return int(self.functions[name](*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """``CudaError`` for anything but success."""
        if result := self.try_call(name, *arguments):
            raise CudaError(name, result, self.error_name(result))

    def must(self, call: str, result: int) -> None:
        """The same for a function that somebody else has called."""
        if result:
            raise CudaError(call, result, self.error_name(result))

    def error_name(self, result: int) -> str:
        """``"CUDA_ERROR_OUT_OF_MEMORY"``."""
        name = ctypes.c_char_p()
        if self.try_call("cuGetErrorName", result, ctypes.byref(name)) or name.value is None:
            return f"CUDA error {result}"
        return name.value.decode()

    def address_of(self, name: str) -> int:
        """The function's address, for ``te_bench._gpu``."""
        return ctypes.cast(self.functions[name], ctypes.c_void_p).value or 0

    def _get(self, name: str, out: Any, *arguments: Any) -> Any:
        """What a function writes to its first argument."""
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    # -- what it is

    def enter(self) -> None:
        """Its context becomes the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

    @property
    def version(self) -> int:
        """The newest CUDA that the driver has, 13000 for 13.0."""
        return int(self._get("cuDriverGetVersion", ctypes.c_int()))

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), self.device)
        return text.value.decode()

    def attribute(self, number: int) -> int | None:
        """A ``CUdevice_attribute``; None if the driver does not know it."""
        value = ctypes.c_int()
        if self.try_call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device):
            return None
        return value.value

    @property
    def free_nbytes(self) -> int:
        """Free bytes of the GPU's memory; others use it, too."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """cuMemAlloc; its address."""
        return int(self._get("cuMemAlloc_v2", ctypes.c_uint64(), nbytes))

    def free(self, address: int) -> None:
        """What ``allocate`` gave. It may wait for the GPU."""
        self.call("cuMemFree_v2", address)

    def host(self, nbytes: int) -> U8:
        """Pinned memory of the host, for good."""
        address = self._get("cuMemHostAlloc", ctypes.c_void_p(), nbytes, 0)
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.frombuffer(memory, np.uint8)

    def upload(self, address: int, contents: U8) -> None:
        """Copies to the GPU; it is there at the return."""
        for at in range(0, contents.nbytes, BOUNCE_BYTES):
            part = contents[at : at + BOUNCE_BYTES]
            self._bounce[: part.nbytes] = part
            self._copy(address + at, self._bounce.ctypes.data, part.nbytes)

    def download(self, address: int, contents: U8) -> None:
        """Copies from the GPU into ``contents``."""
        for at in range(0, contents.nbytes, BOUNCE_BYTES):
            part = contents[at : at + BOUNCE_BYTES]
            self._copy(self._bounce.ctypes.data, address + at, part.nbytes)
            part[:] = self._bounce[: part.nbytes]

    def _copy(self, dst: int, src: int, nbytes: int) -> None:
        self.call("cuMemcpyAsync", dst, src, nbytes, self.stream)
        self.synchronise()

    # -- streams

    def new_stream(self) -> int:
        """One that waits for no other."""
        return int(self._get("cuStreamCreate", ctypes.c_void_p(), STREAM_NON_BLOCKING))

    def new_event(self) -> int:
        return int(self._get("cuEventCreate", ctypes.c_void_p(), EVENT_DISABLE_TIMING))

    def synchronise(self) -> None:
        """Waits for ``stream``."""
        self.call("cuStreamSynchronize", self.stream)

    @property
    def batch_call(self) -> str | None:
        """The name of the function that takes many copies at once; None before CUDA 12.8."""
        names = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
        return next((name for name in names if self.has(name)), None)

    def copy_batch(self, copies: U64) -> None:
        """Begins all by one call of ``batch_call``. Shape (n, 3): destination, source, bytes."""
        call = self.batch_call
        assert call is not None, "the driver has no cuMemcpyBatchAsync"
        columns = [np.ascontiguousarray(copies[:, i]) for i in range(3)]
        how = (ctypes.c_uint32 * 6)(SOURCE_ORDER_STREAM)  # CUmemcpyAttributes
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
        arguments: list[Any] = [*(column.ctypes.data for column in columns), len(copies)]
        arguments += [ctypes.byref(how), ctypes.byref(first), 1]
        if call == "cuMemcpyBatchAsync":
            arguments.append(ctypes.byref(failed))
        self.call(call, *arguments, self.stream)


def rows(dst: U64, src: U64, nbytes: int) -> U64:
    """Copies of equal size, as ``Gpu.copy_batch`` and ``te_bench._gpu`` take them."""
    table = np.empty((len(dst), 3), np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = dst, src, nbytes
    return table


def _functions(library: ctypes.CDLL) -> list[tuple[str, Any]]:
    found = []
    for line in PROTOTYPES.split("\n"):
        name, _, parameters = line.rstrip(")").partition("(")
        if name and hasattr(library, name):
            function = getattr(library, name)
            function.restype = ctypes.c_uint
            function.argtypes = [
                ctypes.c_void_p if one.endswith("*") else _TYPES[one]
                for one in parameters.split(", ")
            ]
            found.append((name, function))
    return found
