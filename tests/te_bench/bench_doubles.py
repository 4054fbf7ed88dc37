# SPDX-License-Identifier: Apache-2.0
"""Contenders that do what a contender must never do; run by workers, named MODULE:CLASS."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from te_bench.contenders.base import Absent
from te_bench.contenders.te_engine import TeEngine
from te_bench.memory import Memory
from te_bench.protocol import Info, Timing


class Corrupting(TeEngine):
    """One byte of its last block is not the source's."""

    def transfer(self) -> Timing:
        self._memory.array[int(self.plan.source[-1]) * self.plan.stride] ^= 1
        return super().transfer()


class Straying(TeEngine):
    """Writes where nothing was sent to."""

    def receive(self) -> None:
        unused = np.setdiff1d(np.arange(self.plan.slots), self.plan.destination)
        self._memory.array[int(unused[0]) * self.plan.stride] = 1


class _Idle(TeEngine):
    def open(self, memory: Memory) -> Info:
        return {}

    def connect(self, there: Info) -> Info:
        return {}


class Dying(_Idle):
    """Its source ends in the middle of a round."""

    def transfer(self) -> Timing:
        os.write(2, b"out of luck\n")
        os._exit(7)


class Hanging(_Idle):
    """Its source never comes back."""

    def transfer(self) -> Timing:
        time.sleep(3600)
        raise AssertionError


class Raising(_Idle):
    """Refuses."""

    def transfer(self) -> Timing:
        raise RuntimeError("batch_transfer returned -1")


class Missing(_Idle):
    """Is not installed."""

    def open(self, memory: Memory) -> Any:
        raise Absent("libnothing.so is not installed")
