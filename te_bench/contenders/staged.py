# SPDX-License-Identifier: Apache-2.0
"""te with memory that it must not touch, as a GPU's: a thread copies it to and from slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from te.memory_kinds import RECOGNISERS, MemoryKind, Reach
from te.topology import ANYWHERE
from te_bench.contenders.base import Absent
from te_bench.contenders.te_engine import TeEngine
from te_bench.memory import Memory
from te_bench.protocol import Info

__all__ = ["StagedTeEngine"]


class _Untouchable(MemoryKind):
    """Memory of the process that is declared to be out of everybody's reach."""

    name = "staged"
    description: ClassVar = "memory declared untouchable"
    reach: ClassVar = Reach(0)
    has_copier = True

    def __init__(self, compiled: object) -> None:
        self.compiled = compiled

    def check(self, address: int, nbytes: int) -> None:
        """The benchmark's own memory needs no check."""

    def location(self, address: int, gpus: Mapping[str, str]) -> str:  # noqa: ARG002
        return ANYWHERE


class StagedTeEngine(TeEngine):
    """Both sides' memory is of such a kind."""

    def open(self, memory: Memory) -> Info:
        try:
            from te_bench import _copier
        except ImportError as error:
            raise Absent(f"te_bench._copier is not built: {error}") from error
        kind = _Untouchable(_copier.start())
        start, end = memory.address, memory.address + memory.nbytes
        RECOGNISERS.insert(0, lambda address: kind if start <= address < end else None)
        return super().open(memory)
