# SPDX-License-Identifier: Apache-2.0
"""Copies between slots and pieces that the processor can access, checksums included, by two threads
if there is enough to copy."""

from __future__ import annotations

from collections.abc import Callable
from os import strerror
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import _bytes
from kvstore.objects.changes import Records
from kvstore.objects.pieces import U64, Pieces
from kvstore.threads import NoThread, Threads

__all__ = ["Codes", "Copier", "Foreign", "gather"]

SHARED_BYTES: Final = 4 << 20
"""So much is shared with the helper: it takes 40 µs until a thread has woken up, and as long to
copy half a MiB."""

Codes = npt.NDArray[np.uint8]
"""``_bytes.RIGHT``, ``MOVED`` or ``CORRUPTED``."""


class Foreign(NamedTuple):
    """Another process of this host whose memory can be read."""

    pid: int
    #: Where which bytes lie there, and in no other program's memory.
    nonce_address: int
    nonce: bytes


class Copier:
    """Has a helping thread, which begins with the first copy that is large enough. All methods are
    thread-safe. The addresses that they get are memory of this process."""

    def __init__(self) -> None:
        self._helper = Threads(1, "kvstore-copy")

    def close(self) -> None:
        """Ends the helper, after what it is at: who copies waits for that, and nobody else."""
        self._helper.shutdown(wait=False)

    def take(self, slots: U64, pieces: Pieces) -> U64:
        """Copies objects into slots, which begin at these addresses, shape (n,); returns the
        checksums of what lies there."""
        found = np.empty(len(pieces), np.uint64)
        addresses, sizes = pieces.addresses, pieces.nbytes

        def some(slots: U64, addresses: U64, found: U64) -> None:
            _bytes.take(slots, addresses, sizes, found)

        self._share(some, pieces, slots, addresses, found)
        return found

    def fetch(self, foreign: Foreign, slots: U64, pieces: Pieces) -> U64:
        """As ``take``, of objects in another process's memory. ``OSError`` if not all of them can
        be read there; nothing is copied any more then."""
        found, failed = np.empty(len(pieces), np.uint64), np.empty(len(pieces), np.uint32)
        addresses, sizes = pieces.addresses, pieces.nbytes

        def some(slots: U64, addresses: U64, found: U64, failed: npt.NDArray[np.uint32]) -> None:
            _bytes.fetch(*foreign, slots, addresses, sizes, found, failed)

        self._share(some, pieces, slots, addresses, found, failed)
        if failed.any():
            errnum = int(failed[failed != 0][0])
            raise OSError(errnum, f"process_vm_readv of process {foreign.pid}: {strerror(errnum)}")
        return found

    def bring(
        self, slots: U64, headers: U64, wanted: Records, pieces: Pieces, verify: bool
    ) -> Codes:
        """Copies objects out of slots, and tells what came: see ``_bytes.bring``."""
        codes = np.empty(len(pieces), np.uint8)
        addresses, sizes = pieces.addresses, pieces.nbytes

        def some(slots: U64, headers: U64, wanted: Records, addresses: U64, codes: Codes) -> None:
            _bytes.bring(slots, headers, wanted, addresses, sizes, verify, codes)

        self._share(some, pieces, slots, headers, wanted, addresses, codes)
        return codes

    def judge(self, found: Records, wanted: Records, pieces: Pieces, verify: bool) -> Codes:
        """Tells what has come to pieces, by headers that were read: see ``_bytes.judge``. Without
        ``verify`` the pieces may be any memory."""
        codes = np.empty(len(pieces), np.uint8)
        addresses, sizes = pieces.addresses, pieces.nbytes

        def some(found: Records, wanted: Records, addresses: U64, codes: Codes) -> None:
            _bytes.judge(found, wanted, addresses, sizes, verify, codes)

        if verify:
            self._share(some, pieces, found, wanted, addresses, codes)
        else:
            some(found, wanted, addresses, codes)
        return codes

    def checksums(self, pieces: Pieces) -> U64:
        """xxh3-64 of objects."""
        found = np.empty(len(pieces), np.uint64)
        addresses, sizes = pieces.addresses, pieces.nbytes
        self._share(
            lambda addresses, found: _bytes.checksums(addresses, sizes, found),
            pieces,
            addresses,
            found,
        )
        return found

    def _share(self, work: Callable[..., None], pieces: Pieces, *arrays: npt.NDArray[Any]) -> None:
        """``work`` gets the arrays, which have a row for each object, or their halves."""
        count = len(pieces)
        if count < 2 or count * pieces.object_bytes < SHARED_BYTES:
            work(*arrays)
            return
        theirs = [one[count // 2 :] for one in arrays]
        try:
            helped = self._helper.submit(work, *theirs)
        except NoThread:
            work(*arrays)
            return
        try:
            work(*(one[: count // 2] for one in arrays))
        finally:  # Nothing is copied any more when this returns.
            if helped.cancel():  # It is at somebody else's copy.
                work(*theirs)
            else:
                helped.result()


def gather(pieces: Pieces, address: int) -> None:
    """Copies objects to memory of this process, one behind the other."""
    nbytes = np.uint64(pieces.object_bytes)
    places = np.uint64(address) + np.arange(len(pieces), dtype=np.uint64) * nbytes
    _bytes.take(
        places,
        pieces.addresses,
        pieces.nbytes,
        np.empty(len(pieces), np.uint64),
    )
