# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver without a GPU (cuda_driver/), under the name of CUDA's own; and what an application
does with it before te sees any of its memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cpu_serving.cuda import NAME, SOURCES, build_driver
from te_built import built_once

from te.memory_kinds.cuda import kind

__all__ = [
    "SOURCES",
    "SYNCHRONISES",
    "CudaError",
    "CudaMemory",
    "FakeCuda",
    "StandIn",
    "cuda",
    "fake_cuda",
    "stand_in",
]

NEWEST: Final = 13000
DELAY_US: Final = 100
#: Of ``StandIn.calls``: those that may wait for the device, or hold the driver's lock for long.
SYNCHRONISES: Final = 2
STREAM_NON_BLOCKING: Final = 1
GRANULARITY: Final = 2 << 20


class CudaError(Exception):
    """What a function of the driver gave."""

    def __init__(self, name: str, result: int) -> None:
        super().__init__(f"{name}: {result}")
        self.result = result


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


@dataclass
class CudaMemory:
    """Some of a device: ``address`` is what te is told, ``view`` what the test looks at it by."""

    address: int
    view: np.ndarray[Any, Any]


class StandIn:
    """The loaded driver: its functions, and what only a stand-in has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, result in [
            ("fake_alias", ctypes.c_void_p),
            ("fake_exported", ctypes.c_uint64),
            ("fake_calls", ctypes.c_uint64),
            ("fake_pageable_copies", ctypes.c_uint64),
            ("fake_freed_while_open", ctypes.c_uint64),
            ("fake_pinned_bytes", ctypes.c_uint64),
            ("fake_streams", ctypes.c_uint64),
            ("fake_events", ctypes.c_uint64),
        ]:
            getattr(library, name).restype = result
        self.call("cuInit", 0)

    def try_call(self, name: str, *arguments: Any) -> int:
        """What the function gives. Addresses and sizes as ``ctypes`` objects, or small numbers."""
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        if result := self.try_call(name, *arguments):
            raise CudaError(name, result)

    # -- as an application

    def retain(self, ordinal: int) -> ctypes.c_void_p:
        """The primary context of a device, as PyTorch takes it."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def release(self, ordinal: int) -> None:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """The device's primary context is the calling thread's."""
        self.call("cuCtxPushCurrent_v2", self.retain(ordinal))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", None)
            self.release(ordinal)

    def allocate(self, nbytes: int, ordinal: int = 0) -> CudaMemory:
        """Zeros."""
        address = ctypes.c_uint64()
        with self.current(ordinal):
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return self.memory(address.value, nbytes)

    def free(self, memory: CudaMemory, ordinal: int = 0) -> None:
        with self.current(ordinal):
            self.call("cuMemFree_v2", ctypes.c_uint64(memory.address))

    def memory(self, address: int, nbytes: int) -> CudaMemory:
        """What is mapped there."""
        alias = self._library.fake_alias(ctypes.c_uint64(address))
        assert alias, f"no memory at {address:#x}"
        return CudaMemory(
            address, np.frombuffer((ctypes.c_uint8 * nbytes).from_address(alias), np.uint8)
        )

    def reserve(self, nbytes: int) -> int:
        """Addresses for ``map``."""
        address = ctypes.c_uint64()
        rest = [ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)]
        self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), *rest)
        return address.value

    def map(self, address: int, nbytes: int, handle_types: int, ordinal: int = 0) -> None:
        """New memory there, whose handle may be exported as these types (0: memory saver's)."""
        handle = ctypes.c_uint64()
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        properties = Properties(1, handle_types, 1, ordinal)
        size, zero = ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), zero)
        self.call("cuMemMap", ctypes.c_uint64(address), size, ctypes.c_size_t(0), handle, zero)
        access = Access(1, ordinal, 3)
        self.call(
            "cuMemSetAccess",
            ctypes.c_uint64(address),
            size,
            ctypes.byref(access),
            ctypes.c_size_t(1),
        )
        self.call("cuMemRelease", handle)  # The mapping keeps it.

    def unmap(self, address: int, nbytes: int) -> None:
        self.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    # -- as a test

    def reset(self, seed: int = 1, delay_us: int = DELAY_US, version: int = NEWEST) -> None:
        self._library.fake_reset(ctypes.c_uint64(seed), ctypes.c_uint64(delay_us), version)

    def fail(self, name: str, error: int, after: int = 0, times: int = 1) -> None:
        """So many calls of the function (0: all) give the error, after those that succeed."""
        counts = [ctypes.c_uint64(after), ctypes.c_uint64(times)]
        self._library.fake_fail(name.encode(), *counts, error)

    def fail_copy(self, after: int, error: int = 700) -> None:
        """The call of copies that comes after so many fails in its middle, for good."""
        self._library.fake_fail_copy(ctypes.c_uint64(after), error)

    def order_writes(self, order: int, can_flush: bool = True) -> None:
        """The attribute GPU_DIRECT_RDMA_WRITES_ORDERING; 0: they have to be flushed."""
        self._library.fake_order_writes(order, can_flush)

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """No work of any stream begins."""
        self._library.fake_set(1, 0)
        try:
            yield
        finally:
            self._library.fake_set(0, 0)

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Another thread captures a graph; nobody must disturb it."""
        self._library.fake_set(0, 1)
        try:
            yield
            assert not self._library.fake_capture_is_dead()
        finally:
            self._library.fake_set(0, 0)

    def calls(self, thread: int = 0, name: str | None = None, flags: int = 0) -> int:
        """How often a thread (by ``threading.get_native_id``; 0: any) called the function (None:
        any), counting those with one of the flags (0: all)."""
        text = None if name is None else name.encode()
        return int(self._library.fake_calls(ctypes.c_long(thread), text, flags))

    def forget_calls(self) -> None:
        self._library.fake_forget_calls()

    def count(self, what: str) -> int:
        """``pageable_copies``, ``freed_while_open``, ``pinned_bytes``, ``streams``, ``events``."""
        return int(getattr(self._library, f"fake_{what}")())

    def retained(self, ordinal: int) -> int:
        """How often a primary context is."""
        return int(self._library.fake_retained(ordinal))

    def forget_pinned(self) -> None:
        """What was registered stays so no longer, as at the end of a broken context."""
        self._library.fake_forget_pinned()

    @contextlib.contextmanager
    def claimed(
        self, address: int, nbytes: int, ordinal: int, is_managed: bool = False
    ) -> Iterator[None]:
        """Some host memory is said to be a device's: no longer than it lives, or memory of another
        test would be taken for it."""
        size = ctypes.c_size_t(nbytes)
        self._library.fake_claim(ctypes.c_uint64(address), size, ordinal, is_managed)
        try:
            yield
        finally:
            self._library.fake_unclaim(ctypes.c_uint64(address))

    def exported(self) -> tuple[int, int]:
        """The range of the last dma-buf: address, bytes."""
        nbytes = ctypes.c_size_t()
        start = int(self._library.fake_exported(ctypes.byref(nbytes)))
        return start, nbytes.value


@functools.cache
def stand_in() -> StandIn:
    """Stays loaded for good, as CUDA's does; without memory of its own it knows no address. Never
    in a process with a real driver: the loader would take one for the other, by their name."""
    library = built_once(SOURCES.iterdir(), build_driver) / NAME
    return StandIn(ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL))


@contextlib.contextmanager
def cuda(
    seed: int = 1, delay_us: int = DELAY_US, version: int = NEWEST, ordinal: int = 0
) -> Iterator[StandIn]:
    """The driver, in a process that uses one device."""
    driver = stand_in()
    driver.reset(seed, delay_us, version)
    gc.collect()
    kind._kinds.clear()  # It may be another version now.
    kind._known = None
    pinned = driver.count("pinned_bytes")
    driver.retain(ordinal)
    try:
        yield driver
        assert driver.count("pageable_copies") == 0
    finally:
        driver.reset()
    assert driver.count("pinned_bytes") == pinned
    driver.release(ordinal)


@dataclass(frozen=True)
class FakeCuda:
    """The driver, which takes some host memory for a device's."""

    driver: StandIn

    def exported(self) -> tuple[int, int]:
        """The range of the last dma-buf: address, bytes."""
        return self.driver.exported()


@contextlib.contextmanager
def fake_cuda(address: int, nbytes: int, refusal: int = 0) -> Iterator[FakeCuda]:
    """Some host memory is the sixth device's for as long as this lasts, as a soft NIC has to reach
    it; ``refusal``: the CUDA error that exporting it gives."""
    driver = stand_in()
    driver.reset()
    with driver.claimed(address, nbytes, 5):
        if refusal:
            driver.fail("cuMemGetHandleForAddressRange", refusal, times=0)
        try:
            yield FakeCuda(driver)
        finally:
            driver.reset()
