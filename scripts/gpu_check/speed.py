# SPDX-License-Identifier: Apache-2.0
"""What copies cost: within one process beside the GPU's own, and between two beside the peers."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from gpu_check.child import Failed, Task
from gpu_check.copying import FROM_HOST, TO_HOST, WITHIN
from te.memory_kinds import MemoryKind, kind_of
from te_bench import _gpu, tables
from te_bench.bars import CUDA_BARS, verdict
from te_bench.gpu import U64, Gpu, rows
from te_bench.report import as_json, percentile
from te_bench.runner import Case, run_case
from te_bench.shapes import SHAPES

__all__ = ["calls", "copies", "pairs"]

#: Of all blocks of one figure, on each side.
MEMORY_BYTES: Final = 128 << 20
BLOCKS_MAX: Final = 16384
BLOCK_BYTES: Final = (256, 1024, 4096, 16384, 65536, 262144, 1 << 20)
ROUNDS: Final = 7
DIRECTIONS: Final = {"D2H": TO_HOST, "H2D": FROM_HOST, "D2D": WITHIN}
WAYS: Final = tuple(DIRECTIONS)
METHODS: Final = ("te", "loop", "batch", "one_large", "pageable_loop")
CALLS: Final = 2000
RING_BYTES: Final = 64 << 20
PAIR_ROUNDS: Final = 7


def copies(task: Task) -> dict[str, Any]:
    """GB/s of scattered blocks, medians of alternated rounds."""
    gpu, found, rows_of_table = Gpu(), {}, []
    memory = task.scaled(MEMORY_BYTES, 1 << 20)
    with_memory = _Memory(gpu, memory)
    for way in WAYS:
        for nbytes in BLOCK_BYTES:
            task.doing(f"{way}, blocks of {nbytes} B")
            rates = _rates(
                gpu, with_memory, way, nbytes, task.scaled(ROUNDS, 2), task.scaled(BLOCKS_MAX)
            )
            found[f"{way}_{nbytes}_gb_per_s"] = rates
            rows_of_table.append([f"{way} {nbytes} B", *(rates[one] for one in METHODS)])
    headings = ["blocks of", "te", "loop", "batch", "one large", "pageable loop"]
    table = {"title": "GB/s within one process", "headings": headings, "rows": rows_of_table}
    return {"found": found, "tables": [table]}


class _Memory:
    """Two parts of a GPU, and pinned and pageable memory of the host."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device, self.other = gpu.allocate(nbytes), gpu.allocate(nbytes)
        self.pinned = gpu.host(nbytes)
        self.pageable = np.ones(nbytes, np.uint8)
        self.kind: MemoryKind = kind_of(self.device)

    def ends(self, way: str, *, pageable: bool) -> tuple[int, int]:
        """Addresses: destination, source."""
        host = int((self.pageable if pageable else self.pinned).ctypes.data)
        if way == "D2D":
            return self.other, self.device
        return (host, self.device) if way == "D2H" else (self.device, host)


