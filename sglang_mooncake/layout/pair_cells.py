# SPDX-License-Identifier: Apache-2.0
"""The cells that a pair of ranks has in common for one request, as each of the two lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_mooncake.layout.cells import Cells, DigestsDisagree, Shape
from sglang_mooncake.layout.description import Layout
from sglang_mooncake.layout.indices import Indices, in_rows, owned, ring_slots, rows_of
from sglang_mooncake.layout.shares import Indexed, Share

__all__ = ["PairCells", "Sent"]

U64 = npt.NDArray[np.uint64]
_State = Indices | None
#: Which list: the first three, behind them the model's states, then the metadata.
_KV, _DEVICE, _DRAFT_ROWS, _STATES = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Sent:
    """What a prefill rank says that it has sent, beside what it has made digests of.

    pages: of the KV pool.
    nbytes: of all cells, as it has counted its writes.
    """

    pages: int
    nbytes: int


class PairCells:
    """Of a `Plan`.

    Args:
        paged: what the pages name: of the KV pool, of the device, and the draft model's rows, where
            pages are cut into their rows.
        states: what each list of state indices names.
        aux: addresses on both sides and sizes of the metadata buffers, each of shape (buffers,).
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        paged: tuple[Indexed, Indexed, Indexed | None],
        states: Sequence[Indexed],
        aux: tuple[U64, U64, U64],
    ) -> None:
        self._source, self._target = source, target
        self._kv, self._device, self._draft_rows = paged
        self._states, self._aux = states, aux

    @property
    def _metadata(self) -> int:
        """Which list that is."""
        return _STATES + len(self._states)

    def of_source(
        self,
        positions: Indices,
        pages: Indices,
        states: Sequence[_State] = (),
        target_states: Sequence[_State] = (),
        aux_slot: int | None = None,
    ) -> tuple[Cells, ...]:
        """As the prefill rank has them.

        Args:
            positions: of its pages in the request, rising, shape (pages,).
            pages: their numbers.
            states, target_states: lists of both sides; a list that one side lacks is left out.
            aux_slot: of the request's metadata; None if another rank sends it.
        """
        dealt, made = self._source.pages_dealt, []
        if self._draft_rows is None:
            here, mine = _own(pages, positions, dealt.of > 1 and owned(pages, dealt), dealt.of)
            made.append(self._cells(_KV, "page", self._kv, mine, here, 0))
            made.append(self._cells(_DEVICE, "device page", self._device, mine, here, 0))
        else:
            size = self._source.page_size
            at, rows = in_rows(positions, size), in_rows(pages, size)
            kept = owned(at, self._target.tokens_dealt)
            made.append(self._cells(_KV, "token", self._kv, at[kept], rows[kept], 0))
            made.append(self._cells(_DRAFT_ROWS, "token", self._draft_rows, at, rows, 0))
        for i, ours, theirs in _both(states, target_states, len(self._states)):
            name, indexed = self._source.states[i], self._states[i]
            if indexed.segments:
                items, ring = _slots(name, ours, indexed.source_items)
                at = np.arange(len(items))
            else:
                ring, common = 0, min(len(ours), len(theirs))
                items, at = ours[:common], np.arange(common)
                items, at = _own(items, at, dealt.of > 1 and owned(items, dealt), dealt.of)
            made.append(self._cells(_STATES + i, name, indexed, at, items, 0, ring))
        if aux_slot is not None:
            made.append(self._metadata_cells(0, aux_slot))
        return tuple(cells for cells in made if len(cells))

    def of_target(
        self,
        digested: Iterable[tuple[int, Indices]],
        pages: Indices,
        device_pages: Indices | None = None,
        states: Sequence[_State] = (),
        aux_slot: int | None = None,
        sent: Sent | None = None,
    ) -> tuple[Cells, ...]:
        """The same cells as the decode rank has them.

        Args:
            digested: of each list of the prefill rank, which it is, and the positions in it.
            pages, device_pages, states, aux_slot: what this rank has named for the request.
            sent: what the cells must add up to; None if that is not known.

        Raises:
            DigestsDisagree: it has not named these, or they are not all; with what differs.
        """
        told = dict(digested)
        if aux_slot is not None and len(self._aux[2]) and self._metadata not in told:
            raise DigestsDisagree("no digests of metadata")
        if sent is not None:
            self._check_pages(told, sent.pages)
        made = tuple(
            self._on_target(which, at, pages, device_pages, states, aux_slot)
            for which, at in told.items()
        )
        if sent is not None:
            self._check_bytes(made, sent.nbytes, states)
        return made

    def _check_pages(self, told: Mapping[int, Indices], pages_sent: int) -> None:
        by_row = self._draft_rows is not None
        for which, name, indexed, of_page in (
            (_KV, "page", None if by_row else self._kv, 1),
            (_DEVICE, "device page", None if by_row else self._device, 1),
            (_DRAFT_ROWS, "token", self._draft_rows, self._source.page_size),
        ):
            count = len(told.get(which, ()))
            if indexed is None or not indexed.shares or count == pages_sent * of_page:
                continue
            raise DigestsDisagree(f"digests of {count} {name}s, and {pages_sent} pages were sent")

    def _check_bytes(
        self, made: Sequence[Cells], nbytes_sent: int, states: Sequence[_State]
    ) -> None:
        """Each byte of a request is one cell's: whatever is missing is missing here."""
        nbytes = sum(cells.nbytes for cells in made)
        if nbytes == nbytes_sent:
            return
        named = {_STATES + i for i, items in enumerate(states) if items is not None and len(items)}
        missing = sorted(named - {cells.which for cells in made})
        lists = ", ".join(self._target.states[which - _STATES] for which in missing)
        none = f", and none of {lists}" if missing else ""
        raise DigestsDisagree(f"digests of {nbytes} bytes{none}; {nbytes_sent} bytes were sent")

    def _on_target(
        self,
        which: int,
        at: Indices,
        pages: Indices,
        device_pages: Indices | None,
        states: Sequence[_State],
        aux_slot: int | None,
    ) -> Cells:
        if len(at) and (at[0] < 0 or (at[1:] <= at[:-1]).any()):
            raise DigestsDisagree("positions of digests that do not rise from 0")
        if which == self._metadata:
            if aux_slot is None or at.tolist() != [0]:
                raise DigestsDisagree("digests of metadata that was not asked for")
            return self._metadata_cells(1, aux_slot)
        if which in (_KV, _DRAFT_ROWS) and self._draft_rows is not None:
            size = self._target.page_size
            dealt_over = 1 if which == _KV else self._target.tokens_dealt.of
            at_row = at // self._target.tokens_dealt.of if which == _KV else at
            of_page = size * dealt_over
            _check(at_row, len(pages) * of_page, "token")
            indexed = self._kv if which == _KV else self._draft_rows
            return self._cells(which, "token", indexed, at, rows_of(pages, at_row, of_page), 1)
        if which in (_KV, _DEVICE):
            name, indexed = ("page", self._kv) if which == _KV else ("device page", self._device)
            theirs = pages if which == _KV else device_pages
            return self._cells(which, name, indexed, at, _named(name, theirs, at), 1)
        i = which - _STATES
        if not 0 <= i < len(states):
            raise DigestsDisagree(f"digests of a list {which} that was not asked for")
        name, indexed, ring, items = self._target.states[i], self._states[i], 0, states[i]
        if indexed.segments and items is not None:
            items, ring = _slots(name, items, indexed.target_items)
        return self._cells(which, name, indexed, at, _named(name, items, at), 1, ring)

    def _cells(
        self,
        which: int,
        name: str,
        indexed: Indexed,
        positions: Indices,
        items: Indices,
        side: int,
        ring: int = 0,
    ) -> Cells:
        shapes = tuple(_shape(share, side, ring) for share in indexed.shares)
        return Cells(name, which, positions, items, shapes)

    def _metadata_cells(self, side: int, slot: int) -> Cells:
        addresses, sizes = self._aux[side], self._aux[2]
        shapes = tuple(
            Shape(
                (f"metadata {i}",),
                addresses[i : i + 1],
                int(sizes[i]),
                np.zeros(1, np.uint64),
                sizes[i : i + 1],
            )
            for i in range(len(addresses))
        )
        one = np.zeros(1, np.int64)
        return Cells("metadata", self._metadata, one, one + slot, shapes)


