# SPDX-License-Identifier: Apache-2.0
"""What is copied, as columns: lists that were prepared, what indices select of them, and te's
blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake.faces.nixl.descriptors import Rows
from sglang_mooncake.faces.nixl.names import InvalidParam, NotFound

__all__ = ["BLOCKS_MAX", "U64", "Columns", "Cover", "Indices", "blocks_of", "columns_of_runs"]

U64: TypeAlias = npt.NDArray[np.uint64]
Indices: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]

BLOCKS_MAX: Final = 1 << 26
"""Of one list: runs can name more with a few bytes than there is memory for."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Ranges of memory, in order; both arrays have shape (n,)."""

    starts: U64
    sizes: U64

    @classmethod
    def of_rows(cls, rows: Rows) -> Columns:
        """Of descriptors, shape (n, 3)."""
        return cls(np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1]))

    def __len__(self) -> int:
        return len(self.starts)

    def selected(self, indices: Indices) -> Columns:
        """Those at these places, in their order. ``nixlInvalidParamError`` if one is out of range,
        ``ValueError`` if they are not integers in one dimension."""
        at = np.asarray(indices)
        if at.size == 0:
            return Columns(self.starts[:0], self.sizes[:0])
        if at.ndim != 1 or at.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be integers in one dimension, not {at.shape} {at.dtype}"
            )
        if int(at.min()) < 0 or int(at.max()) >= len(self):
            raise InvalidParam(
                f"an index between {int(at.min())} and {int(at.max())} is out of range: the list"
                f" has {len(self)}"
            )
        return Columns(self.starts[at], self.sizes[at])


def columns_of_runs(runs: npt.NDArray[Any]) -> Columns:
    """Of runs of blocks, shape (n, 5): address, bytes, device, bytes from one block to the next,
    number of blocks. ``ValueError`` for another shape, dtype or more than `BLOCKS_MAX` blocks."""
    if runs.ndim != 2 or runs.shape[1] != 5 or runs.dtype not in (np.uint64, np.int64):
        raise ValueError(
            f"runs need shape (n, 5) of uint64 or int64, not {runs.shape} {runs.dtype}"
        )
    rows = runs.astype(np.uint64, copy=False)
    counts = rows[:, 4]
    if float(counts.sum(dtype=np.float64)) > BLOCKS_MAX:
        raise ValueError(f"runs of {counts.sum(dtype=np.float64):.0f} blocks; {BLOCKS_MAX} may be")
    numbers = counts.astype(np.intp)
    firsts = np.cumsum(numbers) - numbers
    within = np.arange(int(numbers.sum()), dtype=np.uint64) - np.repeat(firsts, numbers).astype(
        np.uint64
    )
    starts = np.repeat(rows[:, 0], numbers) + within * np.repeat(rows[:, 3], numbers)
    return Columns(starts, np.repeat(rows[:, 1], numbers))


class Cover:
    """The memory that some ranges cover together: one that lies in two adjacent ones is covered."""

    def __init__(self, ranges: npt.NDArray[np.uint64]) -> None:
        """``ranges``: shape (n, 2) of (address, bytes), in any order, overlapping or not."""
        order = np.argsort(ranges[:, 0], kind="stable")
        starts = ranges[order, 0]
        ends = np.maximum.accumulate(starts + ranges[order, 1]) if len(order) else starts
        # A piece begins where all before it have ended.
        begins = np.ones(len(starts), bool)
        begins[1:] = starts[1:] > ends[:-1]
        lasts = np.append(np.flatnonzero(begins)[1:] - 1, len(starts) - 1)
        self._starts: U64 = starts[begins]
        self._ends: U64 = ends[lasts] if len(order) else ends

    def first_outside(self, columns: Columns) -> int | None:
        """The place of the first range that is not covered whole; None if all are."""
        if not len(columns):
            return None
        if not len(self._starts):
            return 0
        at = np.searchsorted(self._starts, columns.starts, side="right")
        piece = np.maximum(at, 1) - 1
        ends = self._ends[piece]
        # Sums could wrap: differences of what is in order cannot.
        inside = (at > 0) & (columns.starts <= ends)
        inside &= columns.sizes <= ends - np.minimum(columns.starts, ends)
        return None if bool(inside.all()) else int(inside.argmin())

    def check(self, columns: Columns, whose: str) -> None:
        """``nixlNotFoundError`` unless all are covered. ``whose``: the agent's name whose memory it
        is; empty for this agent."""
        first = self.first_outside(columns)
        if first is not None:
            who = f"agent {whose!r:.200} has not" if whose else "this agent has not"
            raise NotFound(
                f"descriptor {first}: {who} registered {int(columns.sizes[first])} bytes at"
                f" {int(columns.starts[first]):#x}"
            )


def blocks_of(is_read: bool, local: Columns, remote: Columns, is_merged: bool = True) -> te.Blocks:
    """What te copies between the two sides, pair by pair. Neighbours on both sides are one block.

    Raises:
        nixlInvalidParamError: the sides differ in number or in a size, or are empty, or a block is.
    """
    if len(local) != len(remote):
        raise InvalidParam(f"{len(local)} descriptors here and {len(remote)} there")
    if not len(local):
        raise InvalidParam("a transfer needs at least one descriptor")
    differ = local.sizes != remote.sizes
    if differ.any():
        i = int(differ.argmax())
        raise InvalidParam(
            f"descriptor {i} has {int(local.sizes[i])} bytes here and {int(remote.sizes[i])} there"
        )
    src, dst = (remote, local) if is_read else (local, remote)
    try:
        blocks = te.Blocks.of(src.starts, dst.starts, local.sizes)
    except ValueError as exc:
        raise InvalidParam(str(exc)) from exc
    return blocks.merged() if is_merged else blocks
