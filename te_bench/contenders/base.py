# SPDX-License-Identifier: Apache-2.0
"""What every contender does: a source's and a destination's side, driven by a worker.

A step may block for at most ``setup.deadline_s``: the runner ends the process after that.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from te_bench.gpu import Gpu, NoGpu
from te_bench.memory import GpuMemory, HostMemory, Memory, place_of
from te_bench.protocol import Info, Setup, Timing
from te_bench.shapes import Plan

__all__ = ["Absent", "Call", "Contender", "Spent", "time_calls"]


class Spent(NamedTuple):
    """The times of one call, in ns."""

    #: Until the submission returned; 0 when submitting and waiting are one.
    submit_ns: int = 0
    #: From the outcome, as polling shows it, until the call returned, if that is not to be counted.
    late_ns: int = 0


Call: TypeAlias = Callable[[], Spent]
"""Moves its blocks; returns when they have landed."""


class Absent(Exception):
    """What a contender needs is not installed here; the message says what."""


class Contender(ABC):
    """One engine on one side. Built once, then driven through the steps in this order."""

    #: Its threads take processor time while nothing moves; its pair is stopped between rounds.
    SPINS_IDLE: ClassVar[bool] = False

    def __init__(self, setup: Setup, plan: Plan) -> None:
        """Loads nothing that could be absent."""
        self.setup = setup
        self.plan = plan

    @abstractmethod
    def version(self) -> str:
        """The engine's version; after ``open``."""

    @property
    def place(self) -> str:
        """What this side's memory is: ``"any"``, ``"engine"`` or ``"cuda"``."""
        return place_of(self.setup.memory, self.setup.role)

    def allocate(self, nbytes: int) -> Memory:
        """The memory to copy from or to: a GPU's if that is asked for, else ordinary memory of the
        process unless overridden. ``Absent`` without a GPU."""
        if self.place == "cuda":
            return GpuMemory(self.gpu(), nbytes)
        return HostMemory(np.empty(nbytes, np.uint8))

    @staticmethod
    def gpu() -> Gpu:
        """The first one; ``Absent`` without."""
        try:
            return Gpu()
        except NoGpu as error:
            raise Absent(str(error)) from error

    @abstractmethod
    def open(self, memory: Memory) -> Info:
        """Starts the engine on this side; what the other side must know beyond address and pid.

        Raises ``Absent`` when it is not installed.
        """

    @abstractmethod
    def connect(self, there: Info) -> Info:
        """Source: connects, and prepares what the engine's calls take (not timed)."""

    def accept(self, there: Info) -> None:  # noqa: B027 - most have nothing to do
        """Destination: takes what the source opened."""

    @abstractmethod
    def transfer(self) -> Timing:
        """Source: moves every block once. It has landed at the return."""

    def receive(self) -> None:  # noqa: B027 - one-sided engines have nothing to do
        """Destination: its part in a round."""

    def source_addresses(self, memory: Memory) -> npt.NDArray[np.uint64]:
        """First bytes of the blocks in the source's memory, shape (blocks,)."""
        return self.plan.addresses(memory.address, self.plan.source)

    def destination_addresses(self, there: Info) -> npt.NDArray[np.uint64]:
        """First bytes of the blocks in the destination's memory, shape (blocks,)."""
        return self.plan.addresses(there["address"], self.plan.destination)

    def parts(self) -> list[list[npt.NDArray[np.int64]]]:
        """Block numbers of every call, for every submitting thread."""
        pieces = self.plan.pieces()
        if self.plan.shape.sync:
            return [list(piece.reshape(-1, 1)) for piece in pieces]
        return [[piece] for piece in pieces]


def time_calls(threads: Sequence[Sequence[Call]]) -> Timing:
    """Makes each list of calls, one after another, on a thread of its own; a single one here."""
    if len(threads) == 1:
        start_ns = time.perf_counter_ns()
        return _timing(start_ns, [_make(threads[0])])
    start = threading.Barrier(len(threads) + 1)
    outcomes: list[_Made] = []
    errors: list[Exception] = []

    def run(calls: Sequence[Call]) -> None:
        start.wait()
        try:
            outcomes.append(_make(calls))
        except Exception as error:  # noqa: BLE001 - raised again below, on the worker's thread
            errors.append(error)

    runners = [threading.Thread(target=run, args=(calls,), daemon=True) for calls in threads]
    for runner in runners:
        runner.start()
    start.wait()
    start_ns = time.perf_counter_ns()
    for runner in runners:
        runner.join()
    if errors:
        raise errors[0]
    return _timing(start_ns, outcomes)


class _Made(NamedTuple):
    """What a thread's calls took, and when the last of them had landed."""

    ops_ns: list[int]
    spent: list[Spent]
    landed_ns: int


def _make(calls: Sequence[Call]) -> _Made:
    clock_ns = time.perf_counter_ns
    ops_ns, spent = [], []
    landed_ns = 0
    for call in calls:
        start_ns = clock_ns()
        one = call()
        landed_ns = clock_ns() - one.late_ns
        ops_ns.append(landed_ns - start_ns)
        spent.append(one)
    return _Made(ops_ns, spent, landed_ns)


def _timing(start_ns: int, outcomes: Sequence[_Made]) -> Timing:
    spent = [one for made in outcomes for one in made.spent]
    return Timing(
        elapsed_ns=max(made.landed_ns for made in outcomes) - start_ns,
        ops_ns=[ns for made in outcomes for ns in made.ops_ns],
        submit_ns=[one.submit_ns for one in spent if one.submit_ns],
        late_ns=[one.late_ns for one in spent if one.late_ns],
    )
