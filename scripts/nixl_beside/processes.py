# SPDX-License-Identifier: Apache-2.0
"""Two processes with an agent each, and what is done to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final, Self

from nixl_beside.contenders import ROOT, environment

__all__ = ["AgentError", "AgentPair", "AgentProcess"]

#: Beside what an operation itself waits; the first one imports torch for NVIDIA's package.
_DEADLINE_S: Final = 60.0
_START_S: Final = 300.0


class AgentError(Exception):
    """An agent's process has failed or not answered; the sentence says at what."""


class AgentProcess:
    """One, started; `ask` for what its `agent.Agent` can do."""

    def __init__(self, name: str, given: Mapping[str, str], log: Path) -> None:
        near, far = Pipe()
        self._name, self._connection = name, near
        folders = [given.get("PYTHONPATH"), str(ROOT), *sys.path]
        path = os.pathsep.join(dict.fromkeys(filter(None, folders)))
        with far, log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nixl_beside.agent", str(far.fileno())],
                env={**os.environ, **given, "PYTHONPATH": path},
                pass_fds=[far.fileno()],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, operation: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        """``waits_s``: how long the operation itself may. Raises AgentError."""
        self.begin(operation, *arguments)
        return self.answer(waits_s)

    def begin(self, operation: str, *arguments: Any) -> None:
        """`ask` without waiting for the answer."""
        self._operation = operation
        with suppress(OSError):  # that it has ended is told where the answer is wanted
            self._connection.send((operation, arguments))

    def answer(self, waits_s: float = 0.0) -> Any:
        """To what was begun. Raises AgentError."""
        operation = self._operation
        try:
            if not self._connection.poll(waits_s + _DEADLINE_S):
                raise AgentError(f"the {self._name} agent has not answered to {operation}")
            is_done, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise AgentError(f"the {self._name} agent has ended at {operation}") from error
        if not is_done:
            raise AgentError(f"the {self._name} agent failed at {operation}: {answer}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Returns after a SIGSTOP when all of its threads stand still: on a busy machine the signal
        came only after 64 MiB had been read."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """Kills it. Agents of NVIDIA's NIXL fault as their process ends by itself."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class AgentPair:
    """Two that know each other's memory: ``near`` has zeros and asks, ``far`` has ones."""

    near: AgentProcess
    far: AgentProcess

    def __init__(self, contender: str, nbytes: int, log: Path) -> None:
        """``log``: what both print is added there. Raises AgentError, contenders.Absent; then
        nothing is left behind."""
        given = environment(contender)
        with ExitStack() as stack:
            for name in ("near", "far"):
                process = AgentProcess(name, given, log)
                stack.callback(process.end)
                setattr(self, name, process)
            self.near.begin("open", "near", nbytes, 0)
            self.far.begin("open", "far", nbytes, 1)
            self.near.answer(_START_S)
            metadata, self.there = self.far.answer(_START_S)
            self.near.ask("add", metadata)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def rest(self) -> None:
        """Both stand still: NVIDIA's threads would take processor time from others."""
        self._signal(signal.SIGSTOP)

    @contextmanager
    def going_on(self) -> Iterator[Self]:
        """Not so meanwhile."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.rest()

    def _signal(self, number: signal.Signals) -> None:
        for process in (self.near, self.far):
            process.signal(number)
