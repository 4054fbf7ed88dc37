# SPDX-License-Identifier: Apache-2.0
"""CUDA as a kind of memory: what it asks of a driver, and of drivers that refuse or are old."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from te_cuda import GRANULARITY, CudaMemory, StandIn, cuda
from te_staging import Copy, KindStruct, struct_of

import te
from te.memory_kinds import HOST, MemoryKind, Reach, kind_of
from te.memory_kinds.cuda import kind as cuda_kind

NBYTES = 1 << 18
TO_HOST, FROM_HOST = 0, 1
EACH = 64
BATCH = "cuMemcpyBatchAsync_v2"
OUT_OF_MEMORY, INVALID_CONTEXT = 2, 201


class Copies:
    """The compiled half of a kind, with host memory of its own."""

    def __init__(self, kind: MemoryKind, memory: CudaMemory) -> None:
        self.kind, self.memory = kind, memory
        self.host = np.zeros(NBYTES, np.uint8)
        self._unpin = kind.pin(self.host.ctypes.data, NBYTES)
        struct = KindStruct.from_address(struct_of(kind.compiled))
        self.state, self.ops = struct.state, struct.ops.contents

    def begin(self, n: int, event: ctypes.c_void_p) -> int:
        """Of so many pieces, with gaps between them, to the device."""
        copies = (Copy * n)()
        for i, one in enumerate(copies):
            one.dst = self.memory.address + 2 * i * EACH
            one.src = self.host.ctypes.data + 2 * i * EACH
            one.nbytes = EACH
        return int(self.ops.copy(self.state, ctypes.addressof(copies), n, FROM_HOST, event))

    def run(self, n: int) -> int:
        event = ctypes.c_void_p()
        if answer := self.begin(n, event):
            return answer
        while (answer := self.ops.query(self.state, event)) == errno.EAGAIN:
            os.sched_yield()
        self.ops.release(self.state, event)
        return int(answer)

    def close(self) -> None:
        self._unpin()


@pytest.mark.slow
@pytest.mark.parametrize("version", [13000, 12080, 12000])
def test_large_batches_go_in_parts(version: int) -> None:
    with cuda(version=version) as driver:
        memory = driver.allocate(NBYTES)
        here = Copies(kind_of(memory.address), memory)
        here.host[:] = np.arange(NBYTES).astype(np.uint8) | 1
        driver.forget_calls()
        assert here.run(1000) == 0
        sent = np.arange(NBYTES) % (2 * EACH) < EACH
        sent &= np.arange(NBYTES) < 2000 * EACH
        assert (memory.view == np.where(sent, here.host, 0)).all()
        if version == 13000:
            assert driver.calls(name=BATCH) == 4
        here.close()
        driver.free(memory)


def test_a_part_that_is_refused_waits_for_those_before() -> None:
    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        here = Copies(kind_of(memory.address), memory)
        here.host[:] = 1
        assert here.kind.trouble == ""
        driver.fail(BATCH, OUT_OF_MEMORY, after=1)
        with driver.stuck():
            event = ctypes.c_void_p()
            assert here.begin(1000, event) == 0
            assert here.ops.query(here.state, event) == errno.EAGAIN
        while (answer := here.ops.query(here.state, event)) == errno.EAGAIN:
            os.sched_yield()
        here.ops.release(here.state, event)
        assert answer == errno.ENOMEM
        assert memory.view[510 * EACH] == 1
        assert here.kind.trouble == "cuda:0: the call that copies: CUDA_ERROR_OUT_OF_MEMORY"
        assert here.run(10) == 0
        here.close()
        driver.free(memory)


def test_the_thread_is_left_as_it_was() -> None:
    def state(driver: StandIn) -> tuple[int | None, int]:
        context, mode, again = ctypes.c_void_p(), ctypes.c_uint(1), ctypes.c_uint()
        driver.call("cuCtxGetCurrent", ctypes.byref(context))
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        again.value = mode.value
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(again))
        return context.value, mode.value

    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        for context in (None, 1):  # None, and another device's.
            if context is not None:
                driver.call("cuCtxPushCurrent_v2", driver.retain(context))
            before = state(driver)
            here = Copies(kind_of(memory.address), memory)
            here.kind.check(memory.address, NBYTES)
            assert here.run(10) == 0
            driver.fail("cuCtxPushCurrent", INVALID_CONTEXT, times=3)
            assert here.run(10) == errno.EIO
            with pytest.raises(te.RegistrationError, match="cuCtxPushCurrent: CUDA_ERROR_INVALID"):
                here.kind.check(memory.address, NBYTES)
            with pytest.raises(OSError, match="cuMemHostRegister of 4096 bytes"):
                here.kind.pin(0x1000, 4096)
            here.close()
            assert state(driver) == before
        driver.call("cuCtxPopCurrent_v2", None)
        driver.release(1)
        driver.free(memory)


def test_memory_is_pinned_once_for_all_gpus() -> None:
    with cuda() as driver, driver.current(1):
        memories = [driver.allocate(NBYTES, ordinal) for ordinal in (0, 1)]
        kinds = [kind_of(one.address) for one in memories]
        assert [one.name for one in kinds] == ["cuda:0", "cuda:1"]
        host = np.zeros(NBYTES, np.uint8)
        undo = [one.pin(host.ctypes.data, NBYTES) for one in kinds]
        assert driver.count("pinned_bytes") == NBYTES
        for one in reversed(undo):
            one()
        assert driver.count("pinned_bytes") == 0
        for ordinal, memory in enumerate(memories):
            driver.free(memory, ordinal)


def test_memory_that_cannot_be_pinned_is_refused() -> None:
    with cuda() as driver, te.Engine(te.Config(transports=("tcp",))) as engine:
        memory = driver.allocate(NBYTES)
        driver.fail("cuMemHostRegister", OUT_OF_MEMORY)
        says = "no host memory to stage CUDA memory through: .*CUDA_ERROR_OUT_OF_MEMORY"
        with pytest.raises(te.RegistrationError, match=says):
            engine.register(memory.address, NBYTES)
        assert engine.register(memory.address, NBYTES).kind == "cuda:0"
        engine.close()
        driver.free(memory)


@pytest.mark.parametrize("handle_types", [0, 1], ids=["memory saver", "expandable segments"])
def test_virtual_memory_is_staged_and_holes_are_found(handle_types: int) -> None:
    with cuda() as driver:
        address = driver.reserve(4 * GRANULARITY)
        for i in (0, 1, 3):
            driver.map(address + i * GRANULARITY, GRANULARITY, handle_types)
        kind = kind_of(address + 5)
        assert (kind.name, kind.reach, kind.has_copier) == ("cuda:0", Reach.NIC, True)
        kind.check(address, 2 * GRANULARITY)
        kind.check(address + 3 * GRANULARITY + 1, GRANULARITY - 1)
        for nbytes in (4 * GRANULARITY, 3 * GRANULARITY, 2 * GRANULARITY + 1):
            with pytest.raises(te.RegistrationError, match="but is not all memory of cuda:0"):
                kind.check(address, nbytes)
        here = Copies(kind, driver.memory(address, GRANULARITY))
        here.host[:] = 7
        assert here.run(100) == 0
        assert here.memory.view[198 * EACH] == 7
        here.close()
        for i in (0, 1, 3):
            driver.unmap(address + i * GRANULARITY, GRANULARITY)


def test_managed_and_pinned_memory_are_the_hosts() -> None:
    with cuda() as driver, driver.current(0):
        host = np.zeros(NBYTES, np.uint8)
        with driver.claimed(host.ctypes.data, NBYTES, 0, is_managed=True):
            assert kind_of(host.ctypes.data) is HOST
        place = ctypes.c_uint64(host.ctypes.data)
        driver.call("cuMemHostRegister_v2", place, ctypes.c_size_t(NBYTES), 0)
        assert kind_of(host.ctypes.data) is HOST
        driver.call("cuMemHostUnregister", place)


def test_a_gpu_without_streams_is_left_to_nics(caplog: pytest.LogCaptureFixture) -> None:
    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        driver.fail("cuStreamCreate", OUT_OF_MEMORY, after=1)
        kind = kind_of(memory.address)
        assert (kind.has_copier, kind.trouble) == (False, "")
        says = (
            "memory of GPU 0 cannot be staged: [Errno 12] cuStreamCreate: CUDA_ERROR_OUT_OF_MEMORY"
        )
        assert says in caplog.text
        kind.check(memory.address, NBYTES)
        kind.pin(memory.address, NBYTES)()
        driver.fail("cuDeviceGetPCIBusId", 1)
        assert kind.location(memory.address, {"": "cuda:0"}) == "cuda:0"
        assert kind.location(memory.address, {"0000:36:00.0": "cuda:3"}) == "cuda:3"
        driver.free(memory)


def test_a_driver_that_knows_no_address_is_no_reason_to_fail() -> None:
    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        driver.fail("cuPointerGetAttributes", 3)
        assert kind_of(memory.address) is HOST
        assert kind_of(memory.address) is not HOST
        driver.free(memory)


def test_what_old_drivers_lack_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with cuda(version=11060) as driver:
        memory = driver.allocate(NBYTES)
        with pytest.raises(OSError, match="has no cuMemGetHandleForAddressRange"):
            kind_of(memory.address).dma_buf(memory.address, 4096)
        driver.reset(version=10020)
        cuda_kind._known = None
        cuda_kind._say.cache_clear()
        for _ in range(2):
            assert kind_of(memory.address) is HOST
        assert caplog.text.count("libcuda.so.1 has no cuFlushGPUDirectRDMAWrites") == 1
        driver.reset()
        driver.free(memory)


def run(code: str, **environment: str) -> str:
    paths = os.pathsep.join(one for one in sys.path if one)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_a_process_without_the_driver_does_not_load_it() -> None:
    code = """
from te.memory_kinds.cuda import recognise_cuda
assert recognise_cuda(4096) is None
assert "libcuda" not in open("/proc/self/maps").read()
"""
    assert run(code) == ""


def test_a_driver_without_its_own_look_up_is_too_old(tmp_path: Any) -> None:
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-xc", "-"]
    subprocess.run(command, input=b"int cuInit(unsigned flags) { return 0; }", check=True)
    code = f"""
import ctypes
ctypes.CDLL({str(library)!r})
from te.memory_kinds.cuda import recognise_cuda
assert recognise_cuda(4096) is None
"""
    assert "libcuda.so.1 is older than CUDA 11.3: it has no cuGetProcAddress" in run(code)
