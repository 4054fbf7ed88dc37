# SPDX-License-Identifier: Apache-2.0
"""Copies between slots and a client's memory, with checksums (xxh3-64), for a batch of objects of
one shape. Without the interpreter's lock.

Addresses and sizes are arrays of u64, C-contiguous. An address that is not this process's memory
ends the process: who calls has checked them. ``ValueError`` for arrays that do not fit together.
"""

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

U64: TypeAlias = npt.NDArray[np.uint64]

#: Codes of ``bring``.
RIGHT: Final[int]
MOVED: Final[int]
CORRUPTED: Final[int]

def checksums(addresses: U64, sizes: U64, found: U64) -> None:
    """Of objects in their pieces, as ``take`` has them; written to ``found``, shape (n,)."""

def take(slots: U64, addresses: U64, sizes: U64, found: U64) -> None:
    """Copies objects into slots; the checksums of what lies there then are written to ``found``.

    Args:
        slots: where they begin, shape (n,).
        addresses: where the pieces of each object begin, shape (n, pieces).
        sizes: of the pieces, in bytes, shape (pieces,).
    """

def bring(
    slots: U64,
    headers: U64,
    wanted: npt.NDArray[Any],
    addresses: U64,
    sizes: U64,
    verify: bool,
    codes: npt.NDArray[np.uint8],
) -> None:
    """Copies objects out of slots, each first and its header behind that; a code for each is
    written to ``codes``: ``RIGHT``; ``MOVED`` if the header is not the wanted one; ``CORRUPTED`` if
    it is, and the bytes have another checksum than it says.

    Args:
        slots, headers: where they begin, shape (n,).
        wanted: dtype ``headers.HEADER``, shape (n,); its checksums are not looked at.
        addresses, sizes: see ``take``.
        verify: whether checksums are compared.
    """

def populate(address: int, nbytes: int) -> int:
    """Has the kernel give all pages of this range, which begins and ends at pages. The error's
    number if it does not, else 0: madvise(2), ``MADV_POPULATE_WRITE``."""
