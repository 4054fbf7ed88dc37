# SPDX-License-Identifier: Apache-2.0
"""Where objects lie in an engine's memory: pieces, which an object has one after another. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

import te
from kvstore import _bytes

__all__ = ["U64", "Pieces"]

U64 = npt.NDArray[np.uint64]


class Pieces:
    """The memory of some objects of one shape. Each get and put makes some: a dataclass that checks
    the same takes twice as long."""

    __slots__ = ("addresses", "nbytes", "object_bytes")

    def __init__(self, addresses: npt.ArrayLike, nbytes: npt.ArrayLike) -> None:
        #: Shape (objects, pieces): where each piece begins.
        self.addresses: U64 = np.ascontiguousarray(addresses, np.uint64)
        #: Shape (pieces,): the size of each, in bytes.
        self.nbytes: U64 = np.ascontiguousarray(nbytes, np.uint64)
        if self.addresses.ndim != 2 or self.nbytes.shape != self.addresses.shape[1:]:
            raise ValueError(
                f"addresses of shape {self.addresses.shape} and nbytes of shape"
                f" {self.nbytes.shape}: give (objects, pieces) and (pieces,)"
            )
        sizes = self.nbytes.tolist()  # numpy's ``all`` and ``sum`` take 10 µs.
        if not sizes or not all(sizes):
            raise ValueError("an object needs at least one piece, and each at least one byte")
        #: The size of one object.
        self.object_bytes: int = sum(sizes)

    @classmethod
    def whole(cls, addresses: npt.ArrayLike, nbytes: int) -> Pieces:
        """Objects that lie in one piece each; ``addresses`` has shape (objects,)."""
        self = cls.__new__(cls)
        self.addresses = np.ascontiguousarray(addresses, np.uint64).reshape(-1, 1)
        self.object_bytes = int(nbytes)
        self.nbytes = _one_piece(self.object_bytes)
        return self

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def offsets(self) -> U64:
        """Where each piece begins within its object, shape (pieces,)."""
        return np.cumsum(self.nbytes) - self.nbytes

    def of(self, rows: Sequence[int] | npt.NDArray[np.intp]) -> Pieces:
        """Some of the objects."""
        return Pieces(self.addresses[np.asarray(rows, np.intp)], self.nbytes)

    def between(self, first: int, end: int) -> Pieces:
        """The objects of some rows."""
        return Pieces(self.addresses[first:end], self.nbytes)

    def part(self, first: int, end: int) -> Pieces:
        """Some pieces of each object."""
        return Pieces(self.addresses[:, first:end], self.nbytes[first:end])

    def cut(self, first: int, end: int) -> Pieces:
        """The pieces of the bytes from ``first`` to ``end`` of each object."""
        starts, ends = self.offsets, self.offsets + self.nbytes
        kept = np.flatnonzero((starts < end) & (ends > first))
        begun: U64 = np.maximum(starts[kept], np.uint64(first))
        sizes: U64 = np.minimum(ends[kept], np.uint64(end)) - begun
        addresses: U64 = self.addresses[:, kept] + (begun - starts[kept])
        return Pieces(addresses, sizes)

    def blocks(self, slots: U64, offset: int, *, to_slots: bool) -> te.Blocks:
        """The copies between these pieces and slots.

        ``slots`` has shape (objects,): where each object's slot begins; the first of these pieces
        lies ``offset`` bytes behind that.
        """
        array = np.empty(self.addresses.size, te.BLOCK)
        count = _bytes.lay(array, slots, 1, offset, self.addresses, self.nbytes, to_slots)
        return te.Blocks.taking(array[:count])

    def blocks_and_one(
        self, numbers: U64, slots: int, unit_bytes: int, source: int, to: int, nbytes: int
    ) -> te.Blocks:
        """The copies of these pieces into slots, and behind them one of other bytes. ``numbers``,
        ``slots``, ``unit_bytes``: see ``blocks_and_headers``."""
        array = np.empty(self.addresses.size + 1, te.BLOCK)
        more = source, to, nbytes
        count = _bytes.lay(
            array, numbers, unit_bytes, slots, self.addresses, self.nbytes, True, more
        )
        return te.Blocks.taking(array[:count])

    def blocks_and_headers(
        self, numbers: U64, slots: int, unit_bytes: int, headers: int, room: int
    ) -> te.Blocks:
        """The copies out of slots into these pieces, and behind them of the slots' headers.

        Args:
            numbers: of the slots, shape (objects,).
            slots: where the first slot begins; the others follow by ``unit_bytes``.
            headers: where the first slot's header begins.
            room: where the headers come to, one behind the other.
        """
        array = np.empty(self.addresses.size + len(numbers), te.BLOCK)
        count = _bytes.lay_reads(
            array, numbers, slots, unit_bytes, headers, self.addresses, self.nbytes, room
        )
        return te.Blocks.taking(array[:count])


@lru_cache
def _one_piece(nbytes: int) -> U64:
    """``Pieces.nbytes``: one array for all objects of a size, which has been checked."""
    sizes = Pieces(np.empty((0, 1), np.uint64), [nbytes]).nbytes
    sizes.flags.writeable = False
    return sizes
