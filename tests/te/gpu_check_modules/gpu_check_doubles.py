# SPDX-License-Identifier: Apache-2.0
"""Steps of scripts/gpu-check that do what a step, or te, must never do."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
from gpu_check import copying, endings, pairs, processes, side
from gpu_check.blocks import contents
from gpu_check.child import Task


def hang(task: Task) -> dict[str, Any]:
    """With a process of its own that would go on."""
    task.doing(f"waiting for good, beside {os.fork()}")
    time.sleep(3600)
    raise AssertionError


def die(task: Task) -> dict[str, Any]:
    task.doing("dying")
    os.write(2, b"out of luck\n")
    os._exit(7)


def break_the_context(task: Task) -> dict[str, Any]:
    """The driver's copies fail from the second on."""
    ctypes.CDLL("libcuda.so.1").fake_fail_copy(ctypes.c_uint64(1), 700)
    return copying.copier(task)


class Corrupting(side.Side):
    """One byte of the source is another one."""

    def fill(self, seed: int) -> None:
        found = contents(seed, self._nbytes)
        found[:] ^= 1
        self._put(found)


class Early(side.Side):
    """An arrival is told before it is one."""

    def look_at_rounds(self, tag: int) -> dict[str, int]:
        assert self._engine is not None
        real = self._engine.arrived
        self._engine.arrived = lambda one: real(one) + 1  # type: ignore[method-assign]
        return super().look_at_rounds(tag)


class Late(side.Side):
    """A byte lands after a fence."""

    def touched_bytes(self, wait_s: float) -> int:
        self._put(np.zeros(self._nbytes, np.uint8))
        return super().touched_bytes(wait_s)


def _with(name: str) -> None:
    processes.CODE = f"""
import gpu_check.side, gpu_check_doubles
gpu_check.side.Side = gpu_check_doubles.{name}
gpu_check.side.main()
"""  # type: ignore[misc]


def corrupting(task: Task) -> dict[str, Any]:
    _with("Corrupting")
    return pairs.all_bytes(task, "samehost")


def early(task: Task) -> dict[str, Any]:
    _with("Early")
    return pairs.arrivals(task, "tcp")


def late(task: Task) -> dict[str, Any]:
    _with("Late")
    return endings.fences(task, "samehost")