def _shape(share: Share, side: int, ring: int) -> Shape:
    """ring: the items are slots of rings, of which so many make a row."""
    addresses = (share.source, share.target)[side]
    item, rows = (share.source_item, share.target_item)[side], share.pieces.array
    offsets, sizes = rows["src" if side == 0 else "dst"], rows["nbytes"]
    if ring:
        item //= ring
        offsets, sizes = np.zeros(1, np.uint64), np.array([item], np.uint64)
    return Shape(
        share.names, addresses, item, np.ascontiguousarray(offsets), np.ascontiguousarray(sizes)
    )


def _slots(name: str, segments: Indices, items: int) -> tuple[Indices, int]:
    """None of a request without a live slot."""
    return ring_slots(name, segments, items) if len(segments) else (segments, 1)


def _own(
    items: Indices, positions: Indices, mine: npt.NDArray[np.bool_] | bool, of: int
) -> tuple[Indices, Indices]:
    """Of items that are dealt out by their numbers, those that are here, by their places."""
    if mine is False:
        return items, positions
    return items[mine] // of, positions[mine]


def _both(
    ours: Sequence[_State], theirs: Sequence[_State], count: int
) -> Iterator[tuple[int, Indices, Indices]]:
    for i, one, other in zip(range(count), ours, theirs, strict=False):
        if one is not None and other is not None:
            yield i, one, other


def _named(name: str, items: _State, at: Indices) -> Indices:
    if items is None:
        raise DigestsDisagree(f"digests of a {name}, and none was asked for")
    _check(at, len(items), name)
    return items[at]


def _check(at: Indices, count: int, name: str) -> None:
    if len(at) and at[-1] >= count:
        raise DigestsDisagree(f"digests of {name} {int(at[-1])}, and {count} were asked for")
