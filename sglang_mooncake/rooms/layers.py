# SPDX-License-Identifier: Apache-2.0
"""What of one room's pages goes early: layers that are filled while the forward of a chunk goes on.

A chunk is announced as its layers are filled (`LayersFilled`), and later sent (`ChunkSent`); then
only what was not announced is left to write. An announcement is not a promise: a chunk that comes
with other pages is written whole, once no early write is under way any more, as one that lands late
would carry what somebody else has written into those pages since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_mooncake.layout import EVERY_LAYER, Layers, layers_from
from sglang_mooncake.rooms.prefill_events import Chunk, LayersFilled, Write

__all__ = ["ANNOUNCED_MAX", "NOTHING", "Before", "EarlyLayers"]

#: Chunks of one room that are announced and not sent. With overlap scheduling two forwards are
#: under way.
ANNOUNCED_MAX = 8
_NOTHING = range(0)


@dataclass(frozen=True, slots=True)
class Before:
    """What of a chunk's pages has gone to a peer before the chunk, and is not written again.

    page_layers: layers of pages. nbytes: of them.
    """

    page_layers: int = 0
    nbytes: int = 0


NOTHING = Before()


@dataclass(slots=True, eq=False)
class _Announced:
    """pages: numbers, in the order of the request.
    below: of these, every layer below this number has been written or is under way.
    before: what each peer has been written of them."""

    pages: npt.NDArray[np.integer]
    below: int
    before: dict[str, Before] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class EarlyLayers:
    """Of one room."""

    _announced: dict[int, _Announced] = field(default_factory=dict)  # by first page

    def announce(self, filled: LayersFilled, next_page: int) -> Layers | str:
        """Which layers of these pages can be written now, maybe none; or why they go late.

        next_page: where the next chunk of the room begins.
        """
        if filled.first < next_page:
            return _NOTHING  # the chunk was sent meanwhile, with all its layers
        known = self._announced.get(filled.first)
        if known is None:
            if self._overlap(filled):
                # Their writes could overtake each other.
                return "chunks that overlap were announced"
            if len(self._announced) >= ANNOUNCED_MAX:
                return f"{ANNOUNCED_MAX} chunks of one request were announced and not sent"
            known = self._announced[filled.first] = _Announced(np.array(filled.pages), 0)
        elif not np.array_equal(known.pages, filled.pages):
            return "a chunk was announced again with other pages"
        layers = range(known.below, max(filled.below, known.below))
        known.below = layers.stop
        return layers

    def contradicts(self, chunk: Chunk) -> bool:
        """Whether a chunk is not what was announced at its place."""
        places = self._places(chunk)
        return bool(places) and (
            places != [chunk.first]
            or not np.array_equal(self._announced[chunk.first].pages, chunk.pages)
        )

    def wrote(self, write: Write) -> None:
        """Counts an early write of an announced chunk."""
        before = self._announced[write.first].before
        so_far = before.get(write.peer, NOTHING)
        before[write.peer] = Before(
            so_far.page_layers + write.page_layers, so_far.nbytes + write.cache_nbytes
        )

    def take(self, chunk: Chunk) -> tuple[Layers, Mapping[str, Before]]:
        """The chunk is sent: which layers of it are still to be written, and what of its pages has
        been, by peer. That of a chunk that is written whole counts for nothing."""
        whole = self.contradicts(chunk)
        known = [self._announced.pop(first) for first in self._places(chunk)]
        if whole or not known:
            return EVERY_LAYER, {}
        return layers_from(known[0].below), known[0].before

    def _overlap(self, filled: LayersFilled) -> bool:
        stop = filled.first + len(filled.pages)
        return any(
            first < stop and filled.first < first + len(one.pages)
            for first, one in self._announced.items()
        )

    def _places(self, chunk: Chunk) -> list[int]:
        return [first for first in self._announced if first < chunk.span.stop]
