# SPDX-License-Identifier: Apache-2.0
"""Servers whose KV pools a driver without a GPU reports as CUDA memory (`shim/cpu_cuda.py`): the
driver's build, its settings, and what it has counted."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from cpu_serving.processes import ServingError

__all__ = ["NAME", "SOURCES", "CudaCounts", "PretendedCuda", "build_driver", "read_cuda_counts"]

# As in shim/cpu_cuda.py.
VARIABLE = "CPU_SERVING_CUDA"
SOURCES = Path(__file__).parents[2] / "te" / "cuda_driver"
NAME = "libcuda.so.1"
# The files are rewritten five times a second.
FRESH_TIMEOUT_S = 10.0
POLL_S = 0.05


def build_driver(folder: Path) -> Path:
    """Compiles the stand-in for CUDA's driver; its path. Whoever loads it has it under the name of
    the real one: never in a process that has that."""
    library = folder / NAME
    flags = shlex.split(os.environ.get("CFLAGS", ""))  # of a sanitizer's build
    command = ["cc", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    name = [f"-Wl,-soname,{NAME}", "-pthread", "-o", str(library)]
    subprocess.run([*command, *name, *sorted(map(str, SOURCES.glob("*.c")))], check=True)
    return library


@dataclass(frozen=True)
class PretendedCuda:
    """The driver of one pair.

    library: what `build_driver` has made.
    delay_us: a copy waits for up to that when it begins, and again before it counts as over.
    """

    library: Path
    delay_us: int = 500
    seed: int = 0

    def environment(self, folder: Path) -> dict[str, str]:
        """Of a server; `folder` is for `read_cuda_counts`."""
        settings = {
            "library": str(self.library),
            "delay_us": self.delay_us,
            "seed": self.seed,
            "folder": str(folder),
        }
        return {VARIABLE: json.dumps(settings)}


@dataclass(frozen=True)
class CudaCounts:
    """What the drivers of all ranks of a server saw since the ranks had registered their memory.

    batches: of copies.
    pageable_copies: to or from host memory that is not pinned.
    synchronising_calls: that may wait for the device, by SGLang's scheduler threads.
    """

    batches: int
    pageable_copies: int
    synchronising_calls: int

    def good(self, is_staged: bool) -> bool:
        """Whether memory was staged, if it is to be, and by calls that wait for nothing."""
        waits = self.pageable_copies + self.synchronising_calls
        return (self.batches > 0) is is_staged and waits == 0


def read_cuda_counts(folder: Path, ranks: int, since: float) -> CudaCounts:
    """The sums over the ranks of one server, which write to the directory all the time, as they
    were after the wall-clock time `since`; ServingError when a rank writes nothing."""
    deadline = time.monotonic() + FRESH_TIMEOUT_S
    while True:
        files = [path for path in folder.glob("*.cuda") if path.stat().st_mtime > since]
        if len(files) == ranks:
            break
        if time.monotonic() > deadline:
            raise ServingError(
                f"{len(files)} of {ranks} ranks count CUDA calls in {folder}: the pools are not"
                " said to be CUDA memory"
            )
        time.sleep(POLL_S)
    found = [json.loads(path.read_text()) for path in files]
    return CudaCounts(**{name: sum(one[name] for one in found) for name in found[0]})
