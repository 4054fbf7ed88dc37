# SPDX-License-Identifier: Apache-2.0
"""The memory of one side of a contender: the host's, or a GPU's, out of the processor's reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final, Literal

import numpy as np

from te_bench import pattern
from te_bench.gpu import Gpu
from te_bench.pattern import U8, Landing
from te_bench.shapes import Plan

__all__ = ["MEMORIES", "GpuMemory", "HostMemory", "Memory", "TwinMemory", "place_of"]

#: Of both sides: ordinary memory, what te.allocate gives, a GPU's; or a GPU's on one side.
MEMORIES: Final = ("any", "engine", "cuda", "cuda-host", "host-cuda")


def place_of(memory: str, role: Literal["source", "destination"]) -> str:
    """``"any"``, ``"engine"`` or ``"cuda"``: what one side has."""
    if memory in ("cuda-host", "host-cuda"):
        source, _, destination = memory.partition("-")
        place = source if role == "source" else destination
        return "any" if place == "host" else place
    return memory


class Memory(ABC):
    """Some of it, at one address."""

    address: int
    nbytes: int

    @abstractmethod
    def clear(self) -> None:
        """Zeros, and every page touched."""

    @abstractmethod
    def fill(self, seed: int) -> None:
        """The contents of a round (``te_bench.pattern``)."""

    @abstractmethod
    def check(self, plan: Plan, seed: int) -> Landing:
        """What a round has left here."""


class HostMemory(Memory):
    """An array of the process. ``owner``: what keeps it, and is registered; the array itself
    unless given."""

    def __init__(self, array: U8, owner: Any = None) -> None:
        self.array = array
        self.owner = array if owner is None else owner
        self.address = int(array.ctypes.data)
        self.nbytes = array.nbytes

    def clear(self) -> None:
        self.array[:] = 0

    def fill(self, seed: int) -> None:
        pattern.fill(self.array, seed)

    def check(self, plan: Plan, seed: int) -> Landing:
        return pattern.check(plan, self.array, seed)


class GpuMemory(Memory):
    """One allocation of cuMemAlloc, or, with ``address``, what somebody else has allocated."""

    def __init__(self, gpu: Gpu, nbytes: int, address: int | None = None) -> None:
        self.gpu = gpu
        self.nbytes = nbytes
        self.address = gpu.allocate(nbytes) if address is None else address
        #: Room for the contents, as the host sees them.
        self.image: U8 = np.zeros(nbytes, np.uint8)

    def clear(self) -> None:
        self.image[:] = 0
        self.gpu.upload(self.address, self.image)

    def fill(self, seed: int) -> None:
        pattern.fill(self.image, seed)
        self.gpu.upload(self.address, self.image)

    def check(self, plan: Plan, seed: int) -> Landing:
        self.gpu.download(self.address, self.image)
        return pattern.check(plan, self.image, seed)


class TwinMemory(Memory):
    """Two allocations of one GPU: what is filled, and where copies of it are looked for."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self.gpu = gpu
        self.nbytes = nbytes
        self.source, self.landing = GpuMemory(gpu, nbytes), GpuMemory(gpu, nbytes)
        self.address = self.source.address

    def clear(self) -> None:
        self.source.clear()
        self.landing.clear()

    def fill(self, seed: int) -> None:
        self.source.fill(seed)

    def check(self, plan: Plan, seed: int) -> Landing:
        return self.landing.check(plan, seed)
