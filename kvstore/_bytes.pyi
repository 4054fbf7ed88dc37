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

def fetch(
    pid: int,
    nonce_address: int,
    nonce: bytes,
    slots: U64,
    addresses: U64,
    sizes: U64,
    found: U64,
    failed: npt.NDArray[np.uint32],
) -> None:
    """As ``take``, of objects in another process's memory, by ``process_vm_readv``. The slots are
    this process's; what lies at the addresses there does not matter: what cannot be read is told.

    Args:
        pid: of the process.
        nonce_address, nonce: bytes that lie in its memory, and in that of no other program.
        slots, addresses, sizes, found: see ``take``.
        failed: errno for each object, shape (n,); 0 for one that was copied, ``ESRCH`` if the
            nonce is not there.
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

def judge(
    found: npt.NDArray[Any],
    wanted: npt.NDArray[Any],
    addresses: U64,
    sizes: U64,
    verify: bool,
    codes: npt.NDArray[np.uint8],
) -> None:
    """As ``bring``, of objects that were copied already, and headers that were read behind that or
    with it: ``found``, dtype ``headers.HEADER``, shape (n,). Checksums are computed of objects with
    the wanted header alone."""

def expect(
    keys: npt.NDArray[np.uint8],
    signature: bytes,
    nbytes: int,
    fingerprint: int,
    magic: int,
    state: int,
    places: npt.NDArray[Any],
    headers: npt.NDArray[Any],
    slots: U64,
) -> None:
    """Writes headers, dtype ``headers.HEADER``, shape (n,), with checksums of 0, and the numbers of
    their slots. ``keys`` has shape (n, 16), ``places`` dtype ``changes.PLACE``, shape (n,). Holds
    the interpreter's lock, as do those below."""

def fill(
    headers: npt.NDArray[Any],
    slots: U64,
    keys: bytes | npt.NDArray[np.uint8],
    signature: bytes,
    nbytes: int,
    fingerprint: int,
    magic: int,
    state: int,
    checksums: U64,
    changes: npt.NDArray[np.void],
) -> None:
    """Writes the headers of some slots, each with its next generation, and its state last. Also
    that they were added: ``changes``, dtype ``changes.CHANGE``, shape (n,).

    Args:
        headers: of all slots, dtype ``headers.HEADER``.
        slots: numbers of those that are written, shape (n,); ``ValueError`` for one that is none.
        keys: one for each, of 16 bytes.
        checksums: shape (n,).
    """

def additions(
    keys: npt.NDArray[np.uint8],
    fingerprint: int,
    slots: bytes,
    generations: bytes,
    lower_tier: int,
    changes: npt.NDArray[np.void],
) -> int:
    """Writes additions, dtype ``changes.CHANGE``, of the objects that are there: those with a
    generation other than 0, and those of the slot ``lower_tier``. Returns how many they are.

    Args:
        keys: shape (n, 16).
        slots, generations: as u32, n of each.
        changes: room for n.
    """

def lay(
    blocks: npt.NDArray[np.void],
    slots: U64,
    unit: int,
    offset: int,
    addresses: U64,
    sizes: U64,
    to_slots: bool,
    behind: tuple[int, int, int] | None = None,
) -> int:
    """Writes the copies between slots and pieces to ``blocks``, dtype ``te.BLOCK``, each run that
    is adjacent on both sides as one. Returns how many there are. Nothing is checked but the room;
    sums wrap.

    Args:
        behind: one more copy (source, destination, bytes), which comes last.
        slots, unit: where they begin, in units of so many bytes, shape (n,); the first piece lies
            ``offset`` bytes behind that.
        addresses, sizes: see ``take``.
    """

def lay_reads(
    blocks: npt.NDArray[np.void],
    numbers: U64,
    slots: int,
    unit: int,
    headers: int,
    addresses: U64,
    sizes: U64,
    room: int,
) -> int:
    """As ``lay``, out of slots into pieces, and behind them the copies of the slots' headers.

    Args:
        numbers: of the slots, shape (n,).
        slots, unit: where the first slot begins, and by how many bytes the others follow.
        headers: where the first header begins; the others follow.
        addresses, sizes: see ``take``.
        room: where the headers come to, one behind the other.
    """

def covers(starts: U64, ends: U64, addresses: U64, sizes: U64) -> bool:
    """Whether each piece lies in one of the ranges, which are in order and have nothing in common.

    Args:
        starts, ends: of the ranges.
        addresses, sizes: see ``take``.
    """

def populate(address: int, nbytes: int) -> int:
    """Has the kernel give all pages of this range, which begins and ends at pages. The error's
    number if it does not, else 0: madvise(2), ``MADV_POPULATE_WRITE``."""
