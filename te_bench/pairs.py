# SPDX-License-Identifier: Apache-2.0
"""The two processes of a contender: started, asked with deadlines, ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import msgspec

from te_bench.protocol import Channel, ChannelClosed, Info, Op, Reply, Request, Setup, Timing
from te_bench.report import Sample

__all__ = ["ContenderAbsent", "ContenderFailed", "Pair", "Solo"]

STDERR_TAIL_BYTES = 400
# -P: the directory that te bench was started in must not be able to shadow a module. This
# checkout is put last, so that a peer's interpreter uses its own numpy, and its own te if any.
BOOTSTRAP = "import sys; sys.path.append(sys.argv.pop(1)); import runpy; \
runpy.run_module('te_bench.worker', run_name='__main__', alter_sys=True)"


class ContenderAbsent(Exception):
    """What the contender needs is not installed; the message says what."""


class ContenderFailed(Exception):
    """The contender could not do its part; the message is the reason."""


class _Process:
    """One worker. Every answer has a deadline."""

    def __init__(self, python: str, setup: Setup) -> None:
        self._setup = setup
        self._op: Op = "open"
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        near, far = socket.socketpair()
        root = str(Path(__file__).parents[1])
        try:
            self._process = subprocess.Popen(
                [python, "-P", "-c", BOOTSTRAP, root, str(far.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[far.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            near.close()
            self._stderr.close()
            raise ContenderAbsent(f"{python} cannot be started: {error.strerror}") from error
        finally:
            far.close()
        self._channel = Channel(near)

    def post(self, op: Op, **fields: Any) -> None:
        """Begins a step."""
        self._op = op
        with contextlib.suppress(ChannelClosed):  # its end shows when the answer is read
            self._channel.send(Request(op=op, **fields))

    def answer(self) -> Any:
        """The answer to the step begun last."""
        who = f"the {self._setup.role}'s {self._op}"
        try:
            reply = self._channel.receive(Reply, self._setup.deadline_s)
        except TimeoutError:
            raise ContenderFailed(f"{who} took more than {self._setup.deadline_s:g} s") from None
        except ChannelClosed:
            raise ContenderFailed(f"{who}: the process {self._how_it_ended()}") from None
        except msgspec.DecodeError as error:
            raise ContenderFailed(f"{who} answered nonsense: {error}") from error
        if reply.absent is not None:
            raise ContenderAbsent(reply.absent)
        if reply.failed is not None:
            raise ContenderFailed(f"{who}: {reply.failed}")
        return reply.ok

    def ask(self, op: Op, **fields: Any) -> Any:
        """A step and its answer."""
        self.post(op, **fields)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Sends it to the process, if that still is."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Ends the process and whatever it started. Idempotent."""
        self._channel.close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stderr.close()

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "hung up"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL_BYTES))
        words = self._stderr.read().decode(errors="replace").split()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{how}; its last words: {' '.join(words)}" if words else how


class Pair:
    """A source and a destination, connected; ``round`` as often as wanted. A context manager."""

    def __init__(self, python: str, source: Setup, destination: Setup) -> None:
        """Raises ``ContenderAbsent`` or ``ContenderFailed``; then nothing is left behind."""
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._source = _Process(python, source)
            self._stack.callback(self._source.close)
            self._destination = _Process(python, destination)
            self._stack.callback(self._destination.close)
            self._destination.post("open", setup=destination)
            self._source.post("open", setup=source)
            there: Info = self._destination.answer()
            here: Info = self._source.answer()
            opened: Info = self._source.ask("connect", info=there)
            self._destination.ask("accept", info=opened)
            self._stack = self._stack.pop_all()
        self._spins_idle: bool = here["spins_idle"]
        self._pause()
        self.version: str = here["version"]
        #: Connections of the source to the destination; 1 where that means nothing.
        self.rails: int = opened.get("rails", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends both processes. Idempotent."""
        self._stack.close()

    def round(self, seed: int, *, busy: bool) -> Sample:
        """New contents, one hand-over, a look at every byte."""
        self._resume()
        try:
            return self._round(seed, busy=busy)
        finally:
            self._pause()

    def _pause(self) -> None:
        if self._spins_idle:
            for process in (self._source, self._destination):
                process.signal(signal.SIGSTOP)

    def _resume(self) -> None:
        if self._spins_idle:
            for process in (self._source, self._destination):
                process.signal(signal.SIGCONT)

    def _round(self, seed: int, *, busy: bool) -> Sample:
        both = (self._source, self._destination)
        self._source.ask("fill", seed=seed)
        for process in both:
            process.ask("begin", busy=busy)
        self._destination.post("receive")
        timing = msgspec.convert(self._source.ask("transfer"), Timing)
        self._destination.answer()
        cpu_s = sum(process.ask("end") for process in both)
        return _sample(timing, cpu_s, self._destination.ask("check", seed=seed))


class Solo(Pair):
    """The same of a contender that is one process, and its own destination."""

    def __init__(self, python: str, setup: Setup) -> None:
        """Raises ``ContenderAbsent`` or ``ContenderFailed``; then nothing is left behind."""
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._source = self._destination = _Process(python, setup)
            self._stack.callback(self._source.close)
            opened: Info = self._source.ask("open", setup=setup)
            self._source.ask("connect", info=opened)
            self._stack = self._stack.pop_all()
        self._spins_idle = False
        self.version = opened["version"]
        self.rails = 1

    def _round(self, seed: int, *, busy: bool) -> Sample:
        only = self._source
        only.ask("fill", seed=seed)
        only.ask("begin", busy=busy)
        timing = msgspec.convert(only.ask("transfer"), Timing)
        cpu_s = only.ask("end")
        return _sample(timing, cpu_s, only.ask("check", seed=seed))


def _sample(timing: Timing, cpu_s: float, landing: Info) -> Sample:
    return Sample(
        elapsed_ns=timing.elapsed_ns,
        ops_ns=timing.ops_ns,
        submit_ns=timing.submit_ns,
        late_ns=timing.late_ns,
        cpu_s=cpu_s,
        wrong_blocks=landing["wrong_blocks"],
        stray_slots=landing["stray_slots"],
    )
