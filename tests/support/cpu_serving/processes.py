# SPDX-License-Identifier: Apache-2.0
"""A process in its own group with a log file: start it, see whether it runs, end all of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from cpu_serving.nursery import ForkedProcess, Nursery

__all__ = ["ManagedProcess", "ServingError", "leaves", "signals_deferred"]

TAIL_LINES = 60
TERM_GRACE_S = 10.0


class ServingError(Exception):
    """A server did not start, died or did not answer; the message says which and shows its log."""


def leaves(errors: BaseExceptionGroup[ServingError]) -> list[ServingError]:
    """The errors in a group, which may be groups themselves."""
    found: list[ServingError] = []
    for error in errors.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


class ManagedProcess:
    """One child in its own session, so that ending its group ends its workers and nothing else."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        nursery: Nursery | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        """Starts ``python -m argv[0] argv[1:]``, forked from the nursery if it fits there."""
        self.name = name
        self.log = log
        if nursery is not None and nursery.fits(env):
            self._popen: subprocess.Popen[bytes] | ForkedProcess = nursery.start(
                argv[0], argv[1:], env, log
            )
            return
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                [python, "-m", *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its group."""
        return self._popen.pid

    def wait(self, timeout_s: float) -> int:
        """The exit status of a process that is expected to end by itself."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServingError(f"the {self.name} runs on after {timeout_s:.0f} s") from None

    def alive(self) -> bool:
        return self._popen.poll() is None

    def check_alive(self) -> None:
        code = self._popen.poll()
        if code is not None:
            raise ServingError(f"the {self.name} ended early with code {code}\n{self.tail()}")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        lines = self.log_text().splitlines()[-TAIL_LINES:]
        return "\n".join([f"--- last lines of {self.log} ---", *lines, "---"])

    def kill(self) -> None:
        """SIGKILL to the whole group, as a crash would be; returns when all of it is gone."""
        self._signal_group(signal.SIGKILL)
        self._popen.wait()
        self._wait_group_gone(TERM_GRACE_S)

    def freeze(self) -> None:
        """SIGSTOP to the whole group: its connections stay open, and nobody answers."""
        self._signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        """Ends `freeze`."""
        self._signal_group(signal.SIGCONT)

    def ask_to_end(self) -> None:
        """SIGTERM to the leader alone.

        An SGLang server whose workers die with it takes that for a crash and spends 5 s on
        diagnostics.
        """
        if self.alive():
            self._popen.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End all of the group, gently first. Stopping twice does nothing."""
        self.ask_to_end()
        if not self._wait_group_gone(TERM_GRACE_S):
            self._signal_group(signal.SIGKILL)
            self._wait_group_gone(TERM_GRACE_S)
        self._popen.wait(TERM_GRACE_S)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._members():
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return  # the last member ended in between

    def _wait_group_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._members():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _members(self) -> list[int]:
        self._popen.poll()  # reaps the leader, which as a zombie would still count
        return [pid for pid, group in _live_processes() if group == self.pid]


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM while processes are started or ended, so that none is forgotten.

    The handlers are replaced rather than the signals masked: children would inherit a mask.
    """
    caught: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        caught.append(number)

    held = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, remember) for number in held]
    try:
        yield
    finally:
        for number, handler in zip(held, before, strict=True):
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    # Even when this harness is killed no server is left behind: SGLang's leader ends its workers.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _live_processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue  # it ended since the directory was read
        # The name in parentheses may hold anything; behind it come state, parent and group.
        state, _parent, group = text.rpartition(")")[2].split()[:3]
        if state != "Z":
            yield int(entry.name), int(group)
