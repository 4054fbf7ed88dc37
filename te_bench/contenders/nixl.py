# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's NIXL (PyPI nixl, nixl-cu12) with its UCX backend."""

from __future__ import annotations

import base64
import importlib
import os
import time
from importlib import metadata
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from te_bench.contenders.base import Absent, Call, Contender, Spent, time_calls
from te_bench.memory import Memory, place_of
from te_bench.protocol import Info, Timing

__all__ = ["Nixl"]

#: NIXL's words for a place.
KINDS: Final = {"any": "DRAM", "engine": "DRAM", "cuda": "VRAM"}


class Nixl(Contender):
    """A fresh handle for every transfer, as each request needs one; descriptors made beforehand."""

    # Measured: 0.95 of a core in each idle process over TCP, 0.65 with UCX's default, which on
    # two cores would leave nothing to the others.
    SPINS_IDLE: ClassVar[bool] = True

    def version(self) -> str:
        return f"nixl {metadata.version('nixl')}"

    def open(self, memory: Memory) -> Info:
        # UCX reads these when it starts. Left alone it picks process_vm_* between these processes.
        os.environ["UCX_LOG_LEVEL"] = "error"
        if self.setup.transport == "tcp":
            os.environ["UCX_TLS"] = "tcp"
        try:
            api: Any = importlib.import_module("nixl._api")
        except ImportError as error:
            raise Absent(f"nixl cannot be imported: {error}") from error
        self._agent: Any = api.nixl_agent(self.setup.role, api.nixl_agent_config(backends=["UCX"]))
        self._memory = memory
        ranges = [(memory.address, memory.nbytes, 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(ranges, KINDS[self.place]))
        return {"agent": base64.b64encode(self._agent.get_agent_metadata()).decode()}

    def connect(self, there: Info) -> Info:
        agent = self._agent
        remote = agent.add_remote_agent(base64.b64decode(there["agent"]))
        remote = remote.decode() if isinstance(remote, bytes) else remote
        source = self.source_addresses(self._memory)
        destination = self.destination_addresses(there)

        def call(numbers: npt.NDArray[np.int64]) -> Call:
            here = self._descriptors(source[numbers], self.place)
            far = self._descriptors(
                destination[numbers], place_of(self.setup.memory, "destination")
            )
            check = agent.check_xfer_state

            def move() -> Spent:
                start_ns = time.perf_counter_ns()
                handle = agent.initialize_xfer("WRITE", here, far, remote)
                state = agent.transfer(handle)
                submitted_ns = time.perf_counter_ns()
                while state == "PROC":
                    state = check(handle)
                if state != "DONE":
                    raise RuntimeError(f"the transfer ended in state {state}")
                agent.release_xfer_handle(handle)
                return Spent(submitted_ns - start_ns)

            return move

        self._calls = [[call(numbers) for numbers in calls] for calls in self.parts()]
        return {}

    def transfer(self) -> Timing:
        return time_calls(self._calls)

    def _descriptors(self, addresses: npt.NDArray[np.uint64], place: str) -> Any:
        rows = np.zeros((addresses.size, 3), np.uint64)
        rows[:, 0] = addresses
        rows[:, 1] = self.plan.shape.nbytes
        return self._agent.get_xfer_descs(rows, KINDS[place])
