# SPDX-License-Identifier: Apache-2.0
"""What every contender does: a source's and a destination's side, driven by a worker.

A step may block for at most ``setup.deadline_s``: the runner ends the process after that.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from te.bench.protocol import Info, Setup, Timing
from te.bench.shapes import Plan

__all__ = ["Absent", "Call", "Contender", "time_calls"]

Call: TypeAlias = Callable[[], int]
"""Moves its blocks; returns when they have landed, with the ns until the submission returned (0
when submitting and waiting are one)."""


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
        """Of the engine; after ``open``."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The memory to copy from or to: ordinary memory of the process unless overridden."""
        return np.empty(nbytes, np.uint8)

    @abstractmethod
    def open(self, memory: npt.NDArray[np.uint8]) -> Info:
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

    def source_addresses(self, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """First bytes of the blocks in the source's memory, shape (blocks,)."""
        return self.plan.addresses(memory.ctypes.data, self.plan.source)

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
        ops_ns, submit_ns = _make(threads[0])
        return _timing(time.perf_counter_ns() - start_ns, [(ops_ns, submit_ns)])
    start = threading.Barrier(len(threads) + 1)
    outcomes: list[tuple[list[int], list[int]]] = []
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
    elapsed_ns = time.perf_counter_ns() - start_ns
    if errors:
        raise errors[0]
    return _timing(elapsed_ns, outcomes)


def _make(calls: Sequence[Call]) -> tuple[list[int], list[int]]:
    clock_ns = time.perf_counter_ns
    ops_ns, submit_ns = [], []
    for call in calls:
        start_ns = clock_ns()
        submit_ns.append(call())
        ops_ns.append(clock_ns() - start_ns)
    return ops_ns, submit_ns


def _timing(elapsed_ns: int, outcomes: Sequence[tuple[list[int], list[int]]]) -> Timing:
    return Timing(
        elapsed_ns=elapsed_ns,
        ops_ns=[ns for ops, _ in outcomes for ns in ops],
        submit_ns=[ns for _, submits in outcomes for ns in submits if ns],
    )
