# SPDX-License-Identifier: Apache-2.0
"""Lanes side by side: the steps of each one after the other, each lane's output in one piece.

A step that fails stops nothing, so that one run shows all that is wrong; a step that others need
(``Step.is_needed``) leaves out the rest of its lane. When the run itself is stopped, its steps are
interrupted as by Ctrl-C, so that pytest and the emulated machines end what they have started, and
killed when they do not follow.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

__all__ = ["Lane", "Result", "Step", "run_lanes"]

#: How long a step may take to end after an interrupt, and after SIGTERM.
GRACE_S = 30.0
POLL_S = 0.1
#: Of a step that failed, to be told once more at the end of a run.
LAST_LINES = 40
LAST_BYTES = 8192

_printing = threading.Lock()


@dataclass(frozen=True)
class Step:
    """One command of a lane."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    #: Exit statuses that are no failure.
    good: frozenset[int] = frozenset({0})
    #: Whether the steps behind it in its lane cannot run if it fails.
    is_needed: bool = False


@dataclass(frozen=True)
class Lane:
    """Steps, one after the other."""

    name: str
    steps: Sequence[Step]


@dataclass(frozen=True)
class Result:
    """A step that has run, or was left out (``code`` is None)."""

    lane: str
    step: str
    code: int | None
    is_good: bool
    seconds: float = 0.0
    #: Of the process and of all that it waited for.
    cpu_s: float = 0.0
    #: The last lines that a step which failed has written.
    last_words: str = ""

    def sentence(self) -> str:
        """What became of it."""
        took = f"{self.seconds:.0f} s, {self.cpu_s:.0f} CPU-seconds"
        if self.code is None:
            return f"{self.step}: left out"
        if self.is_good:
            return f"{self.step}: ok after {took}"
        return f"{self.step}: FAILED with exit status {self.code} after {took}"


def run_lanes(lanes: Sequence[Lane], log_dir: Path, shared: Sequence[Step] = ()) -> list[Result]:
    """Runs all lanes at once, each with the log ``log_dir/NAME.log``, which is printed when the
    lane ends. Returns what became of the steps, lane by lane.

    ``shared``: steps for whichever lane is done with its own, in this order.

    SIGTERM and Ctrl-C end every lane, and are raised again as ``KeyboardInterrupt``.
    """
    ended: SimpleQueue[_Running] = SimpleQueue()
    left = deque(shared)
    running = [_Running(lane, log_dir / f"{lane.name}.log", ended, left) for lane in lanes]
    # A signal with a handler is at its default in what is started here; an ignored one, as Ctrl-C
    # in what a shell starts in the background, would be ignored there, too.
    caught = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _interrupt) for number in caught]
    unprinted = set(running)
    try:
        for one in running:
            one.thread.start()
        while unprinted:
            # A signal that came just before this thread began to wait, or to another one, does not
            # end a wait: its handler is called behind it.
            with suppress(Empty):
                one = ended.get(timeout=POLL_S)
                unprinted.remove(one)
                one.print_log()
    finally:
        for one in running:
            one.stop()
        for one in running:
            if one.thread.ident is not None:
                one.thread.join()
                if one in unprinted:  # How far it got, and what had failed.
                    one.print_log()
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)
    done = [result for one in running for result in one.results]
    return [*done, *(Result("any", step.name, None, is_good=False) for step in left)]


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


class _Running:
    """A lane in a thread of its own, which starts one process group after the other."""

    def __init__(
        self, lane: Lane, log: Path, ended: SimpleQueue[_Running], shared: deque[Step]
    ) -> None:
        self.lane = lane
        self.results: list[Result] = []
        self._log = log
        self._ended = ended
        self._shared = shared
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"lane {lane.name}")

    def stop(self) -> None:
        """Interrupts the step under way, and begins no other. Returns at once."""
        self._stopped.set()

    def print_log(self) -> None:
        """All that the lane's steps have written, then a line for each of them."""
        _say(f"lane {self.lane.name}: all of its output")
        with _printing, self._log.open("rb") as log:
            shutil.copyfileobj(log, sys.stdout.buffer)
            sys.stdout.flush()
        for result in self.results:
            _say(f"lane {self.lane.name}: {result.sentence()}")

    def _run(self) -> None:
        lost = False
        try:
            with self._log.open("w+b") as log:
                for step in self.lane.steps:
                    if lost or self._stopped.is_set():
                        self._tell(Result(self.lane.name, step.name, None, is_good=False))
                        continue
                    result = self._step(step, log)
                    self._tell(result)
                    lost = step.is_needed and not result.is_good
                while not (lost or self._stopped.is_set()) and (more := self._next_shared()):
                    self._tell(self._step(more, log))
        finally:
            self._ended.put(self)

    def _next_shared(self) -> Step | None:
        with suppress(IndexError):  # another lane may have taken the last one
            return self._shared.popleft()
        return None

    def _step(self, step: Step, log: IO[bytes]) -> Result:
        _say(f"lane {self.lane.name}: {step.name} ...")
        log.write(f"\n### {step.name}\n".encode())
        log.flush()
        start = log.tell()
        began_s = time.monotonic()
        try:
            process = subprocess.Popen(
                list(step.argv),
                env={**os.environ, **step.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            said = f"cannot be run: {error}\n"
            log.write(said.encode())
            return Result(self.lane.name, step.name, 127, is_good=False, last_words=said)
        code, cpu_s = self._wait(process)
        seconds = time.monotonic() - began_s
        is_good = code in step.good
        said = "" if is_good else _last_lines(log, start)
        return Result(self.lane.name, step.name, code, is_good, seconds, cpu_s, said)

    def _wait(self, process: subprocess.Popen[bytes]) -> tuple[int, float]:
        """The exit status, as a shell would tell it, and the CPU time of all that it waited for."""
        signals = iter((signal.SIGINT, signal.SIGTERM, signal.SIGKILL))
        due_s = 0.0
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if self._stopped.is_set() and time.monotonic() >= due_s:
                os.killpg(process.pid, next(signals, signal.SIGKILL))
                due_s = time.monotonic() + GRACE_S
            time.sleep(POLL_S)
        code = os.waitstatus_to_exitcode(status)
        process.returncode = code  # so that Popen does not wait again
        with suppress(ProcessLookupError):  # what the step left behind in its group
            os.killpg(process.pid, signal.SIGKILL)
        return (128 - code if code < 0 else code), used.ru_utime + used.ru_stime

    def _tell(self, result: Result) -> None:
        self.results.append(result)
        _say(f"lane {self.lane.name}: {result.sentence()}")


def _last_lines(log: IO[bytes], start: int) -> str:
    """Of what stands in a log from ``start`` on."""
    log.seek(max(start, log.seek(0, os.SEEK_END) - LAST_BYTES))
    lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])


def _say(line: str) -> None:
    with _printing:
        print(f"test: {line}", flush=True)
