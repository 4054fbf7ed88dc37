# SPDX-License-Identifier: Apache-2.0
"""A decode rank that has asked for a room, and what it has been sent: each write's blocks, and in
the end the completion record. Pure: a plan is arithmetic on the two ranks' layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake import messages
from sglang_mooncake.layout import (
    COMPLETION_BYTES,
    EVERY_LAYER,
    Cells,
    CompletionRecord,
    Layers,
    Named,
)
from sglang_mooncake.layout.indices import Indices
from sglang_mooncake.messages import RoomRequest, Target
from sglang_mooncake.rooms.layers import NOTHING, Before
from sglang_mooncake.rooms.prefill_events import Chunk, Write
from sglang_mooncake.rooms.room import Room

__all__ = ["PairCells", "PairPlan", "Recipient"]


class PairCells(Protocol):
    """What the rules need of a `layout.pair_cells.PairCells`."""

    def of_source(
        self,
        positions: Indices,
        pages: Indices,
        states: Sequence[Indices | None] = (),
        target_states: Sequence[Indices | None] = (),
        aux_slot: int | None = None,
    ) -> tuple[Cells, ...]: ...


class PairPlan(Protocol):
    """What the rules need of a `layout.Plan`; see there for shapes and errors."""

    @property
    def cells(self) -> PairCells: ...
    def layer_count(self, layers: Layers = EVERY_LAYER) -> int: ...
    def part(
        self,
        pages: npt.NDArray[np.integer],
        first: int,
        named: Named,
        layers: Layers = EVERY_LAYER,
    ) -> te.Blocks: ...
    def state(
        self,
        source_indices: Sequence[npt.ArrayLike | None],
        target_indices: Sequence[npt.ArrayLike | None],
    ) -> te.Blocks: ...
    def aux(self, source_slot: int, target_slot: int) -> te.Blocks: ...


@dataclass(slots=True, eq=False)
class Recipient:
    """
    plan: of the copy to this rank, as it was when the rank asked.
    writes: so far.
    pages: of chunks that were sent.
    page_layers: layers of these pages, each counted once, whether they went with the chunk or
        before it.
    nbytes: payload of all writes so far.
    copied_nbytes: of these, what digests are made of: without the completion record, and without
        layers that are written again as they were announced with other pages.
    is_digested: whether digests follow its completion record; known with the last write.
    sent: pages of chunks that were sent, as positions in the room and numbers.
    """

    request: RoomRequest
    plan: PairPlan
    writes: int = 0
    pages: int = 0
    page_layers: int = 0
    nbytes: int = 0
    copied_nbytes: int = 0
    is_digested: bool = False
    sent: list[tuple[range, Indices]] = field(default_factory=list)

    def write_early(
        self, room: Room, peer: str, chunk: Chunk, span: range, pages: int, layers: Layers
    ) -> Write:
        """The next write: layers of a chunk that is yet to be sent. See `write`."""
        page_layers = pages * self.plan.layer_count(layers)
        return self._next(room, peer, chunk, span, pages, layers, page_layers, early=True)

    def write(
        self,
        room: Room,
        peer: str,
        chunk: Chunk,
        span: range,
        pages: int,
        layers: Layers = EVERY_LAYER,
        before: Before = NOTHING,
    ) -> Write:
        """The next write: a chunk that is sent.

        Args:
            span: the pages of it, as positions in the room, of which this rank has `pages`.
            layers: of these pages, those that are to be written.
            before: what of these pages went before.

        Raises:
            ValueError: the numbers of pages, state or metadata that one side has named do not fit
                the layouts of both.
        """
        page_layers = pages * self.plan.layer_count(layers)
        self.pages += pages
        self.page_layers += page_layers + before.page_layers
        self.sent.append((span, _pages_of(chunk, span)))
        write = self._next(room, peer, chunk, span, pages, layers, page_layers, early=False)
        self.copied_nbytes += write.blocks.total_nbytes + before.nbytes
        return write

    def _next(
        self,
        room: Room,
        peer: str,
        chunk: Chunk,
        span: range,
        pages: int,
        layers: Layers,
        page_layers: int,
        *,
        early: bool,
    ) -> Write:
        target = self.request.target
        assert target is not None, "a rank that wants no byte is sent none"
        cached = self._cached(target, chunk, span, layers)
        blocks = cached
        if chunk.aux_slot is not None and target.aux_slot is not None:
            blocks = te.Blocks.concat([cached, self.plan.aux(chunk.aux_slot, target.aux_slot)])
        self.writes += 1
        self.nbytes += blocks.total_nbytes + (COMPLETION_BYTES if chunk.is_last else 0)
        completion = self._completion(target, chunk) if chunk.is_last else None
        return Write(
            room,
            peer,
            self.writes,
            target,
            chunk.first,
            span,
            pages,
            layers,
            page_layers,
            early,
            blocks,
            cached.total_nbytes,
            completion,
        )

    def _cached(self, target: Target, chunk: Chunk, span: range, layers: Layers) -> te.Blocks:
        """Blocks of caches and state."""
        ours = _pages_of(chunk, span)
        first, end = span.start // target.page_span, -(-span.stop // target.page_span)
        wanted, device = slice(4 * first, 4 * end), target.device_pages
        named = Named(
            messages.indices_from_bytes(target.pages[wanted]),
            None if device is None else messages.indices_from_bytes(device[wanted]),
            self.request.decode_prefix_len,
            first,
        )
        parts = [self.plan.part(ours, span.start, named, layers)]
        if chunk.is_last:
            parts.append(self.plan.state(chunk.states, messages.states_from_bytes(target.states)))
        return te.Blocks.concat(parts)

    def cells(self, last: Chunk) -> tuple[Cells, ...]:
        """All that was sent. last: the last chunk."""
        target = self.request.target
        assert target is not None, "a rank that wants no byte is sent none"
        return self.plan.cells.of_source(
            np.concatenate([np.arange(span.start, span.stop) for span, _ in self.sent]),
            np.concatenate([pages for _, pages in self.sent]),
            last.states,
            messages.states_from_bytes(target.states),
            None if target.aux_slot is None else last.aux_slot,
        )

    def _completion(self, target: Target, chunk: Chunk) -> CompletionRecord:
        lists = zip(chunk.states, target.states, strict=False)
        return CompletionRecord(
            self.request.generation,
            self.writes,
            self.pages,
            self.page_layers,
            states=sum(ours is not None and theirs is not None for ours, theirs in lists),
            aux=int(target.aux_slot is not None),
            digests=int(self.is_digested),
            nbytes=self.nbytes,
        )


def _pages_of(chunk: Chunk, span: range) -> Indices:
    """The pages of a chunk at these positions of the room."""
    return chunk.pages[span.start - chunk.first : span.stop - chunk.first].astype(np.int64)
