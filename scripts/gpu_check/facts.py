# SPDX-License-Identifier: Apache-2.0
"""What this machine is, and what te makes of each kind of memory."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from gpu_check.allocations import ALLOCATIONS, allocate
from gpu_check.child import Failed, Skipped, Task
from te.doctor.facts import UNLIMITED, gather
from te.errors import RegistrationError
from te.memory_kinds import HOST, MemoryKind, kind_of
from te_bench import machine as bench_machine
from te_bench.gpu import Gpu

__all__ = ["driver", "kinds", "machine"]

#: CUdevice_attribute.
ATTRIBUTES: Final = {
    "async_engine_count": 40,
    "virtual_memory": 102,
    "handle_type_posix_fd": 103,
    "gpu_direct_rdma_with_virtual_memory": 110,
    "gpu_direct_rdma": 116,
    "gpu_direct_rdma_flush_writes_options": 117,
    "gpu_direct_rdma_writes_ordering": 118,
    "dma_buf": 124,
    "ipc_event": 125,
    "handle_type_fabric": 128,
}
FUNCTIONS: Final = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemAllocAsync")
NBYTES: Final = 4 << 20
PAGE: Final = 4096
RELAXED: Final = 2
SYS_PIDFD_GETFD: Final = 438


def driver(task: Task) -> dict[str, Any]:
    task.doing("looking for a GPU")
    gpu = Gpu()
    mode = ctypes.c_uint(RELAXED)
    gpu.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    found: dict[str, Any] = {
        "name": gpu.name,
        "cuda_version": gpu.version,
        "gpus": gpu.count,
        "free_nbytes": gpu.free_nbytes,
        **{name: gpu.attribute(number) for name, number in ATTRIBUTES.items()},
        "functions": [name for name in FUNCTIONS if gpu.has(name)],
        "capture_mode_of_a_thread": mode.value,
    }
    return {"found": found}


def machine(task: Task) -> dict[str, Any]:
    task.doing("looking at the machine")
    facts = gather()
    limit = facts.memlock_nbytes
    found = {
        **bench_machine.describe(),
        "ptrace_scope": facts.ptrace_scope,
        "may_ptrace": facts.may_ptrace,
        "process_vm_readv_of_itself": facts.own_read_problem or "works",
        "pidfd_getfd": _pidfd_getfd(),
        "memlock_nbytes": "unlimited" if limit == UNLIMITED else limit,
        "may_lock_more": facts.may_lock,
    }
    return {"found": found}


def _pidfd_getfd() -> str:
    """Of a child: what ptrace and seccomp allow."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        own = os.pidfd_open(pid)
        fd = ctypes.CDLL(None, use_errno=True).syscall(SYS_PIDFD_GETFD, own, 2, 0)
        problem = "works" if fd >= 0 else os.strerror(ctypes.get_errno())
        os.close(own)
    except OSError as exc:
        problem = exc.strerror or str(exc)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return problem


def kinds(task: Task) -> dict[str, Any]:
    """Device memory of every kind is the GPU's, all other memory the host's."""
    gpu = Gpu()
    found: dict[str, Any] = {}
    for name in ALLOCATIONS:
        task.doing(f"recognising memory: {name}")
        try:
            memory = allocate(gpu, name, NBYTES)
        except Skipped as exc:
            found[name] = str(exc)
            continue
        found[name] = _device_memory(name, gpu, memory.address, memory.nbytes)
        memory.free()
    for name, address in _host_memories(gpu).items():
        task.doing(f"recognising memory: {name}")
        kind = kind_of(address)
        if kind is not HOST:
            raise Failed(f"{name} memory is {kind.name}, and should be the host's")
        found[name] = kind.name
    rows = [[name, one] for name, one in found.items()]
    table = {"title": "what te takes memory for", "headings": ["", ""], "rows": rows}
    return {"found": found, "tables": [table]}


def _device_memory(name: str, gpu: Gpu, address: int, nbytes: int) -> dict[str, Any]:
    kind = kind_of(address + 1)
    if kind.name != f"cuda:{gpu.ordinal}" or not kind.has_copier:
        raise Failed(f"{name} memory is {kind.name}, copied: {kind.has_copier}")
    kind.check(address, nbytes)
    _must_refuse(kind, name, address, nbytes)
    problem = _trial(lambda: os.close(kind.dma_buf(-(-address // PAGE) * PAGE, nbytes - PAGE)))
    return {"kind": kind.name, "location": kind.location(address, {}), "dma_buf": problem}


def _must_refuse(kind: MemoryKind, name: str, address: int, nbytes: int) -> None:
    """A range longer than any memory."""
    try:
        kind.check(address, nbytes + (1 << 42))
    except RegistrationError:
        return
    raise Failed(f"{name} memory of {nbytes} bytes was taken for 4 TiB more")


def _host_memories(gpu: Gpu) -> dict[str, int]:
    """Addresses; all but the last stay for the life of the process."""
    array = np.zeros(NBYTES, np.uint8)
    found = {"ordinary": array.ctypes.data, "cuMemHostAlloc": gpu.host(NBYTES).ctypes.data}
    registered = np.zeros(NBYTES, np.uint8)
    _kept.extend([array, registered])
    gpu.call("cuMemHostRegister_v2", registered.ctypes.data, NBYTES, 1)
    found["cuMemHostRegister"] = registered.ctypes.data
    managed = ctypes.c_uint64()
    gpu.call("cuMemAllocManaged", ctypes.byref(managed), NBYTES, 1)
    found["managed"] = managed.value
    return found


_kept: Final[list[np.ndarray[Any, Any]]] = []


def _trial(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as exc:
        return exc.strerror or str(exc)
    return "works"
