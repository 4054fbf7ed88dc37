# SPDX-License-Identifier: Apache-2.0
"""A library that says of some host memory that it is a GPU's, under the name of CUDA's own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FakeCuda", "fake_cuda"]

SOURCE = r"""
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
uint64_t owned_start, owned_end, exported_start, exported_nbytes;
int refusal;
int cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
    if (address < owned_start || address >= owned_end) return 1;
    if (attribute != 2 && attribute != 9) return 1;
    *(unsigned *)data = attribute == 2 ? 2 : 5;
    return 0;
}
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal != 5) return 101;
    *device = 50;
    return 0;
}
int cuDeviceGetPCIBusId(char *text, int nbytes, int device) {
    return device != 50 || snprintf(text, nbytes, "0000:3B:00.0") >= nbytes;
}
int cuMemGetHandleForAddressRange(
    void *handle, uint64_t address, uint64_t nbytes, int kind, unsigned long long flags) {
    if (kind != 1 || flags || address % 4096 || nbytes % 4096) return 1;
    if (refusal) return refusal;
    exported_start = address;
    exported_nbytes = nbytes;
    return (*(int *)handle = memfd_create("gpu", 0)) < 0;
}
"""


@dataclass(frozen=True)
class FakeCuda:
    """The loaded library."""

    library: ctypes.CDLL

    def exported(self) -> tuple[int, int]:
        """The range of the last dma-buf: address, bytes."""
        start = ctypes.c_uint64.in_dll(self.library, "exported_start")
        nbytes = ctypes.c_uint64.in_dll(self.library, "exported_nbytes")
        return start.value, nbytes.value


@cache
def _load() -> ctypes.CDLL:
    """Stays loaded for good, as CUDA's does; without memory of its own it says no to everything."""
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        subprocess.run([*command, "-x", "c", "-"], input=SOURCE.encode(), check=True)
        return ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL)


@contextlib.contextmanager
def fake_cuda(address: int, nbytes: int, refusal: int = 0) -> Iterator[FakeCuda]:
    """The range is a GPU's for as long as this lasts; ``refusal``: the CUDA error that exporting it
    gives."""
    library = _load()
    values = {"owned_start": address, "owned_end": address + nbytes}
    for name, value in values.items():
        ctypes.c_uint64.in_dll(library, name).value = value
    ctypes.c_int.in_dll(library, "refusal").value = refusal
    try:
        yield FakeCuda(library)
    finally:
        ctypes.c_uint64.in_dll(library, "owned_end").value = 0
