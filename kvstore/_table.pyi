# SPDX-License-Identifier: Apache-2.0
"""A table from key digests to where objects are said to lie."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | npt.NDArray[Any]

class Table:
    """Entries of up to 1,024 owners. A key may have several: one of each owner and fingerprint.

    Guarded by the interpreter's lock; nothing in it waits.
    """

    def __len__(self) -> int: ...
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

def sole_owner(places: Buffer) -> int:
    """The number of the owner that has all of these in memory, by a look-up: ``places`` has dtype
    ``changes.PLACE``. -1 if there is none such."""

def digests_of_hex(texts: Sequence[str]) -> bytes:
    """The first 16 bytes of each digest, which is given in hex (SGLang's page keys are SHA-256 in
    64 digits). ``ValueError`` names the first text that is none."""
