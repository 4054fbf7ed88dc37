# SPDX-License-Identifier: Apache-2.0
"""The stand-in for CUDA's driver is as unforgiving as is said of it: each mistake that it is there
to find is made here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from te_cuda import GRANULARITY, SYNCHRONISES, CudaError, CudaMemory, StandIn, cuda

NBYTES = 1 << 16
INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE = 1, 2, 201, 400
NOT_READY, ILLEGAL_ADDRESS, NOT_SUPPORTED = 600, 700, 801
HERE = Path(__file__)
PATHS = os.pathsep.join((str(HERE.parent), str(HERE.parents[1] / "support")))


class App:
    """An application with a stream of its own, and pinned memory."""

    def __init__(self, driver: StandIn) -> None:
        self.driver = driver
        self.stream, self.event = ctypes.c_void_p(), ctypes.c_void_p()
        pointer = ctypes.c_void_p()
        driver.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        driver.call("cuEventCreate", ctypes.byref(self.event), 2)
        driver.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(NBYTES), 0)
        assert pointer.value is not None
        self.host = np.frombuffer((ctypes.c_uint8 * NBYTES).from_address(pointer.value), np.uint8)

    def copy(self, dst: int, src: int, nbytes: int = NBYTES) -> None:
        ends = ctypes.c_uint64(dst), ctypes.c_uint64(src)
        self.driver.call("cuMemcpyAsync", *ends, ctypes.c_size_t(nbytes), self.stream)

    def record(self) -> None:
        self.driver.call("cuEventRecord", self.event, self.stream)

    def query(self) -> int:
        return self.driver.try_call("cuEventQuery", self.event)

    def wait(self) -> int:
        while (answer := self.query()) == NOT_READY:
            os.sched_yield()
        return answer

    def close(self) -> None:
        self.driver.call("cuStreamDestroy_v2", self.stream)
        self.driver.call("cuEventDestroy_v2", self.event)
        self.driver.try_call("cuMemFreeHost", ctypes.c_uint64(self.host.ctypes.data))


@contextlib.contextmanager
def app(seed: int = 1, version: int = 13000) -> Iterator[tuple[App, CudaMemory]]:
    with cuda(seed, version=version) as driver, driver.current(0):
        memory = driver.allocate(NBYTES)
        one = App(driver)
        try:
            yield one, memory
        finally:
            driver.reset()
            one.close()
            driver.free(memory)


def test_no_system_call_touches_device_memory() -> None:
    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        fd = os.memfd_create("file")
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.write(fd, ctypes.c_void_p(memory.address), ctypes.c_size_t(1)) == -1
        assert ctypes.get_errno() == errno.EFAULT
        os.close(fd)
        driver.free(memory)


@pytest.mark.slow
def test_the_processor_cannot_touch_device_memory() -> None:
    code = "import te_cuda, ctypes; ctypes.string_at(te_cuda.stand_in().allocate(4096).address, 1)"
    # A sanitizer would make a report of the signal.
    names = ("ASAN_OPTIONS", "TSAN_OPTIONS")
    sanitizers = {one: f"{os.environ.get(one, '')}:handle_segv=0" for one in names}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PATHS} | sanitizers,
        check=False,
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == -signal.SIGSEGV


def test_a_copy_is_there_when_its_event_says_so() -> None:
    with app() as (one, memory):
        for i in range(1, 20):
            one.host[:] = i
            one.copy(memory.address, one.host.ctypes.data)
            one.record()
            assert one.wait() == 0
            assert (memory.view == i).all()


def test_who_does_not_wait_sees_wrong_bytes() -> None:
    """Both mistakes: to use the destination too early, and to give the source away too early."""
    with app() as (one, memory):
        with one.driver.stuck():
            one.host[:] = 1
            one.copy(memory.address, one.host.ctypes.data)
            one.record()
            assert one.query() == NOT_READY
            assert (memory.view == 0).all()
            one.host[:] = 2
        assert one.wait() == 0
        assert (memory.view == 2).all()


def test_calls_need_a_context_and_its_own_streams() -> None:
    with app() as (one, memory):
        answers = []
        thread = threading.Thread(target=lambda: answers.append(one.query()))
        thread.start()
        thread.join()
        with one.driver.current(1), pytest.raises(CudaError, match=str(INVALID_HANDLE)):
            one.copy(memory.address, one.host.ctypes.data)
        assert answers == [INVALID_CONTEXT]
        other = one.driver.allocate(NBYTES, 1)
        with pytest.raises(CudaError, match=str(INVALID_VALUE)):
            one.copy(other.address, one.host.ctypes.data)
        one.driver.free(other, 1)


def test_pageable_memory_is_counted() -> None:
    with app() as (one, memory):
        pageable = np.full(NBYTES, 3, np.uint8)
        one.copy(memory.address, pageable.ctypes.data)
        assert (memory.view == 3).all()
        assert one.driver.count("pageable_copies") == 1
        one.driver.reset()


def test_a_copy_crosses_handles_of_virtual_memory() -> None:
    with app() as (one, memory):
        address = one.driver.reserve(2 * GRANULARITY)
        for i in (0, 1):
            one.driver.map(address + i * GRANULARITY, GRANULARITY, handle_types=0)
        one.host[:] = np.arange(NBYTES) % 251
        place = address + GRANULARITY - 1001
        one.copy(place, one.host.ctypes.data)
        one.copy(memory.address, place)
        one.record()
        assert one.wait() == 0
        assert (memory.view == one.host).all()
        for i in (0, 1):
            one.driver.unmap(address + i * GRANULARITY, GRANULARITY)


def test_streams_wait_for_events() -> None:
    with app() as (one, memory):
        other = ctypes.c_void_p()
        one.driver.call("cuStreamCreate", ctypes.byref(other), 1)
        one.host[:] = 7
        one.copy(memory.address, one.host.ctypes.data)
        one.record()
        one.driver.call("cuStreamWaitEvent", other, one.event, 0)
        one.driver.call("cuStreamSynchronize", other)
        assert (memory.view == 7).all()
        one.driver.call("cuStreamDestroy_v2", other)
        assert one.driver.calls(threading.get_native_id(), flags=SYNCHRONISES) >= 2


def test_a_copy_that_fails_fails_all_that_follows() -> None:
    with app() as (one, memory):
        one.driver.fail_copy(after=0)
        with one.driver.stuck():
            one.copy(memory.address, one.host.ctypes.data)
            one.record()
        assert one.wait() == ILLEGAL_ADDRESS
        with pytest.raises(CudaError, match=str(ILLEGAL_ADDRESS)):
            one.copy(memory.address, one.host.ctypes.data)


def test_memory_that_was_freed_under_a_copy_is_found() -> None:
    with app() as (one, memory):
        other = one.driver.allocate(NBYTES)
        with one.driver.stuck():
            one.copy(memory.address, other.address)
            one.record()
            one.driver.free(other)
        assert one.wait() == ILLEGAL_ADDRESS


def test_a_capture_is_disturbed_by_who_is_not_relaxed() -> None:
    with app() as (one, _):
        mode = ctypes.c_uint(2)
        one.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        with one.driver.captured():
            assert one.query() == 0
        one.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        with pytest.raises(AssertionError), one.driver.captured():
            assert one.query() == 900


def test_functions_are_there_since_their_version() -> None:
    def find(driver: StandIn, name: str, version: int) -> int | None:
        found = ctypes.c_void_p()
        arguments = name.encode(), ctypes.byref(found), version, ctypes.c_uint64(0)
        result = driver.try_call("cuGetProcAddress", *arguments)
        return found.value if result == 0 else -result

    with cuda(version=12080) as driver:
        assert find(driver, "cuMemcpyBatchAsync", 12080) is not None
        assert find(driver, "cuMemcpyBatchAsync", 13000) == -INVALID_VALUE
        assert find(driver, "cuMemcpyBatchAsync", 12000) is None
        assert find(driver, "cuNothing", 12000) is None
        old = find(driver, "cuMemcpyBatchAsync", 12080)
        driver.reset(version=13000)
        assert find(driver, "cuMemcpyBatchAsync", 13000) not in (None, old)


def test_virtual_memory_is_exported_if_it_was_made_to_be() -> None:
    with cuda() as driver:
        address = driver.reserve(2 * GRANULARITY)
        driver.map(address, GRANULARITY, handle_types=1)
        driver.map(address + GRANULARITY, GRANULARITY, handle_types=0)
        handle, fd, zero = ctypes.c_uint64(), ctypes.c_int(-1), ctypes.c_uint64(0)
        for at, answer in ((address, 0), (address + GRANULARITY, NOT_SUPPORTED)):
            place = ctypes.c_uint64(at + 5)
            driver.call("cuMemRetainAllocationHandle", ctypes.byref(handle), place)
            export = ("cuMemExportToShareableHandle", ctypes.byref(fd), handle, 1, zero)
            assert driver.try_call(*export) == answer
            driver.call("cuMemRelease", handle)
        view = driver.memory(address, GRANULARITY).view
        view[:4] = 9
        assert os.pread(fd.value, 4, 0) == b"\x09" * 4
        os.close(fd.value)
        for at in (address, address + GRANULARITY):
            driver.unmap(at, GRANULARITY)
        driver.call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(2 * GRANULARITY))


OPENER = """
import ctypes, sys, te_cuda
driver = te_cuda.stand_in()
handle = type("Handle", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * 64)]})
raw = sys.stdin.buffer.read(64)
one = handle.from_buffer_copy(raw)
address, again = ctypes.c_uint64(), ctypes.c_uint64()
with driver.current(0):
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), one, 1)
    driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(again), one, 1)
    assert again.value == address.value
    memory = driver.memory(address.value, 8)
    memory.view[4:] = memory.view[:4] + 1
    print("open", flush=True)
    sys.stdin.buffer.read(1)
    driver.call("cuIpcCloseMemHandle", address)
    driver.call("cuIpcCloseMemHandle", address)
    assert driver.try_call("cuIpcCloseMemHandle", address) == 1
"""


@pytest.mark.slow
def test_legacy_handles_open_in_other_processes_alone() -> None:
    with cuda() as driver, driver.current(0):
        memory = driver.allocate(NBYTES)
        memory.view[:4] = 40
        handle = ctypes.create_string_buffer(64)
        driver.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(memory.address))
        process = subprocess.Popen(
            [sys.executable, "-c", OPENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PATHS},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            process.stdin.write(handle.raw)
            process.stdin.flush()
            assert process.stdout.readline() == b"open\n"
            assert memory.view[:8].tolist() == [40] * 4 + [41] * 4
            driver.free(memory)
            assert driver.count("freed_while_open") == 1
            process.stdin.write(b"x")
            process.stdin.flush()
            assert process.wait(60) == 0
