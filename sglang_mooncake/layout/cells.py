# SPDX-License-Identifier: Apache-2.0
"""Cells, by which two ranks compare what was copied between them: a cell is what one item of an
index list has in one buffer, as far as this pair of ranks copies it. Of KV caches that is a page in
one layer of one component, or the heads of it that both ranks hold.

Both ranks list the same cells in the same order, each with the addresses of its own memory. So
equal bytes have equal digests, wherever a page lies, and however TP or stages cut it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_mooncake.layout.indices import Indices

__all__ = [
    "Cells",
    "Difference",
    "Digests",
    "DigestsDisagree",
    "Read",
    "Shape",
    "bytes_of",
    "differences",
    "digest",
]

U64 = npt.NDArray[np.uint64]
#: The digests of units of one shape: their addresses, and the offsets and sizes of a unit's pieces
#: (`te.Digester.digests`).
Read = Callable[[U64, U64, U64], U64]
Bytes = npt.NDArray[np.uint8]
#: The same with the bytes of which these are, shape (units, bytes of one).
ReadBytes = Callable[[U64, U64, U64], tuple[Bytes, U64]]
#: Of one piece of work, which takes a core some milliseconds: others have to wait for it.
CELLS_AT_ONCE = 4_096
NBYTES_AT_ONCE = 16 << 20
#: Of the bytes that are read of a difference: such a piece takes a core 1 ms, where 4,096 cells of
#: 4 KiB took it 55 ms.
CELLS_KEPT_MAX, CELLS_READ_AT_ONCE = 4_096, 512
NBYTES_KEPT_MAX, NBYTES_READ_AT_ONCE = 16 << 20, 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Buffers whose items are cut alike.

    names: what each buffer caches, for sentences, as "K of layer 3"; len (buffers,).
    addresses: of the buffers, shape (buffers,).
    stride: bytes from one item to the next.
    offsets, sizes: of the pieces of an item that are copied, in bytes, shape (pieces,).
    """

    names: tuple[str, ...]
    addresses: U64
    stride: int
    offsets: U64
    sizes: U64

    @property
    def nbytes(self) -> int:
        """Of one cell."""
        return int(self.sizes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """All cells of one index list, on one side. Number `i * columns + c` is item i in buffer c,
    counted through all shapes.

    name: what the list names: "page", or a state of the model.
    which: which of the lists it is, the same on both sides.
    positions: of the items in the request, rising, shape (items,).
    items: which items these are on this side, shape (items,).
    """

    name: str
    which: int
    positions: Indices
    items: Indices
    shapes: tuple[Shape, ...]

    @property
    def columns(self) -> int:
        return sum(len(shape.addresses) for shape in self.shapes)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the buffers."""
        return tuple(name for shape in self.shapes for name in shape.names)

    def __len__(self) -> int:
        return len(self.positions) * self.columns

    @property
    def nbytes(self) -> int:
        """Of all cells."""
        of_item = sum(shape.nbytes * len(shape.addresses) for shape in self.shapes)
        return of_item * len(self.positions)

    def places(self, chosen: Indices) -> tuple[Indices, Indices]:
        """Item and buffer of each of these cells."""
        return np.divmod(chosen, self.columns)

    def digests(self, chosen: Indices, read: Read) -> U64:
        """Of these cells, each mixed with its place: cells that are exchanged differ."""
        item, column = self.places(chosen)
        found = np.empty(len(chosen), np.uint64)
        for here, shape, at in self._units(item, column):
            found[here] = read(at, shape.offsets, shape.sizes)
        positions = self.positions[item].astype(np.uint64) << np.uint64(32)
        places = _mixed(positions | column.astype(np.uint64))
        return _mixed(found ^ places)

    def _units(
        self, item: Indices, column: Indices
    ) -> Iterator[tuple[npt.NDArray[np.bool_], Shape, U64]]:
        """Of these cells, those of each shape, and their addresses."""
        first = 0
        for shape in self.shapes:
            here = (column >= first) & (column < first + len(shape.addresses))
            begins = shape.addresses[column[here] - first]
            at = begins + self.items[item[here]].astype(np.uint64) * np.uint64(shape.stride)
            yield here, shape, at
            first += len(shape.addresses)

    def numbers(self, positions: Sequence[int], buffers: Sequence[str]) -> Indices:
        """Of each of these items, by its position, in each of these buffers."""
        column_of = {name: column for column, name in enumerate(self.names)}
        columns = np.array([column_of[name] for name in buffers], np.int64)
        items = np.searchsorted(self.positions, positions)
        return (items[:, None] * self.columns + columns).ravel()

    def first_of(self, chosen: Indices, nbytes_max: int) -> Indices:
        """The first of these cells, which have no more bytes than that."""
        nbytes = np.repeat(
            [shape.nbytes for shape in self.shapes],
            [len(shape.addresses) for shape in self.shapes],
        )
        _, column = self.places(chosen)
        count = int(np.searchsorted(np.cumsum(nbytes[column]), nbytes_max, side="right"))
        return chosen[:count]

    def read(self, chosen: Indices, read: ReadBytes) -> dict[str, Bytes]:
        """The bytes of these cells, by name."""
        item, column = self.places(chosen)
        names, found = self.names, dict[str, Bytes]()
        for here, shape, at in self._units(item, column):
            if len(at):
                copied, _ = read(at, shape.offsets, shape.sizes)
                where = zip(self.positions[item[here]], column[here], copied, strict=True)
                found |= {f"{self.name} {pos} in {names[col]}": one for pos, col, one in where}
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Digests:
    """What one side tells of the chosen cells of one index list.

    which, positions: see `Cells`.
    of_items: a digest of each item's chosen cells, shape (items,); 0 of one without any.
    of_buffers: a digest of each buffer's chosen cells, shape (columns,).
    """

    which: int
    positions: Indices
    of_items: U64
    of_buffers: U64


def digest(
    lists: Sequence[Cells], chosen: Indices | range, read: Read
) -> Iterator[tuple[Digests, ...]]:
    """Digests of the chosen cells, in pieces of bounded work: each yields the lists that it has
    ended, in their order, most of them none.

    Args:
        chosen: rising numbers of cells, counted through all lists; a range is of all.
    """
    for cells, mine in _parts(lists, chosen):
        yield from _digests(cells, mine, read)


def _parts(
    lists: Sequence[Cells], chosen: Indices | range
) -> Iterator[tuple[Cells, Indices | range]]:
    """Each list with the numbers of its own chosen cells."""
    begin = 0
    for cells in lists:
        mine: Indices | range = range(len(cells))
        if not isinstance(chosen, range):
            span = np.searchsorted(chosen, (begin, begin + len(cells)))
            mine = chosen[span[0] : span[1]] - begin
        yield cells, mine
        begin += len(cells)


def _digests(cells: Cells, chosen: Indices | range, read: Read) -> Iterator[tuple[Digests, ...]]:
    of_items = np.zeros(len(cells.positions), np.uint64)
    of_buffers = np.zeros(cells.columns, np.uint64)
    largest = max((shape.nbytes for shape in cells.shapes), default=1)
    at_once = max(min(CELLS_AT_ONCE, NBYTES_AT_ONCE // largest), 1)
    for first in range(0, len(chosen), at_once):
        if first:
            yield ()
        some = np.asarray(chosen[first : first + at_once], np.int64)
        found = cells.digests(some, read)
        item, column = cells.places(some)
        # They differ where any cell does: each is mixed, so that none takes another's place.
        np.bitwise_xor.at(of_items, item, found)
        np.bitwise_xor.at(of_buffers, column, found)
    yield (Digests(cells.which, cells.positions, of_items, of_buffers),)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where one index list's cells differ: in which of its items and buffers, by position.

    name: what the list names; which: of the lists it is. buffers: by name.
    """

    name: str
    which: int
    items: tuple[int, ...]
    buffers: tuple[str, ...]


class DigestsDisagree(ValueError):
    """The two sides do not say the same of what was handed over: as bad as bytes that differ."""


def differences(
    lists: Sequence[Cells], ours: Sequence[Digests], theirs: Sequence[Digests]
) -> list[Difference]:
    """Where the digests of two sides differ; `lists` are ours. One changed cell is named exactly,
    several by all their items and all their buffers.

    Raises:
        DigestsDisagree: they are not of the same cells.
    """
    found = []
    for cells, one, other in zip(lists, ours, theirs, strict=True):
        if one.which != other.which or len(one.of_buffers) != len(other.of_buffers):
            raise DigestsDisagree(f"{cells.name}: digests of other buffers")
        if not np.array_equal(one.positions, other.positions):
            raise DigestsDisagree(f"{cells.name}: digests of other items")
        items = np.flatnonzero(one.of_items != other.of_items)
        buffers = np.flatnonzero(one.of_buffers != other.of_buffers)
        if len(items) or len(buffers):
            positions = tuple(cells.positions[items].tolist())
            names = _named(cells.names, buffers)
            found.append(Difference(cells.name, cells.which, positions, names))
    return found


def bytes_of(
    lists: Sequence[Cells],
    differ: Sequence[Difference],
    chosen: Indices | range,
    read: ReadBytes,
) -> Iterator[dict[str, Bytes]]:
    """The bytes of cells that differ, by name, in pieces of bounded work: of some of the first
    (`CELLS_KEPT_MAX`, `NBYTES_KEPT_MAX`), or of the very first alone if it has more.

    Args:
        chosen: see `digest`; no others are read.
    """
    cells_left, nbytes_left, is_first = CELLS_KEPT_MAX, NBYTES_KEPT_MAX, True
    of = {cells.which: (cells, mine) for cells, mine in _parts(lists, chosen)}
    for one in differ:
        cells, mine = of[one.which]
        # Not the numbers of all cells of a request of which everything differs.
        items = one.items[: cells_left // max(len(one.buffers), 1) + 1]
        numbers = cells.numbers(items, one.buffers)
        if not isinstance(mine, range):
            numbers = np.intersect1d(numbers, mine, assume_unique=True)
        numbers = numbers[:cells_left]
        fits = cells.first_of(numbers, nbytes_left)
        left = fits if len(fits) or not is_first else numbers[:1]
        while len(left):
            some = cells.first_of(left[:CELLS_READ_AT_ONCE], NBYTES_READ_AT_ONCE)
            count = max(len(some), 1)
            copied = cells.read(left[:count], read)
            cells_left -= count
            nbytes_left -= sum(len(cell) for cell in copied.values())
            left, is_first = left[count:], False
            yield copied


def _named(names: tuple[str, ...], which: Indices) -> tuple[str, ...]:
    return tuple(names[at] for at in which)


def _mixed(words: U64) -> U64:
    """splitmix64's last steps: each bit of a word changes half of the others."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
