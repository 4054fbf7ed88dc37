# SPDX-License-Identifier: Apache-2.0
"""Memory that no load and no system call can touch, as GPU memory, without a GPU.

What forgets to stage it faults (SIGSEGV, or EFAULT from the kernel); what does not wait for a copy
sees wrong bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from te_built import built_once

from te import RegistrationError
from te.memory_kinds import RECOGNISERS, MemoryKind, Reach
from te.memory_kinds.base import Export, Exported

__all__ = ["Sealed", "SealedMemory", "capsule", "sealed"]

SOURCE = Path(__file__).with_name("sealed.c")
LIBRARY = "sealed.so"
CAPSULE = b"te.memory_kind.2"
DELAY_US = 200
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def capsule(kind: int) -> object:
    """Of the ``Kind`` at an address."""
    return _new_capsule(kind, CAPSULE, None)


@cache
def _load() -> ctypes.CDLL:
    return _typed(ctypes.CDLL(str(built_once([SOURCE], _build) / LIBRARY)))


def _build(folder: Path) -> None:
    flags = shlex.split(os.environ.get("CFLAGS", ""))  # of a sanitizer's build
    command = ["cc", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    includes = ["-I", str(SOURCE.parents[2]), "-pthread"]
    subprocess.run([*command, *includes, "-o", str(folder / LIBRARY), str(SOURCE)], check=True)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    address, number = ctypes.c_void_p, ctypes.c_int
    for name, result, *arguments in [
        ("sealed_new", address, ctypes.c_uint64, ctypes.c_uint32),
        ("sealed_free", None, address),
        ("sealed_kind", address, address),
        ("sealed_add", None, address, address, address, address),
        ("sealed_remove", None, address, address),
        ("sealed_set", None, address, number, number, number),
        ("sealed_events", ctypes.c_uint64, address),
    ]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class SealedMemory:
    """Some pages: ``address`` is what te is told, ``view`` what the test looks at them by."""

    def __init__(self, kind: Sealed, nbytes: int) -> None:
        self._kind = kind
        self.nbytes = nbytes
        fd = os.memfd_create("sealed")
        try:
            os.ftruncate(fd, nbytes)
            self._alias = mmap.mmap(fd, nbytes)
            self._pages: np.ndarray[Any, Any] = np.frombuffer(
                mmap.mmap(fd, nbytes, prot=0), np.uint8
            )
        finally:
            os.close(fd)
        self.address: int = self._pages.ctypes.data
        self.view: np.ndarray[Any, Any] = np.frombuffer(self._alias, np.uint8)
        kind.tell(self.address, nbytes, self.view.ctypes.data)

    def close(self) -> None:
        """A copy of it that is asked for afterwards fails."""
        self._kind.untell(self.address)


class Sealed(MemoryKind):
    """The kind, with its copier; use ``sealed``."""

    name = "sealed"
    description: ClassVar = "sealed memory"
    reach: ClassVar = Reach(0)
    has_copier: ClassVar = True

    def __init__(self, seed: int, delay_us: int, is_shared: bool) -> None:
        self.handles = self.name if is_shared else ""  # type: ignore[misc]
        self._library = _load()
        self._copier = self._library.sealed_new(seed, delay_us)
        self.struct: int = self._library.sealed_kind(self._copier)
        self.compiled = capsule(self.struct)
        self._ranges: dict[int, int] = {}

    def allocate(self, nbytes: int) -> SealedMemory:
        """Zeros, in whole pages."""
        return SealedMemory(self, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def tell(self, address: int, nbytes: int, alias: int) -> None:
        """The copier of a range, which it reaches by an alias."""
        self._ranges[address] = nbytes
        self._library.sealed_add(self._copier, address, nbytes, alias)

    def untell(self, address: int) -> None:
        del self._ranges[address]
        self._library.sealed_remove(self._copier, address)

    def recognise(self, address: int) -> MemoryKind | None:
        found = any(start <= address < start + n for start, n in list(self._ranges.items()))
        return self if found else None

    def check(self, address: int, nbytes: int) -> None:
        ranges = list(self._ranges.items())
        if not any(at <= address and address + nbytes <= at + n for at, n in ranges):
            raise RegistrationError(f"{nbytes} bytes at {address:#x} are not all sealed memory")

    def location(self, address: int, gpus: Mapping[str, str]) -> str:
        return "*"

    def export(self, source: object, address: int, nbytes: int) -> Export:
        """To engines of this process alone, which map nothing."""
        if not self.handles:
            return super().export(source, address, nbytes)
        return Export(self.handles, lambda: iter((Exported(address, nbytes),)))

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """A copy to or from other host memory fails."""
        self._library.sealed_add(self._copier, address, nbytes, None)
        return lambda: self._library.sealed_remove(self._copier, address)

    def refuse(self, batches: int) -> None:
        """The copier does not take the batch that comes after so many."""
        self._library.sealed_set(self._copier, batches + 1, 0, False)

    def fail(self, batches: int) -> None:
        """The batch that comes after so many fails in its middle."""
        self._library.sealed_set(self._copier, 0, batches + 1, False)

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """No copy that is not under way begins."""
        self._library.sealed_set(self._copier, 0, 0, True)
        try:
            yield
        finally:
            self._library.sealed_set(self._copier, 0, 0, False)

    @property
    def events(self) -> int:
        """Batches that were begun and not released."""
        return int(self._library.sealed_events(self._copier))

    def close(self) -> None:
        self._library.sealed_free(self._copier)


@contextlib.contextmanager
def sealed(seed: int = 1, delay_us: int = DELAY_US, is_shared: bool = False) -> Iterator[Sealed]:
    """The kind, known to te for as long as this lasts; every event of it must be released.
    ``is_shared``: a peer on the same host has its copier copy out of the source's memory."""
    kind = Sealed(seed, delay_us, is_shared)
    RECOGNISERS.insert(0, kind.recognise)
    try:
        yield kind
        assert kind.events == 0
    finally:
        RECOGNISERS.remove(kind.recognise)
        kind.close()
