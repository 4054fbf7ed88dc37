# SPDX-License-Identifier: Apache-2.0
"""One process of a contender's pair: ``python -m te_bench.worker FD``; ends with its parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import traceback
from typing import Any

import numpy as np

from te_bench.busy import BusyLoop
from te_bench.contenders import Absent, Contender, load
from te_bench.memory import HostMemory, Memory
from te_bench.protocol import Channel, ChannelClosed, Info, Reply, Request, Setup
from te_bench.shapes import Shape, plan

__all__ = ["Worker", "main"]

PR_SET_PDEATHSIG = 1


class Worker:
    """Runs the steps of one side. Timed steps touch nothing but the contender."""

    def __init__(self, setup: Setup) -> None:
        """Loads the contender; ``Absent`` when what it needs is not installed here."""
        shape = Shape("asked", setup.blocks, setup.nbytes, setup.threads, setup.sync)
        self._plan = plan(shape, setup.seed)
        self._contender: Contender = load(setup.contender)(setup, self._plan)
        self._memory: Memory = HostMemory(np.empty(0, np.uint8))
        self._busy: BusyLoop | None = None
        self._cpu_s = 0.0

    def open(self, _: Request) -> Info:
        """Makes the memory and the engine; what the other side must know."""
        self._memory = self._contender.allocate(self._plan.memory_nbytes)
        # Every page is touched now, so that no round pays for it.
        self._memory.clear()
        info = self._contender.open(self._memory)
        return {
            "version": self._contender.version(),
            "address": self._memory.address,
            "pid": os.getpid(),
            "spins_idle": self._contender.SPINS_IDLE,
            **info,
        }

    def connect(self, request: Request) -> Info:
        """Source: connects to the destination of which ``info`` tells."""
        return {"pid": os.getpid(), **self._contender.connect(request.info)}

    def accept(self, request: Request) -> None:
        """Destination: takes what the source opened."""
        self._contender.accept(request.info)

    def fill(self, request: Request) -> None:
        """Source: contents of a new round."""
        self._memory.fill(request.seed)

    def begin(self, request: Request) -> None:
        """The round starts here, for the count of processor time."""
        self._busy = BusyLoop() if request.busy else None
        self._cpu_s = self._used_s()

    def transfer(self, _: Request) -> Any:
        """Source: moves everything, and says how long it took."""
        return self._contender.transfer()

    def receive(self, _: Request) -> None:
        """Destination: its part in it."""
        self._contender.receive()

    def end(self, _: Request) -> float:
        """Processor time of this process since ``begin``, without the busy loop's, in seconds."""
        used_s = self._used_s() - self._cpu_s
        if self._busy is not None:
            self._busy.stop()
            self._busy = None
        return used_s

    def check(self, request: Request) -> dict[str, int]:
        """Destination: looks at every byte."""
        landing = self._memory.check(self._plan, request.seed)
        return {"wrong_blocks": landing.wrong_blocks, "stray_slots": landing.stray_slots}

    def _used_s(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        busy_s = 0.0 if self._busy is None else self._busy.cpu_s()
        return usage.ru_utime + usage.ru_stime - busy_s


def _serve(channel: Channel) -> None:
    worker: Worker | None = None
    while True:
        request = channel.receive(Request, None)
        try:
            if request.setup is not None:
                worker = Worker(request.setup)
            if worker is None:
                raise RuntimeError(f"{request.op} before open")
            reply = Reply(ok=getattr(worker, request.op)(request))
        except Absent as error:
            reply = Reply(absent=str(error))
        except Exception as error:  # noqa: BLE001 - any failure of a contender is a result
            traceback.print_exc()
            reply = Reply(failed=f"{type(error).__name__}: {error}")
        channel.send(reply)


def main(arguments: list[str]) -> None:
    """Serves the runner on the inherited socket until it hangs up."""
    # The kernel ends this process with the runner's, whatever state a contender has hung it in.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    try:
        _serve(channel)
    except ChannelClosed:
        sys.stderr.flush()
        # Engines of some contenders take seconds to go, or hang: nothing here needs them to.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
