# SPDX-License-Identifier: Apache-2.0
"""A table from key digests to where objects are said to lie."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | npt.NDArray[Any]

class Reader:
    """Reads a table. A key may have several entries: one of each owner and fingerprint."""

    def __len__(self) -> int: ...
    @property
    def ranks(self) -> bytes:
        """Those that the table's process has set: see ``look_up``."""

    def look_up(self, keys: Buffer, fingerprint: int, ranks: Buffer, places: Buffer) -> int:
        """Finds the entries with one fingerprint; returns how many there are.

        Args:
            keys: digests of 16 bytes, one after another.
            fingerprint: of the signature and the size (``changes.fingerprint_of``).
            ranks: a byte for each owner, below 128. Of several owners one that has the object in
                memory is taken (``changes.LOWER_TIER``), of these the one of the highest rank; 0
                leaves an owner out.
            places: of dtype ``changes.PLACE``, one for each key; is written.
        """

    @property
    def changes(self) -> int:
        """Rises with every change of its entries."""

    def keys(self, ranks: Buffer) -> bytes | None:
        """The keys of all entries, but those of owners whose byte in ``ranks`` is 0; a key as often
        as it has entries. What changes meanwhile is there or not; None if a part of the table
        changes so fast that it cannot be read."""

class Mirror(Reader):
    """Another process's table. What that one changes at the moment is looked at again, for some
    hundred microseconds at most; then it is not found."""

    def __init__(self, memory: Any) -> None:
        """``memory``: its file, mapped. ``ValueError`` if it is none."""

class Table(Reader):
    """Entries of up to 1,024 owners, in a memory file of its own.

    Guarded by the interpreter's lock; nothing in it waits. ``OSError`` if there is no memory file
    for it, ``MemoryError`` if it has become too large.
    """

    #: Of the file, for reading.
    fd: int

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes."""

    def count(self, owner: int) -> int:
        """The number of entries of an owner."""

    def apply(self, owner: int, changes: Buffer) -> None:
        """Takes over what an owner announced: ``changes`` has dtype ``changes.CHANGE``, in order.
        ``ValueError`` for bytes that are none; what stands before the bad one was applied."""

    def drop(self, owner: int) -> int:
        """Forgets an owner's entries; returns how many these were."""

    def set_rank(self, owner: int, rank: int) -> None:
        """For ``ranks``. ``ValueError`` for a rank above 127."""

def sole_owner(places: Buffer) -> int:
    """The number of the owner that has all of these in memory, by a look-up: ``places`` has dtype
    ``changes.PLACE``. -1 if there is none such."""

def digests_of_hex(texts: Sequence[str]) -> bytes:
    """The first 16 bytes of each digest, which is given in hex (SGLang's page keys are SHA-256 in
    64 digits). ``ValueError`` names the first text that is none."""
