# SPDX-License-Identifier: Apache-2.0
"""Processes beside the servers: on cores of their own choice, and ended with what they are for."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from cpu_serving.processes import ServingError

__all__ = ["Beside", "kept_busy"]

#: Until the process that started it is gone.
_SPIN = ("-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass")


class Beside:
    """`python -m module`, as an asynchronous context manager."""

    def __init__(self, module: str, argv: Sequence[str], cores: Sequence[int]) -> None:
        self._module, self._argv, self._cores = module, argv, cores

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, *self._argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def tell(self, line: bytes) -> None:
        """A line of its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()

    async def said(self, timeout_s: float) -> bytes:
        """Ends its standard input; what it has printed by its end. Raises ServingError."""
        try:
            out, errors = await asyncio.wait_for(self._process.communicate(b""), timeout_s)
        except TimeoutError:
            raise ServingError(f"{self._module} has not ended after {timeout_s:.0f} s") from None
        if self._process.returncode:
            words = errors.decode(errors="replace")[-2000:]
            raise ServingError(f"{self._module} ended with {self._process.returncode}: {words}")
        return out


@asynccontextmanager
async def kept_busy(cores: Sequence[int]) -> AsyncIterator[None]:
    """On each of these cores a process turns that gets what others leave (SCHED_IDLE). Processors
    are faster while their neighbours rest, and so would be a pair while the other one stands
    still. Its own cores must have none: it would lose 30 % of its rate, more or less."""
    async with AsyncExitStack() as stack:
        for core in cores:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *_SPIN, preexec_fn=lambda core=core: _idle_on(core)
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
        yield


def _idle_on(core: int) -> None:
    os.sched_setaffinity(0, [core])
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
