# SPDX-License-Identifier: Apache-2.0
"""What of one room's pages goes early: layers that are filled while the forward of a chunk goes on.

A chunk is announced as its layers are filled (`LayersFilled`), and later sent (`ChunkSent`); then
only what was not announced is left to write. An announcement is not a promise: a chunk that comes
with other pages is written whole, once no early write is under way any more, as one that lands late
would carry what somebody else has written into those pages since.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_mooncake.layout import EVERY_LAYER, Layers, layers_from
from sglang_mooncake.rooms.prefill_events import Chunk, LayersFilled

__all__ = ["ANNOUNCED_MAX", "EarlyLayers"]

#: Chunks of one room that are announced and not sent. With overlap scheduling two forwards are
#: under way.
ANNOUNCED_MAX = 8
_NOTHING = range(0)


@dataclass(slots=True, eq=False)
class _Announced:
    """pages: numbers, in the order of the request.
    below: of these, every layer below this number has been written or is under way."""

    pages: npt.NDArray[np.integer]
    below: int


@dataclass(slots=True, eq=False)
class EarlyLayers:
    """Of one room.

    outstanding: early writes under way.
    held: chunks that wait until there is none, in their order.
    """

    outstanding: int = 0
    held: list[Chunk] = field(default_factory=list)
    _announced: dict[int, _Announced] = field(default_factory=dict)  # by first page

    def announce(self, filled: LayersFilled, next_page: int) -> Layers | str:
        """Which layers of these pages can be written now, maybe none; or why they go late.

        next_page: where the next chunk of the room begins.
        """
        if filled.first < next_page:
            return _NOTHING  # the chunk was sent meanwhile, with all its layers
        if self.held:
            return "an announced chunk was sent with other pages"
        known = self._announced.get(filled.first)
        if known is None:
            if self._overlap(filled):
                return (
                    "chunks that overlap were announced"  # their writes could overtake each other
                )
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

    def left(self, chunk: Chunk) -> Layers:
        """Which layers of a chunk are still to be written, now that it is sent."""
        whole = self.contradicts(chunk)
        known = [self._announced.pop(first) for first in self._places(chunk)]
        return EVERY_LAYER if whole or not known else layers_from(known[0].below)

    def _overlap(self, filled: LayersFilled) -> bool:
        stop = filled.first + len(filled.pages)
        return any(
            first < stop and filled.first < first + len(one.pages)
            for first, one in self._announced.items()
        )

    def _places(self, chunk: Chunk) -> list[int]:
        return [first for first in self._announced if first < chunk.span.stop]
