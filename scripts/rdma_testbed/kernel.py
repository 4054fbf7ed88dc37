# SPDX-License-Identifier: Apache-2.0
"""The kernel: built once, kept as one file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rdma_testbed.errors import SetupError
from rdma_testbed.packages import ensure_files, ensure_programs, say

__all__ = ["cache_dir", "ensure_kernel", "kernel_path"]

CONFIG = Path(__file__).with_name("kernel.config")
BUILD = Path(__file__).with_name("build-kernel")

BUILD_PROGRAMS = {
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "xz": "xz-utils",
}
BUILD_FILES = {"/usr/include/stdio.h": "libc6-dev"}
BUILD_BYTES = 3 << 30
LOG_LINES = 15


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/sglang-mooncake/rdma-testbed``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "sglang-mooncake" / "rdma-testbed"


def kernel_path() -> Path:
    """Where the kernel of this configuration and build is kept."""
    key = hashlib.sha256(CONFIG.read_bytes() + BUILD.read_bytes())
    return cache_dir() / f"linux-{key.hexdigest()[:12]}"


def ensure_kernel() -> Path:
    """The kernel's path; the first caller builds it, others wait for that.

    Raises ``SetupError`` when it cannot be built.
    """
    kernel = kernel_path()
    if kernel.exists():
        return kernel
    kernel.parent.mkdir(parents=True, exist_ok=True)
    with _build_lock(kernel.parent / "build.lock"):
        if not kernel.exists():
            _build(kernel)
    return kernel


@contextmanager
def _build_lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process to build the kernel (lock: {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(kernel: Path) -> None:
    ensure_programs(BUILD_PROGRAMS, "building the kernel")
    ensure_files(BUILD_FILES, "building the kernel")
    disk = os.statvfs(kernel.parent)
    if disk.f_bavail * disk.f_frsize < BUILD_BYTES:
        raise SetupError(
            f"building the kernel needs {BUILD_BYTES >> 30} GiB free in {kernel.parent};"
            " free some or set XDG_CACHE_HOME"
        )
    log = kernel.with_suffix(".log")
    say(f"building the kernel, once, about six CPU-minutes (log: {log})")
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=kernel.parent, prefix="build.") as tree,
        log.open("wb") as output,
    ):
        done = subprocess.run(
            [BUILD, CONFIG, kernel],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise SetupError(f"the kernel was not built; {log} ends:\n{tail}")
    say(f"built {kernel} in {time.monotonic() - started:.0f} s")
