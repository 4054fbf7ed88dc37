# SPDX-License-Identifier: Apache-2.0
"""One step in a process group of its own, which is ended at its deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from gpu_check.report import Result
from gpu_check.steps import Step

__all__ = ["Settings", "run_step"]

CODE: Final = "from gpu_check.child import main; main()"
TAIL_BYTES: Final = 600
#: Until a process that was killed is gone; who waits inside of a driver may never be.
KILL_WAIT_S: Final = 20.0


@dataclass(frozen=True)
class Settings:
    """For every step.

    te: the directory in which te and its compiled parts are.
    scale: of the work, 1 on a machine with a GPU; tests of the steps have less.
    """

    python: str
    te: Path
    scale: float
    peers: str
    peers_python: str


def run_step(step: Step, settings: Settings, limit_s: float) -> Result:
    """Returns when the step has ended by itself, or was ended: at its own deadline, or after
    `limit_s`. Nothing that it started is left."""
    deadline_s = min(step.deadline_s, limit_s)
    begun_s = time.monotonic()
    reader, writer = os.pipe()
    request = {
        "function": step.function,
        "arguments": step.arguments,
        "python": settings.python,
        "scale": settings.scale,
        "peers": settings.peers,
        "peers_python": settings.peers_python,
        "deadline_s": deadline_s,
    }
    paths = [str(settings.te), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryFile() as said, open(reader, "rb") as answers:  # noqa: PTH123
        process = subprocess.Popen(
            [settings.python, "-P", "-c", CODE, str(writer), json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            pass_fds=[writer],
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        os.close(writer)
        try:
            doing, end = _listen(answers, begun_s + deadline_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = _wait(process)
        elapsed_s = time.monotonic() - begun_s
        if end is not None:
            return Result(step, elapsed_s=elapsed_s, **end)
        if status is None:
            reason = f"its process {process.pid} cannot be killed; it was {doing}"
            return Result(step, "hung", reason, elapsed_s)
        if elapsed_s >= deadline_s:
            reason = f"ended after {deadline_s:.0f} s; it was {doing}"
            return Result(step, "hung", reason, elapsed_s)
        reason = f"its process {_how_it_ended(status, said)}; it was {doing}"
        return Result(step, "failed", reason, elapsed_s)


def _listen(answers: IO[bytes], until_s: float) -> tuple[str, dict[str, Any] | None]:
    """What the step was doing last, and its end, if it told it in time."""
    doing, buffer = "starting", b""
    while (left_s := until_s - time.monotonic()) > 0:
        if not select.select([answers], [], [], left_s)[0]:
            break
        data = os.read(answers.fileno(), 1 << 16)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for text in lines:
            told = json.loads(text)
            if "end" in told:
                return doing, told["end"]
            doing = told["doing"]
    return doing, None


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """Its status; None if it does not end."""
    try:
        return process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        return None


def _how_it_ended(status: int, said: IO[bytes]) -> str:
    """The group was killed, but the process may have ended by itself before."""
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - TAIL_BYTES))
    words = " ".join(said.read().decode(errors="replace").split())
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"{how}, with the last words: {words}" if words else how
