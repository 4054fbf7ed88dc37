# SPDX-License-Identifier: Apache-2.0
"""Lists of copies as numpy arrays: build, join, merge. Nothing here touches the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from te import _blocks

__all__ = ["BLOCK", "U64", "Blocks", "Integers"]

BLOCK: Final = np.dtype([("src", "<u8"), ("dst", "<u8"), ("nbytes", "<u8")])
"""One contiguous copy of ``nbytes`` bytes from address ``src`` to address ``dst``."""

Integers: TypeAlias = int | Sequence[int] | npt.NDArray[np.integer[Any]]
U64: TypeAlias = npt.NDArray[np.uint64]

# User space ends far below this on every 64-bit Linux, so u64 sums of two such values never wrap.
ADDRESS_LIMIT: Final = 1 << 63


class Blocks:
    """An immutable, ordered list of blocks: what one transfer copies.

    Every block has at least one byte and ends below 2**63 on both sides, and the sum of all sizes
    is below 2**63. Constructors raise ``ValueError`` with the value that violates this.
    """

    __slots__ = ("_array", "_total_nbytes")

    def __init__(self, array: npt.NDArray[np.void]) -> None:
        """Copies ``array``, of shape (n,) and dtype ``BLOCK``."""
        if array.dtype != BLOCK or array.ndim != 1:
            raise ValueError(
                f"blocks need shape (n,) and dtype {BLOCK}, not {array.shape} and {array.dtype}"
            )
        array = array.copy()
        self._take(array, _blocks.checked_total(array))

    @classmethod
    def taking(cls, array: npt.NDArray[np.void]) -> Blocks:
        """As ``Blocks(array)``, without a copy: nobody may write to the array any more, also where
        this raises."""
        self = cls.__new__(cls)
        self._take(array, _blocks.checked_total(array))
        return self

    def _take(self, array: npt.NDArray[np.void], checked_total: int) -> None:
        """Takes over an ``array`` that nobody else keeps, unless the check has said -1."""
        if checked_total < 0:
            _complain(array)
        self._array, self._total_nbytes = array, checked_total
        self._array.flags.writeable = False

    @classmethod
    def _valid(cls, array: npt.NDArray[np.void], total_nbytes: int) -> Blocks:
        """Takes over an ``array`` that nobody else keeps and whose blocks need no check: checking
        a million blocks again costs five times as much as building them."""
        _check_total(total_nbytes)
        self = cls.__new__(cls)
        self._array, self._total_nbytes = array, total_nbytes
        self._array.flags.writeable = False
        return self

    @classmethod
    def of(cls, src: Integers, dst: Integers, nbytes: Integers) -> Blocks:
        """Blocks from addresses and sizes in bytes: scalars, or sequences of one length (n,)."""
        columns = [_u64("src", src), _u64("dst", dst), _u64("nbytes", nbytes)]
        lengths = {column.size for column in columns if column.ndim}
        if len(lengths) > 1:
            sizes = ", ".join(str(column.size) for column in columns)
            raise ValueError(f"src, dst and nbytes must have one length, not {sizes}")
        array = np.empty(lengths.pop() if lengths else 1, BLOCK)
        self = cls.__new__(cls)
        self._take(array, _blocks.fill(array, *map(np.ascontiguousarray, columns)))
        return self

    @classmethod
    def grid(
        cls,
        src: Integers,
        src_offsets: Integers,
        dst: Integers,
        dst_offsets: Integers,
        nbytes: Integers,
    ) -> Blocks:
        """Blocks of every pair of a base and an offset, base by base.

        ``src`` and ``dst`` are base addresses, shape (n,), paired by position; ``src_offsets`` and
        ``dst_offsets`` are bytes from a base, shape (m,), paired likewise; ``nbytes`` has shape
        (m,), or is one number. The block of base i and offset j copies from
        ``src[i] + src_offsets[j]``; the result has n x m blocks.
        """
        bases = {"src": _u64("src", src), "dst": _u64("dst", dst)}
        offsets = {
            "src_offsets": _u64("src_offsets", src_offsets),
            "dst_offsets": _u64("dst_offsets", dst_offsets),
            "nbytes": np.broadcast_to(
                _u64("nbytes", nbytes), np.shape(nbytes) or np.shape(src_offsets)
            ),
        }
        for columns in (bases, offsets):
            shapes = {column.shape for column in columns.values()}
            if len(shapes) > 1 or len(next(iter(shapes))) != 1:
                raise ValueError(
                    " and ".join(columns)
                    + " must be 1-d and of one length, not "
                    + ", ".join(str(column.shape) for column in columns.values())
                )
        array = np.empty((bases["src"].size, offsets["nbytes"].size), BLOCK)
        if array.size:
            for side in ("src", "dst"):
                base, offset = bases[side], offsets[f"{side}_offsets"]
                _check_reach(side, base, offset, offsets["nbytes"])
                np.add(base[:, None], offset, out=array[side])
            array["nbytes"] = offsets["nbytes"]
        count = bases["src"].size
        _check_total(count * float(offsets["nbytes"].sum(dtype=np.float64)))
        total = count * int(offsets["nbytes"].sum(dtype=np.uint64))
        return cls._valid(array.reshape(-1), total)

    @classmethod
    def concat(cls, parts: Sequence[Blocks]) -> Blocks:
        """The blocks of all ``parts``, in order."""
        filled = [part for part in parts if len(part)]
        if len(filled) == 1:
            return filled[0]
        if not filled:
            return cls._valid(np.empty(0, BLOCK), 0)
        # As numbers: numpy joins structures at a third of the speed.
        columns = np.concatenate([part.array.view(np.uint64) for part in filled])
        return cls._valid(columns.view(BLOCK), sum(part.total_nbytes for part in filled))

    @property
    def array(self) -> npt.NDArray[np.void]:
        """Read-only, shape (n,), dtype ``BLOCK``."""
        return self._array

    @property
    def total_nbytes(self) -> int:
        """Sum of the blocks' sizes in bytes."""
        return self._total_nbytes

    def __len__(self) -> int:
        return int(self._array.size)

    def __repr__(self) -> str:
        return f"Blocks({len(self)} blocks, {self._total_nbytes} bytes)"

    def merged(self) -> Blocks:
        """The same copies with each run of blocks adjacent on both sides made one; keeps order."""
        array = self._array
        if len(array) < 2:
            return self
        before, after = array[:-1], array[1:]
        joins = before["src"] + before["nbytes"] == after["src"]
        joins &= before["dst"] + before["nbytes"] == after["dst"]
        if not joins.any():
            return self
        firsts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
        merged = array[firsts]
        merged["nbytes"] = np.add.reduceat(array["nbytes"], firsts)
        return Blocks._valid(merged, self._total_nbytes)


