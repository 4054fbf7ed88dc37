# SPDX-License-Identifier: Apache-2.0
"""A Python in which the stand-in for CUDA's driver (te_cuda.py) is loaded from the start: an
interpreter for programs that start processes with memory of GPUs. Run as ``te_gpu_python.py LIBRARY
-P -c CODE ARGUMENTS...``, which the script that ``gpu_python`` makes does."""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from pathlib import Path

__all__ = ["gpu_python"]

DELAY_US = 20
NEWEST = 13000


def gpu_python(folder: Path, library: Path, *, modules: Path | None = None) -> Path:
    """The interpreter. ``modules``: a directory of those that it finds besides."""
    script = folder / "python"
    command = [sys.executable, str(Path(__file__)), str(library), str(modules or "")]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)
    return script


def _main(library: str, modules: str, arguments: list[str]) -> None:
    driver = ctypes.CDLL(library, mode=os.RTLD_GLOBAL)
    driver.fake_reset(ctypes.c_uint64(1), ctypes.c_uint64(DELAY_US), NEWEST)
    assert arguments[:2] == ["-P", "-c"], arguments
    sys.argv = ["-c", *arguments[3:]]
    sys.path[:1] = [modules] if modules else []  # -P: not the directory of the program
    exec(compile(arguments[2], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3:])
