# SPDX-License-Identifier: Apache-2.0
"""What te is built and run with, and how to get what a machine lacks."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

__all__ = ["gpu_problem", "missing"]

#: Module → what pip calls it, and the version it must have.
MODULES: Final = {
    "numpy": ("numpy", (1, 26)),
    "msgspec": ("msgspec", (0, 19)),
    "setuptools": ("setuptools", (61,)),
    "Cython": ("Cython", (3, 1)),
}
TO_RUN: Final = ("numpy", "msgspec")
FIND: Final = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.import_module(name).__version__
    except ImportError:
        found[name] = None
print(json.dumps(found))
"""


LOOK_TIMEOUT_S: Final = 60.0
#: In a process of its own: a driver may hang, or end it.
LOOK: Final = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
result = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
if result or not count.value:
    raise SystemExit(f"cuInit gives CUDA error {result}" if result else "the driver finds none")
"""


def gpu_problem(python: str) -> str:
    """Why there is no GPU that can be used; empty if there is one."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", LOOK],
            capture_output=True,
            text=True,
            check=False,
            timeout=LOOK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"CUDA's driver did not start within {LOOK_TIMEOUT_S:.0f} s"
    said = done.stderr.strip().splitlines()
    if done.returncode == 0:
        return ""
    return f"there is no GPU that can be used: {said[-1] if said else f'status {done.returncode}'}"


def missing(python: str, *, is_built: bool) -> list[str]:
    """A sentence for each thing that is not there, with what to do; `is_built`: te need not be."""
    names = TO_RUN if is_built else tuple(MODULES)
    done = subprocess.run(
        [python, "-P", "-c", FIND, *names], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return [f"{python} cannot be run: {done.stderr.strip()[-300:]}"]
    versions = json.loads(done.stdout)
    wanted = [_wanted(name) for name in names if not _is_enough(name, versions[name])]
    said = []
    if wanted:
        quoted = shlex.join(wanted)
        said.append(
            f"Python packages: {python} has no {', '.join(wanted)}. With a network: {python} -m pip"
            f" install {quoted}. Without one, on a machine like this that has"
            f" one: python3 -m pip download --only-binary=:all: -d wheels {quoted}; bring"
            f" the directory here, then: {python} -m pip install --no-index --find-links wheels"
            f" --target FOLDER {quoted}, and run this with PYTHONPATH=FOLDER"
        )
    if not is_built:
        said += _missing_of_compiler()
    return said


def _missing_of_compiler() -> list[str]:
    said = []
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        said.append("a C compiler: apt-get install gcc, or dnf install gcc")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        said.append(f"{header}: apt-get install python3-dev, or dnf install python3-devel")
    return said


def _wanted(name: str) -> str:
    package, version = MODULES[name]
    return f"{package}>={'.'.join(map(str, version))}"


def _is_enough(name: str, version: str | None) -> bool:
    if version is None:
        return False
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return tuple(numbers) >= MODULES[name][1]
