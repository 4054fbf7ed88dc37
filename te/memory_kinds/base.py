# SPDX-License-Identifier: Apache-2.0
"""The contract of a kind of memory, Python half; ``te/core/kinds.h`` has the compiled one.

A transport compares a kind's ``reach`` with what it uses itself, and never asks for its name.
Memory that it does not reach goes through staging (``te/core/staging.pxd``), if the kind can copy.
"""

from __future__ import annotations

import enum
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "HANDLE_BYTES_MAX",
    "Export",
    "Exported",
    "Mapped",
    "MemoryKind",
    "Reach",
    "Recogniser",
    "TakeDescriptor",
]

HANDLE_BYTES_MAX = 1536
"""The largest handle of an ``Exported``, which goes into a greeting."""


class Reach(enum.IntFlag):
    """What touches memory directly, by its address; as in ``te/core/kinds.h``."""

    CPU = 1
    KERNEL = 2
    NIC = 4


@dataclass(frozen=True)
class Exported:
    """A part of a region, as other processes on this host map it: by a memory file, or by what the
    kind that is ``handles`` there makes of ``handle``."""

    address: int
    nbytes: int
    #: A descriptor of this process; None if there is a handle.
    fd: int | None = None
    #: At most ``HANDLE_BYTES_MAX`` bytes. It may name descriptors of this process by their numbers.
    handle: bytes = b""


@dataclass(frozen=True)
class Export:
    """How other processes on this host map a region."""

    #: Which kind of memory there does (``MemoryKind.handles``); empty: by memory files.
    handles: str
    #: Its parts, in any order and without overlap. They are made anew for each peer: descriptors
    #: that a part names stay open until the next one is asked for. ``OSError``.
    parts: Callable[[], Iterator[Exported]]


TakeDescriptor = Callable[[int], int]
"""A descriptor of the exporting process by its number there, as one of this process, which the
caller closes (pidfd_getfd(2)). ``OSError``."""


@dataclass(frozen=True)
class Mapped:
    """Memory of another process as this one has mapped it."""

    #: Where its first byte lies here, for copies by the kind that mapped it.
    address: int
    #: What its compiled ``unmap`` is given.
    number: int
    #: How many bytes are mapped: more than was asked for, where only whole parts can be.
    nbytes: int


class MemoryKind(ABC):
    """One kind of memory as this process has it: the host's, one GPU's. Any thread may call
    anything; nothing is called on the data path."""

    #: What ``Region.kind`` and cards say: ``"host"``, ``"cuda:0"`` by the process's own number.
    name: str
    #: The same in a sentence: ``"CUDA memory"``.
    description: ClassVar[str]
    reach: ClassVar[Reach]
    #: Whether te can copy it to and from host memory, so that transports which do not reach it
    #: carry it, too.
    has_copier: bool = False
    #: The name of the handles that it maps, which its own ``export`` makes; empty if it maps none.
    handles: ClassVar[str] = ""
    #: The compiled half, a PyCapsule named ``te.memory_kind.2`` of a ``Kind``.
    compiled: object

    @property
    def trouble(self) -> str:
        """The last copy that failed, in the words of who copies: an errno says little of a device.
        Empty if none has."""
        return ""

    @abstractmethod
    def check(self, address: int, nbytes: int) -> None:
        """Whether every byte is this kind's and may be read and written; ``te.RegistrationError``
        that says from which address on it is not."""

    @abstractmethod
    def location(self, address: int, gpus: Mapping[str, str]) -> str:
        """Where it is: ``"cpu:0"``, ``"cuda:3"``, ``te.topology.ANYWHERE`` when nobody tells.

        ``gpus``: the machine's GPUs by their PCI address (``te.topology.Topology.gpus``).
        """

    def dma_buf(self, address: int, nbytes: int) -> int:
        """A dma-buf, as a descriptor that the caller closes, of whole pages of memory that NICs
        reach and the processor does not; ``OSError`` that names the call that failed."""
        raise OSError(errno.EOPNOTSUPP, f"{self.description} has no dma-buf")

    def export(self, source: object, address: int, nbytes: int) -> Export:
        """How other processes on this host map the memory; until it is freed. ``source`` is what
        was given to ``Engine.register``. ``OSError`` that says why they cannot."""
        raise OSError(errno.EOPNOTSUPP, f"other processes cannot map {self.description}")

    def map(self, handle: bytes, nbytes: int, take: TakeDescriptor) -> Mapped:
        """Maps so many bytes that a process other than this one has exported, so that they are
        copied to memory of this kind without the processor. ``ValueError`` for what is no handle,
        ``OSError`` for one that cannot be mapped."""
        raise OSError(errno.EOPNOTSUPP, f"{self.description} of other processes cannot be mapped")

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Prepares host memory for copies to and from this kind; returns what undoes it, to be
        called once no copy is under way. ``OSError``."""
        return _nothing


Recogniser = Callable[[int], MemoryKind | None]
"""The kind of the memory at an address; None if it is none of those that it knows."""


def _nothing() -> None:
    """Undoes the pinning of a kind that needs none."""
