# SPDX-License-Identifier: Apache-2.0
"""The floor of a GPU: its own copies of the same blocks, within one process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from te_bench import _gpu
from te_bench.contenders.base import Call, Contender, Spent, time_calls
from te_bench.gpu import rows
from te_bench.memory import Memory, TwinMemory
from te_bench.protocol import Info, Timing

__all__ = ["DeviceCopy"]


class DeviceCopy(Contender):
    """One cuMemcpyBatchAsync from one allocation to another; before CUDA 12.8 a loop of
    cuMemcpyAsync."""

    _memory: TwinMemory

    def version(self) -> str:
        return f"CUDA {self._memory.gpu.version}"

    def allocate(self, nbytes: int) -> Memory:
        self._memory = TwinMemory(self.gpu(), nbytes)
        return self._memory

    def open(self, memory: Memory) -> Info:  # noqa: ARG002 - its own
        return {}

    def connect(self, there: Info) -> Info:  # noqa: ARG002 - there is nobody
        source = self.source_addresses(self._memory)
        landing = self.plan.addresses(self._memory.landing.address, self.plan.destination)
        gpu = self._memory.gpu

        def call(numbers: npt.NDArray[np.int64]) -> Call:
            copies = rows(landing[numbers], source[numbers], self.plan.shape.nbytes)

            def copy() -> Spent:
                gpu.enter()
                if gpu.batch_call is not None:
                    gpu.copy_batch(copies)
                else:
                    times = np.empty(0, np.uint64)
                    function = gpu.address_of("cuMemcpyAsync")
                    result, _ = _gpu.copy_each(function, copies, gpu.stream, times)
                    gpu.must("cuMemcpyAsync", result)
                gpu.synchronise()
                return Spent()

            return copy

        self._calls = [[call(numbers) for numbers in calls] for calls in self.parts()]
        return {}

    def transfer(self) -> Timing:
        return time_calls(self._calls)
