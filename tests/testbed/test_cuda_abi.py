# SPDX-License-Identifier: Apache-2.0
"""What the tests' stand-in for CUDA's driver declares, against NVIDIA's cuda.h, by the compiler."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from te_cuda import SOURCES

pytestmark = pytest.mark.testbed

ROOT = Path(__file__).parents[2]
#: Of the package index, a few MB each: the headers of two major versions.
WHEELS = ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cuda-runtime==13.0.96")
NEWEST = WHEELS[-1]
CC = ("cc", "-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")


def headers(wheel: str) -> Path:
    """The directory with cuda.h; the wheel is unpacked, not installed."""
    directory = ROOT / "build" / "cuda-headers" / wheel
    found = list(directory.rglob("cuda.h"))
    if not found:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "-d", str(directory), wheel], check=True)
        for one in directory.glob("*.whl"):
            with zipfile.ZipFile(one) as archive:
                archive.extractall(directory)
            one.unlink()
        found = list(directory.rglob("cuda.h"))
    return found[0].parent


def compiled(source: Path, include: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CC, *options, "-I", str(include), "-I", str(SOURCES), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.c")), ids=lambda one: one.name)
def test_the_stand_in_has_the_interface_of_cuda(source: Path) -> None:
    """Each function by its versioned name, and the constants and structs: with NVIDIA's own."""
    options = ("-DAGAINST_NVIDIA", "-Wmissing-prototypes")
    done = compiled(source, headers(NEWEST), *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("cuMemFree_v2(CUdeviceptr address)", "cuMemFree_v2(unsigned address)"),
        ("cuMemFreeHost(void *memory)", "cuMemFreeHostMemory(void *memory)"),
    ],
)
def test_a_wrong_function_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    text = (SOURCES / "memory.c").read_text()
    assert right in text
    changed = tmp_path / "memory.c"
    changed.write_text(text.replace(right, wrong))
    done = compiled(changed, headers(NEWEST), "-DAGAINST_NVIDIA", "-Wmissing-prototypes")
    assert done.returncode != 0