def _u64(name: str, value: Integers) -> U64:
    """``value`` as u64, shape () or (n,); ``ValueError`` for anything that is not such integers."""
    array: npt.NDArray[Any] = np.asarray(value)
    if array.ndim > 1:
        raise ValueError(f"{name} must be a number or 1-d, not of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.uint64)
    if array.dtype == np.uint64:
        return array
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers that fit 64 bits, not {value!r:.80}")
    if int(array.min()) < 0:
        raise ValueError(f"{name} must not be negative: {int(array.min())}")
    return array.astype(np.uint64)


def _check_total(total_nbytes: float) -> None:
    if total_nbytes >= ADDRESS_LIMIT:
        raise ValueError(
            f"blocks of {total_nbytes:.3e} bytes in total; fewer than 2**63 are possible"
        )


def _check_reach(side: str, base: U64, offset: U64, nbytes: U64) -> None:
    """``ValueError`` unless each pair of a base and an offset is a valid side of a block. No
    argument is empty."""
    if not nbytes.all():
        raise ValueError(f"offset {int(nbytes.argmin())} has 0 bytes; a block has at least one")
    # In floating point, where a sum that would wrap in u64 stays huge.
    far = offset.astype(np.float64) + nbytes.astype(np.float64)
    wraps = float(far.max()) >= ADDRESS_LIMIT
    if wraps or int(base.max()) + int((offset + nbytes).max()) > ADDRESS_LIMIT:
        raise ValueError(
            f"{side}: {int(nbytes[far.argmax()])} bytes {int(offset[far.argmax()])} bytes from "
            f"{int(base.max()):#x} end beyond 2**63"
        )


def _complain(array: npt.NDArray[np.void]) -> None:
    """``ValueError`` with what makes ``checked_total`` refuse the blocks."""
    for side in ("src", "dst"):
        _check_side(side, array[side], array["nbytes"])
    _check_total(sum(array["nbytes"].tolist()))


def _check_side(name: str, address: U64, nbytes: U64) -> None:
    limit = np.uint64(ADDRESS_LIMIT)
    # ``limit - address`` is evaluated only where it cannot wrap.
    bad = (nbytes == 0) | (address >= limit) | (nbytes > limit - np.minimum(address, limit))
    if bad.any():
        first = int(bad.argmax())
        raise ValueError(
            f"block {first}: {name} {int(address[first]):#x} with {int(nbytes[first])} bytes;"
            " a block has at least one byte and ends below 2**63"
        )
