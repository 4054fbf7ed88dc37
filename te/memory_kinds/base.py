# SPDX-License-Identifier: Apache-2.0
"""The contract of a kind of memory, Python half; ``te/core/kinds.h`` has the compiled one.

A transport compares a kind's ``reach`` with what it uses itself, and never asks for its name.
Memory that it does not reach goes through staging (``te/core/staging.pxd``), if the kind can copy.
"""

from __future__ import annotations

import enum
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

__all__ = ["MemoryKind", "Reach", "Recogniser"]


class Reach(enum.IntFlag):
    """What touches memory directly, by its address; as in ``te/core/kinds.h``."""

    CPU = 1
    KERNEL = 2
    NIC = 4


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
    #: The compiled half, a PyCapsule named ``te.memory_kind.1`` of a ``Kind``.
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

    def export(self, source: object, address: int, nbytes: int) -> int:
        """What other processes map the memory by: a descriptor, which stays the kind's. ``source``
        is what was given to ``Engine.register``. ``OSError`` that says why they cannot."""
        raise OSError(errno.EOPNOTSUPP, f"other processes cannot map {self.description}")

    def map(self, descriptor: int, nbytes: int) -> Any:
        """The memory that another process has exported, as a buffer to read from; it is unmapped
        with its last reference. ``OSError``."""
        raise OSError(errno.EOPNOTSUPP, f"{self.description} of other processes cannot be mapped")

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Prepares host memory for copies to and from this kind; returns what undoes it, to be
        called once no copy is under way. ``OSError``."""
        return _nothing


Recogniser = Callable[[int], MemoryKind | None]
"""The kind of the memory at an address; None if it is none of those that it knows."""


def _nothing() -> None:
    """Of a kind that needs no preparation."""
