# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier below an owner's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["NAME_BYTES", "Found", "Laid", "Tier", "Usage", "Wanted", "Written"]

NAME_BYTES = 32
"""Of an object's name: its key and its signature, 16 bytes each."""


@dataclass(frozen=True, slots=True)
class Laid:
    """An object that is to be written."""

    name: bytes
    nbytes: int
    #: xxh3-64 of its bytes.
    checksum: int
    #: It, and memory behind it up to a multiple of 4 KiB; begins at such a multiple.
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object that is to be read."""

    name: bytes
    nbytes: int
    #: Where to: as ``Laid.memory``. Has any bytes if the object does not come.
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Found:
    """An object that was left behind."""

    name: bytes
    nbytes: int


@dataclass(frozen=True)
class Written:
    """What became of a write."""

    #: One for each object.
    stored: Sequence[bool]
    #: The names of objects that had to go for them.
    gone: Sequence[bytes]


@dataclass(frozen=True)
class Usage:
    """How full a tier is, and what went wrong since the start."""

    objects: int
    #: Of the objects, without what their places have beside them.
    nbytes: int
    capacity: int
    #: Writes and reads that failed.
    failed: int
    #: Objects that were read, and were not those that were written.
    corrupted: int


class Tier(Protocol):
    """Objects by name. What cannot be read or written is a miss: no call raises because of it.

    ``read`` may be called by several threads at once, and beside the other calls. Of these one is
    made at a time. All of them wait for the device.
    """

    @property
    def batch_max(self) -> int:
        """Objects that ``write`` gets at once."""

    def found(self) -> Sequence[Found]:
        """What a former process has left behind. To be called once, before anything else."""

    def write(self, objects: Sequence[Laid]) -> Written:
        """Writes objects. Their memory does not change before this returns."""

    def read(self, objects: Sequence[Wanted], *, is_use: bool = True) -> Sequence[int | None]:
        """Reads objects, and compares them with their checksums, which are returned. None for one
        that is not there, or cannot be read, or is not what was written; it is forgotten then.
        Without ``is_use``, nothing stays longer because it was read."""

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes objects for good: they are not found after a restart."""

    def usage(self) -> Usage:
        """Does not wait."""

    def close(self) -> None:
        """After all other calls have returned."""
