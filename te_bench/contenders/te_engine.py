# SPDX-License-Identifier: Apache-2.0
"""te itself, through its public API."""

from __future__ import annotations

import base64
import dataclasses
import time
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt

import te
from te_bench.contenders.base import Call, Contender, Spent, time_calls
from te_bench.memory import HostMemory, Memory
from te_bench.protocol import Info, Timing

__all__ = ["HostTeEngine", "TeEngine", "engine_memory_offered"]


def engine_memory_offered() -> bool:
    """Whether this te can hand out memory that a peer on the same host may map."""
    return hasattr(te, "allocate")


class TeEngine(Contender):
    """``peer.write`` and ``Transfer.wait``."""

    _engine: te.Engine
    _memory: Memory

    def version(self) -> str:
        try:
            return metadata.version("sglang-mooncake")
        except metadata.PackageNotFoundError:
            return "from the source tree"

    def allocate(self, nbytes: int) -> Memory:
        if self.place != "engine":
            return super().allocate(nbytes)
        # Asked by name: a te that cannot do this is still to be measured in every other way.
        allocate: Any = getattr(te, "allocate", None)
        if allocate is None:
            raise RuntimeError("this te has no te.allocate; use --memory any")
        buffer = allocate(nbytes)
        return HostMemory(np.frombuffer(buffer, np.uint8)[:nbytes], buffer)

    def open(self, memory: Memory) -> Info:
        config = te.Config(host="127.0.0.1")
        if self.setup.transport != "auto":
            config = dataclasses.replace(config, transports=(self.setup.transport,))
        self._engine = te.Engine(config)
        # The writes have no tag.
        if isinstance(memory, HostMemory):
            self._engine.register(memory.owner, remote="read-write")
        else:
            self._engine.register(memory.address, memory.nbytes, remote="read-write")
        self._memory = memory
        return {"card": base64.b64encode(self._engine.card()).decode()}

    def connect(self, there: Info) -> Info:
        peer = self._engine.connect(base64.b64decode(there["card"]), self.setup.deadline_s)
        source = self.source_addresses(self._memory)
        destination = self.destination_addresses(there)

        # A busy process polls, as SGLang's scheduler does; a thread that waits instead gets the
        # interpreter back after another switch interval, whoever moved the bytes.
        polled = self.setup.busy and not self.plan.shape.sync

        def call(numbers: npt.NDArray[np.int64]) -> Call:
            blocks = te.Blocks.of(source[numbers], destination[numbers], self.plan.shape.nbytes)

            def write() -> Spent:
                start_ns = time.perf_counter_ns()
                transfer = peer.write(blocks)
                submitted_ns = time.perf_counter_ns()
                transfer.wait(self.setup.deadline_s)
                if not polled:
                    return Spent(submitted_ns - start_ns)
                landed_ns = start_ns + int(transfer.duration_s * 1e9)
                return Spent(submitted_ns - start_ns, time.perf_counter_ns() - landed_ns)

            return write

        self._calls = [[call(numbers) for numbers in calls] for calls in self.parts()]
        return {"rails": self._engine.stats().rails}

    def transfer(self) -> Timing:
        return time_calls(self._calls)


class HostTeEngine(TeEngine):
    """The same blocks in host memory, whatever memory the case is about."""

    @property
    def place(self) -> str:
        return "any"
