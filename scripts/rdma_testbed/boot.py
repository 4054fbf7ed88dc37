# SPDX-License-Identifier: Apache-2.0
"""The kernel as a child process: its memory, its two terminals, its end."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from rdma_testbed.errors import SetupError
from rdma_testbed.packages import say

__all__ = ["KERNEL_FAILED", "TIMED_OUT", "allow_many_mappings", "boot", "memory_dir"]

TIMED_OUT = 124
KERNEL_FAILED = 125

MAPPINGS = 1 << 22
MAPPINGS_FILE = Path("/proc/sys/vm/max_map_count")
SHARED_MEMORY = Path("/dev/shm")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def allow_many_mappings() -> None:
    """Raises the host's limit of mappings per process, or warns.

    Each page of the guest may be a mapping of its own on the host; a guest process past the limit
    dies of SIGSEGV.
    """
    if int(MAPPINGS_FILE.read_text()) >= MAPPINGS:
        return
    try:
        MAPPINGS_FILE.write_text(str(MAPPINGS))
    except OSError:
        say(
            f"cannot raise {MAPPINGS_FILE}: processes beyond about 250 MB may crash inside;"
            f" as root: sysctl vm.max_map_count={MAPPINGS}"
        )


def memory_dir(nbytes: int) -> Path:
    """A directory for the guest's memory, which is a file: /dev/shm, else the temporary one."""
    candidates = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    for path in candidates:
        if path.is_dir():
            status = os.statvfs(path)
            if status.f_bavail * status.f_frsize >= nbytes:
                return path
    names = " and ".join(str(path) for path in candidates)
    raise SetupError(
        f"{nbytes >> 30} GiB for the guest's memory are free neither in {names};"
        " ask for less with --memory"
    )


def boot(
    kernel: Path, files: Path, memory_gib: int, timeout_s: float, processor: int
) -> int | None:
    """Runs the kernel on one processor until it ends, copying its terminals to stdout and stderr.

    Returns ``TIMED_OUT`` when it had to be killed after ``timeout_s`` (0: no limit), else None: the
    guest says how its command ended. What the kernel itself prints goes to ``files/console``.
    """
    outputs: dict[int, int] = {}
    terminals: list[str] = []
    write_ends = []
    for number in (1, 2):
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        outputs[read_end] = number
        write_ends.append(write_end)
        terminals.append(f"con{number}=null,fd:{write_end}")
    child = _start(kernel, files, memory_gib, terminals, write_ends, processor)
    for descriptor in write_ends:
        os.close(descriptor)
    try:
        if _copy_until_end(child, outputs, timeout_s):
            return None
        say(f"killed after {timeout_s:g} s")
        return TIMED_OUT
    finally:
        _end_group(child)


def _start(
    kernel: Path,
    files: Path,
    memory_gib: int,
    terminals: list[str],
    pass_fds: list[int],
    processor: int,
) -> subprocess.Popen[bytes]:
    arguments = [
        str(kernel),
        f"mem={memory_gib}G",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        f"init={files}/init",
        f"uml_dir={files}",
        "quiet",
        "con=null",
        *terminals,
    ]
    with (files / "console").open("wb") as console:
        return subprocess.Popen(
            arguments,
            env={**os.environ, "TMPDIR": str(memory_dir(memory_gib << 30))},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=partial(_in_child, processor),
        )


def _in_child(processor: int) -> None:
    # The kernel's processes do the same to their own parent: nothing is left behind.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, {processor})


def _copy_until_end(
    child: subprocess.Popen[bytes], outputs: dict[int, int], timeout_s: float
) -> bool:
    """Whether the kernel ended by itself, all its output copied."""
    deadline = time.monotonic() + timeout_s if timeout_s else float("inf")
    ended = False
    while outputs:
        ready = select.select(list(outputs), [], [], 0.05)[0]
        for descriptor in ready:
            data = os.read(descriptor, 65536)
            if not data:
                del outputs[descriptor]
            while data:
                data = data[os.write(outputs[descriptor], data) :]
        if not ready:
            if ended:
                break
            ended = child.poll() is not None
        if time.monotonic() > deadline:
            return False
    return True


def _end_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # it ended by itself, with all that it had started
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
