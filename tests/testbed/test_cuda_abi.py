# SPDX-License-Identifier: Apache-2.0
"""What te and the tests' stand-in declare of CUDA's driver, against NVIDIA's headers, by the
compiler."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from te_cuda import SOURCES

from te_bench.gpu import PROTOTYPES

pytestmark = pytest.mark.testbed

ROOT = Path(__file__).parents[2]
ABI = ROOT / "te" / "memory_kinds" / "cuda" / "abi.h"
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


def checks(abi: str, newest: int) -> list[str]:
    """What must hold of te's declarations, in C, where the headers are of CUDA ``newest``."""
    plain = re.sub(r"/\*.*?\*/", "", abi, flags=re.DOTALL).replace("\\\n", "\n")
    found = [
        f"{name} == {value}" for name, value in re.findall(r"^    (CU\w+) = (\d+),", plain, re.M)
    ]
    enums, structs = re.findall(r"typedef unsigned ([\w, ]+);", plain), ("CUmemcpyAttributes",)
    found += [f"sizeof({name}) == sizeof(unsigned)" for name in enums[0].split(", ")]
    found += ["sizeof(CUdevice) == sizeof(int)", "sizeof(CUdeviceptr) == 8"]
    for name in structs:
        found.append(f"sizeof({name}) == sizeof(Te{name})")
        for field in ("srcAccessOrder", "srcLocHint", "dstLocHint", "flags"):
            found.append(f"offsetof({name}, {field}) == offsetof(Te{name}, {field})")
    needed = re.findall(r"NEED\((\w+), (\d+),\s*(\([^()]*\))\)", plain)
    optional = re.findall(r"MAY\(\w+, (\w+), (\d+),\s*(\([^()]*\))\)", plain)
    for name, version, parameters in (*needed, *optional):
        if int(version) <= newest:
            ours = f"CUresult (*) {' '.join(parameters.split())}"
            found.append(f"__builtin_types_compatible_p({ours}, PFN_{name}_v{version})")
    return found


def compiled_checks(abi: str, wheel: str, directory: Path) -> subprocess.CompletedProcess[str]:
    newest = 12090 if "cu12" in wheel else 13000
    struct = re.search(
        r"typedef struct \{\s+unsigned srcAccessOrder.*?\} CUmemcpyAttributes;", abi, re.S
    )
    assert struct is not None
    source = directory / "checks.c"
    lines = ["#include <stddef.h>", "#include <cudaTypedefs.h>"]
    lines += [struct[0].replace("} CUmemcpyAttributes", "} TeCUmemcpyAttributes")]
    lines += [f'_Static_assert({one}, "{one}");' for one in checks(abi, newest)]
    source.write_text("\n".join(lines) + "\n")
    return compiled(source, headers(wheel))


@pytest.mark.parametrize("wheel", WHEELS)
def test_te_declares_what_the_headers_do(wheel: str, tmp_path: Path) -> None:
    """Each function in the version that is asked for by its number."""
    abi = ABI.read_text()
    found = "\n".join(checks(abi, 13000))
    for part in (
        "PFN_cuMemcpyBatchAsync_v13000)",
        "PFN_cuMemcpyAsync_v4000)",
        "CUDA_ERROR_NOT_READY",
    ):
        assert part in found
    assert found.count("PFN_") == len(re.findall(r"\b(?:NEED|MAY)\(cu", abi))
    done = compiled_checks(abi, wheel, tmp_path)
    assert done.returncode == 0, done.stderr


def same_prototypes(prototypes: str, directory: Path) -> subprocess.CompletedProcess[str]:
    source = directory / "prototypes.c"
    lines = ["#define __CUDA_API_VERSION_INTERNAL", "#include <cuda.h>"]
    for one in filter(None, prototypes.split("\n")):
        name, _, parameters = one.partition("(")
        same = f"__builtin_types_compatible_p(__typeof__({name}), CUresult({parameters})"
        lines.append(f'_Static_assert({same}, "{one}");')
    source.write_text("\n".join(lines) + "\n")
    return compiled(source, headers(NEWEST))


def test_te_bench_calls_what_the_headers_declare(tmp_path: Path) -> None:
    done = same_prototypes(PROTOTYPES, tmp_path)
    assert done.returncode == 0, done.stderr
    wrong = PROTOTYPES.replace("cuMemFree_v2(CUdeviceptr)", "cuMemFree_v2(unsigned)")
    assert wrong != PROTOTYPES
    assert same_prototypes(wrong, tmp_path).returncode != 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("CUDA_ERROR_NOT_READY = 600", "CUDA_ERROR_NOT_READY = 601"),
        ("CUmemLocation srcLocHint, dstLocHint;", "CUmemLocation dstLocHint, srcLocHint;"),
        (
            "(CUdeviceptr, CUdeviceptr, size_t, CUstream)",
            "(CUdeviceptr, CUdeviceptr, unsigned, CUstream)",
        ),
        ("NEED(cuMemHostRegister, 6050", "NEED(cuMemHostRegister, 4000"),
    ],
)
def test_a_wrong_declaration_is_found(tmp_path: Path, right: str, wrong: str) -> None:
    abi = ABI.read_text()
    assert right in abi
    changed = abi.replace(right, wrong)
    assert compiled_checks(changed, NEWEST, tmp_path).returncode != 0
