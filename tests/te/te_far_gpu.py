# SPDX-License-Identifier: Apache-2.0
"""An engine with memory of GPUs in a process of its own (te_far.py), on the stand-in for CUDA's
driver (te_cuda.py)."""

from __future__ import annotations

import base64
from typing import Any

from te_cuda import GRANULARITY, CudaMemory, StandIn, stand_in
from te_far import Far, FarEngine, main, pattern

import te

__all__ = ["FarGpu", "allocate", "is_shared"]


def allocate(driver: StandIn, how: str, nbytes: int, ordinal: int = 0) -> CudaMemory:
    """Some of a device's memory, as PyTorch has it: ``"block"`` of its caching allocator,
    ``"pieces"`` of an expandable segment, ``"private"`` ones of its memory saver."""
    if how == "block":
        return driver.allocate(nbytes, ordinal)
    address = driver.reserve(nbytes)
    for at in range(0, nbytes, GRANULARITY):
        driver.map(address + at, GRANULARITY, 1 if how == "pieces" else 0, ordinal)
    return CudaMemory(address, driver.memory(address, GRANULARITY).view)


def is_shared(engine: te.Engine, region: te.Region) -> bool:
    """Whether the last peer on this host has mapped a region."""
    transport: Any = engine._transports.get("samehost")
    return bool(transport._sharing._links[-1].has(region.serial))


class FarGpu(FarEngine):
    """``far.op(**arguments)`` runs ``GpuFar.op``."""

    program = __file__


class GpuFar(Far):
    """The far end."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = stand_in()
        self.driver.retain(0)
        self.regions: dict[int, te.Region] = {}
        self.memory: dict[int, CudaMemory] = {}

    def allocate(self, how: str, nbytes: int, seed: int, ordinal: int = 0) -> int:
        """Registered, with a pattern; its address."""
        self.driver.retain(ordinal)
        with self.driver.current(ordinal):
            memory = allocate(self.driver, how, nbytes, ordinal)
        data = pattern(seed, nbytes)
        step = nbytes if how == "block" else GRANULARITY
        for at in range(0, nbytes, step):
            self.driver.memory(memory.address + at, step).view[:] = data[at : at + step]
        self.memory[memory.address] = memory
        self.regions[memory.address] = self.engine.register(memory.address, nbytes)
        return memory.address

    def part(self, address: int, nbytes: int) -> int:
        """Registers a part of what ``allocate`` gave, instead."""
        for region in tuple(self.regions.values()):
            if region.address <= address < region.end:
                self.engine.deregister(self.regions.pop(region.address))
        self.regions[address] = self.engine.register(address, nbytes)
        return address

    def deregister(self, address: int) -> None:
        self.engine.deregister(self.regions.pop(address))

    def free(self, address: int) -> int:
        """How often memory was freed that somebody had open."""
        self.driver.free(self.memory.pop(address))
        return self.driver.count("freed_while_open")

    def fail(self, name: str, error: int) -> None:
        """The next call of the function."""
        self.driver.fail(name, error)

    def is_shared(self, address: int) -> bool:
        """Whether the peer has mapped it."""
        return is_shared(self.engine, self.regions[address])

    def handles(self) -> list[str]:
        """Of what is registered."""
        exports = [one.export for one in self.regions.values() if one.export is not None]
        return [
            base64.b64encode(part.handle).decode() for export in exports for part in export.parts()
        ]

    def calls(self, name: str | None = None) -> int:
        return self.driver.calls(name=name)

    def bytes_of(self, address: int, nbytes: int) -> list[int]:
        return [int(one) for one in self.driver.memory(address, nbytes).view]


if __name__ == "__main__":
    main(GpuFar())