def _rates(
    gpu: Gpu, memory: _Memory, way: str, nbytes: int, rounds: int, most: int
) -> dict[str, float | None]:
    count = min(memory.nbytes // nbytes, most)
    random = np.random.default_rng(nbytes)
    places = [random.permutation(memory.nbytes // nbytes)[:count].astype(np.uint64) for _ in "ab"]

    def table(*, pageable: bool = False) -> U64:
        dst, src = memory.ends(way, pageable=pageable)
        step = np.uint64(nbytes)
        return rows(places[0] * step + np.uint64(dst), places[1] * step + np.uint64(src), nbytes)

    scattered = table()
    dst, src = memory.ends(way, pageable=False)
    large = rows(np.array([dst], np.uint64), np.array([src], np.uint64), count * nbytes)
    methods: dict[str, Callable[[], float]] = {
        "te": lambda: _by_te(memory.kind, scattered, way),
        "loop": lambda: _by_loop(gpu, scattered),
        "one_large": lambda: _by_loop(gpu, large),
    }
    if gpu.batch_call is not None:
        methods["batch"] = lambda: _by_batch(gpu, scattered)
    if way != "D2D":
        pageable = table(pageable=True)
        methods["pageable_loop"] = lambda: _by_loop(gpu, pageable)
    taken: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(rounds + 1):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            seconds = methods[name]()
            if number:  # The first warms up.
                taken[name].append(seconds)
    total = count * nbytes / 1e9
    return {
        name: total / statistics.median(taken[name]) if name in taken else None for name in METHODS
    }


def _by_te(kind: MemoryKind, table: U64, way: str) -> float:
    error, _, elapsed_ns = _gpu.kind_copy(kind.compiled, table, DIRECTIONS[way])
    if error:
        raise Failed(f"te's copier gave errno {error}: {kind.trouble}")
    return elapsed_ns / 1e9


def _by_loop(gpu: Gpu, table: U64) -> float:
    begun_s = time.perf_counter()
    none = np.empty(0, np.uint64)
    result, _ = _gpu.copy_each(gpu.address_of("cuMemcpyAsync"), table, gpu.stream, none)
    gpu.must("cuMemcpyAsync", result)
    gpu.synchronise()
    return time.perf_counter() - begun_s


def _by_batch(gpu: Gpu, table: U64) -> float:
    begun_s = time.perf_counter()
    gpu.copy_batch(table)
    gpu.synchronise()
    return time.perf_counter() - begun_s


def calls(task: Task) -> dict[str, Any]:
    """What single calls of the driver cost the thread that makes them, in µs."""
    gpu = Gpu()
    memory = _Memory(gpu, RING_BYTES // 16)
    count = task.scaled(CALLS, 100)
    found: dict[str, Any] = {}
    for way in WAYS:
        task.doing(f"submitting copies, {way}")
        found[f"submit_{way}_4096_us"] = _percentiles(_submissions(gpu, memory, way, count))
    if gpu.batch_call is not None:
        for blocks in (16, 256):
            task.doing(f"submitting batches of {blocks}")
            found[f"submit_batch_of_{blocks}_us"] = _percentiles(
                _batches(gpu, memory, blocks, max(count // 20, 10))
            )
    task.doing("asking for events")
    event = ctypes.c_void_p(gpu.new_event())
    gpu.call("cuEventRecord", event, gpu.stream)
    gpu.synchronise()
    times_ns = np.zeros(count, np.uint64)
    _gpu.query_each(gpu.address_of("cuEventQuery"), event.value or 0, times_ns)
    found["event_query_us"] = _percentiles(times_ns)
    task.doing("pinning memory")
    found["pin_ring_ms"], found["unpin_ring_ms"] = _pinning(memory.kind)
    table = {
        "title": "calls (µs; pinning 64 MiB: ms)",
        "headings": ["", ""],
        "rows": [[name, one] for name, one in found.items()],
    }
    return {"found": found, "tables": [table]}


def _submissions(gpu: Gpu, memory: _Memory, way: str, count: int) -> U64:
    dst, src = memory.ends(way, pageable=False)
    table = rows(np.full(count, dst, np.uint64), np.full(count, src, np.uint64), 4096)
    times_ns = np.zeros(count, np.uint64)
    result, _ = _gpu.copy_each(gpu.address_of("cuMemcpyAsync"), table, gpu.stream, times_ns)
    gpu.must("cuMemcpyAsync", result)
    gpu.synchronise()
    return times_ns


def _batches(gpu: Gpu, memory: _Memory, blocks: int, count: int) -> U64:
    dst, src = memory.ends("D2H", pageable=False)
    steps = np.arange(blocks, dtype=np.uint64) * np.uint64(4096)
    table = rows(np.uint64(dst) + steps, np.uint64(src) + steps, 4096)
    times_ns = np.zeros(count, np.uint64)
    for i in range(count):
        begun_ns = time.perf_counter_ns()
        gpu.copy_batch(table)
        times_ns[i] = time.perf_counter_ns() - begun_ns
        gpu.synchronise()
    return times_ns


def _percentiles(times_ns: U64) -> dict[str, float]:
    values = times_ns.tolist()
    return {f"p{percent}": percentile(values, percent) / 1e3 for percent in (50, 99)}


def _pinning(kind: MemoryKind) -> tuple[float, float]:
    """Of memory as large as te's ring for staging, every page touched."""
    ring = np.ones(RING_BYTES, np.uint8)
    begun_s = time.perf_counter()
    unpin = kind.pin(int(ring.ctypes.data), ring.nbytes)
    pinned_s = time.perf_counter()
    unpin()
    return (pinned_s - begun_s) * 1e3, (time.perf_counter() - pinned_s) * 1e3


def pairs(task: Task, transport: str, memory: str, beside: str) -> dict[str, Any]:
    """`te bench`, shape kv, between two processes on the one GPU, beside the peers that were asked
    for."""
    peers = task.peers if memory == "cuda" else []
    case = Case(
        shape=SHAPES["kv"] if task.scale == 1 else SHAPES["kv"].scaled(task.scale),
        transport=transport,
        memory=memory,
        busy=False,
        rounds=task.scaled(PAIR_ROUNDS, 2),
        seed=1,
        peers=[*([beside] if beside else []), *peers],
        floors="fit",
        python=task.python,
        peers_python=task.peers_python,
        deadline_s=60.0,
    )
    result = run_case(case, lambda _, what: task.doing(what))
    if not result.ok:
        reasons = [f"{name}: {one.reason}" for name, one in result.results().items() if one.reason]
        raise Failed("; ".join(reasons))
    judged = [asdict(verdict(bar, result)) for bar in CUDA_BARS if bar.concerns(result)]
    text = tables.text(result)
    return {"found": as_json(result), "tables": [{"title": "", "text": text}], "bars": judged}
