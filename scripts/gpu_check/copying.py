# SPDX-License-Identifier: Apache-2.0
"""te's copies to and from a GPU, without another engine; digests of what lies there."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import te
from gpu_check.blocks import GUARD, contents, image, pieces
from gpu_check.child import Failed, Task
from te.memory_kinds import MemoryKind, kind_of
from te_bench import _gpu
from te_bench.gpu import Gpu

__all__ = ["FROM_HOST", "TO_HOST", "WITHIN", "copier", "digests"]

#: Direction of te/core/kinds.h.
TO_HOST: Final = 0
FROM_HOST: Final = 1
WITHIN: Final = 2
MEMORY_BYTES: Final = 96 << 20
LARGEST_BYTES: Final = 16 << 20
ROUNDS: Final = 6


def copier(task: Task) -> dict[str, Any]:
    """Pieces of 1 B to 16 MiB at odd addresses, both ways; every byte between them stays."""
    gpu = Gpu()
    memory_nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    largest = task.scaled(LARGEST_BYTES, 1 << 16)
    device = gpu.allocate(memory_nbytes)
    kind = kind_of(device)
    host = np.zeros(memory_nbytes, np.uint8)
    unpin = kind.pin(host.ctypes.data, host.nbytes)
    copied = 0
    for seed in range(task.scaled(ROUNDS, 2)):
        for to_host in (False, True):
            task.doing(f"copying, seed {seed}, {'to' if to_host else 'from'} host memory")
            given = pieces(seed, memory_nbytes, largest)
            if to_host:
                gpu.upload(device, contents(seed, memory_nbytes))
                host[:] = GUARD
                _copy(kind, host.ctypes.data, given.target, device, given.source, given.nbytes)
                there = host
            else:
                host[:] = contents(seed, memory_nbytes)
                gpu.upload(device, np.full(memory_nbytes, GUARD, np.uint8))
                _copy(kind, device, given.target, host.ctypes.data, given.source, given.nbytes)
                there = np.empty_like(host)
                gpu.download(device, there)
            wrong = np.flatnonzero(there != image(seed, memory_nbytes, largest))
            if wrong.size:
                way = "to" if to_host else "from"
                raise Failed(
                    f"seed {seed}, {way} host memory: {wrong.size} wrong bytes, the first at"
                    f" {wrong[0]}"
                )
            copied += int(given.nbytes.sum())
    unpin()
    gpu.free(device)
    return {"found": {"copied_nbytes": copied, "largest_piece_nbytes": largest}}


def digests(task: Task) -> dict[str, Any]:
    """Of scattered units in the GPU's memory, and in a copy of it in the host's, they are equal. A
    byte that is changed in the GPU's shows in its unit alone."""
    gpu = Gpu()
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    device, host = gpu.allocate(nbytes), np.array(contents(1, nbytes))
    gpu.upload(device, host)
    rates = {}
    with te.Engine(te.Config(transports=("tcp",))) as engine:
        engine.register(device, nbytes)
        engine.register(host)
        digester = engine.digester()
        for unit, pieces_n in ((1 << 14, 1), (1 << 14, 16), (3000, 3)):
            task.doing(f"digests of units of {unit} bytes in {pieces_n} pieces")
            starts = np.arange(nbytes // unit, dtype=np.uint64) * np.uint64(unit)
            np.random.default_rng(unit).shuffle(starts)
            step = unit // pieces_n
            offsets = np.arange(pieces_n, dtype=np.uint64) * np.uint64(step)
            sizes = np.full(pieces_n, step - 8, np.uint64)
            right = digester.digests(starts + np.uint64(host.ctypes.data), offsets, sizes)
            began_s = time.perf_counter()
            found = digester.digests(starts + np.uint64(device), offsets, sizes)
            rates[f"{unit} in {pieces_n}"] = round(
                len(starts) * int(sizes.sum()) / (time.perf_counter() - began_s) / 1e9, 3
            )
            if (found != right).any():
                raise Failed(f"units of {unit} bytes: {int((found != right).sum())} digests differ")
            changed = np.array(host)
            changed[int(starts[0]) + 1] ^= 1
            gpu.upload(device, changed)
            found = digester.digests(starts + np.uint64(device), offsets, sizes)
            gpu.upload(device, host)
            if np.flatnonzero(found != right).tolist() != [0]:
                raise Failed(f"units of {unit} bytes: a changed byte shows in other digests")
        digester.close()
    gpu.free(device)
    return {"found": {"gb_per_s": rates}}


def _copy(
    kind: MemoryKind,
    dst: int,
    dst_offsets: npt.NDArray[np.int64],
    src: int,
    src_offsets: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
) -> None:
    table = np.stack([dst + dst_offsets, src + src_offsets, nbytes], axis=1).astype(np.uint64)
    direction = FROM_HOST if kind_of(dst) is kind else TO_HOST
    error, _, _ = _gpu.kind_copy(kind.compiled, table, direction)
    if error:
        raise Failed(f"the copier gave errno {error}: {kind.trouble}")
