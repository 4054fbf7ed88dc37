# SPDX-License-Identifier: Apache-2.0
"""te's copies to and from a GPU, without an engine."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpu_check.blocks import GUARD, contents, image, pieces
from gpu_check.child import Failed, Task
from te.memory_kinds import MemoryKind, kind_of
from te_bench import _gpu
from te_bench.gpu import Gpu

__all__ = ["FROM_HOST", "TO_HOST", "WITHIN", "copier"]

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
