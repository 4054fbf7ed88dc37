# SPDX-License-Identifier: Apache-2.0
"""How many calls to the kernel threads of this process make: ``strace`` looks at them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from te_bench.contenders.floor import PR_SET_PTRACER

__all__ = ["CountError", "Counted", "counted"]

TIMEOUT_S: Final = 10.0
_CALL: Final = re.compile(r"(\d+) +\w+\(")


class CountError(Exception):
    """Nothing was counted; the message says why."""


@dataclass
class Counted:
    """Filled at the end of the block."""

    #: Of all threads asked about.
    calls: int = 0


@contextlib.contextmanager
def counted(threads: Sequence[int]) -> Iterator[Counted]:
    """Counts what the threads, by their numbers for the kernel, call within the block.

    Everything is much slower meanwhile. Raises ``CountError``.
    """
    if shutil.which("strace") is None:
        raise CountError("strace is not installed")
    # strace will be a child of this process.
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, os.getpid(), 0, 0, 0)
    found = Counted()
    with tempfile.TemporaryDirectory(prefix="te-bench-") as directory:
        log = Path(directory) / "calls"
        with subprocess.Popen(
            ["strace", "-f", "-p", str(os.getpid()), "-o", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as strace:
            try:
                _await_attached(strace, threads)
                yield found
            finally:
                strace.send_signal(signal.SIGINT)  # It lets go of the threads, and ends.
                try:
                    strace.wait(TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    strace.kill()
        found.calls = _calls(log.read_text(errors="replace"), threads)


def _await_attached(strace: subprocess.Popen[bytes], threads: Sequence[int]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(_is_traced(thread, strace.pid) for thread in threads):
        if strace.poll() is not None:
            raise CountError("strace may not look at this process")
        if time.monotonic() > deadline_s:
            raise CountError(f"strace did not begin within {TIMEOUT_S:g} s")
        time.sleep(0.005)


def _is_traced(thread: int, tracer: int) -> bool:
    return f"TracerPid:\t{tracer}\n" in Path(f"/proc/self/task/{thread}/status").read_text()


def _calls(log: str, threads: Sequence[int]) -> int:
    """Lines that begin a call: ``NUMBER name(``; one that was interrupted is resumed in another."""
    begun = [_CALL.match(line) for line in log.splitlines()]
    return sum(int(one[1]) in threads for one in begun if one is not None)
