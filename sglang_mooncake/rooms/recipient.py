# SPDX-License-Identifier: Apache-2.0
"""A decode rank that has asked for a room, and what it has been sent: each write's blocks, and in
the end the completion record. Pure: a plan is arithmetic on the two ranks' layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake import messages
from sglang_mooncake.layout import COMPLETION_BYTES, EVERY_LAYER, CompletionRecord, Layers, Named
from sglang_mooncake.messages import RoomRequest, Target
from sglang_mooncake.rooms.prefill_events import Chunk, Write
from sglang_mooncake.rooms.room import Room

__all__ = ["PairPlan", "Recipient"]


class PairPlan(Protocol):
    """What the rules need of a `layout.Plan`; see there for shapes and errors."""

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
    """

    request: RoomRequest
    plan: PairPlan
    writes: int = 0
    pages: int = 0
    page_layers: int = 0
    nbytes: int = 0

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
        early_page_layers: int = 0,
    ) -> Write:
        """The next write: a chunk that is sent.

        Args:
            span: the pages of it, as positions in the room, of which this rank has `pages`.
            layers: of these pages, those that are to be written.
            early_page_layers: how many layers of these pages went before.

        Raises:
            ValueError: the numbers of pages, state or metadata that one side has named do not fit
                the layouts of both.
        """
        page_layers = pages * self.plan.layer_count(layers)
        self.pages += pages
        self.page_layers += page_layers + early_page_layers
        return self._next(room, peer, chunk, span, pages, layers, page_layers, early=False)

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
        ours = chunk.pages[span.start - chunk.first : span.stop - chunk.first]
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

    def _completion(self, target: Target, chunk: Chunk) -> CompletionRecord:
        lists = zip(chunk.states, target.states, strict=False)
        return CompletionRecord(
            self.request.generation,
            self.writes,
            self.pages,
            self.page_layers,
            states=sum(ours is not None and theirs is not None for ours, theirs in lists),
            aux=int(target.aux_slot is not None),
            nbytes=self.nbytes,
        )
