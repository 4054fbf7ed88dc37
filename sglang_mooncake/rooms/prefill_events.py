# SPDX-License-Identifier: Apache-2.0
"""What can happen to rooms on the prefill side, and what is to be done about it (`prefill.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_mooncake.layout import EVERY_LAYER, Layers
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomFailed,
    RoomRequest,
    RoomWait,
    Target,
)
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.states import RoomView

__all__ = [
    "Awaited",
    "CancelWrites",
    "Chunk",
    "ChunkSent",
    "Computed",
    "Event",
    "FellBack",
    "Instruction",
    "LayersFilled",
    "Met",
    "PeerLost",
    "Requested",
    "RoomAborted",
    "Sent",
    "Tell",
    "Write",
    "WriteEnded",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of one `send()`: `pages[i]` goes to the destination's page `first + i`. How many there
    are is known at once, but which: only when the room's rules are told of the chunk."""

    pages: npt.NDArray[np.integer]
    first: int
    aux_slot: int | None  # set with the last chunk alone
    sent_s: float
    #: A list of indices or None for each of the model's kinds of state; with the last chunk alone.
    states: tuple[npt.NDArray[np.int64] | None, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.aux_slot is not None

    @property
    def span(self) -> range:
        """Its pages as positions in the room."""
        return range(self.first, self.first + len(self.pages))


# --- events: what happened ---


@dataclass(frozen=True, slots=True)
class ChunkSent:
    view: RoomView
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class LayersFilled:
    """While a forward goes on: of these pages, as in `Chunk`, every layer whose number is below
    `below` is filled. A `ChunkSent` with the same pages follows once all of them are."""

    view: RoomView
    pages: npt.NDArray[np.integer]
    first: int
    below: int
    sent_s: float


@dataclass(frozen=True, slots=True)
class Computed:
    """The pages of the whole prompt are filled. Said with the policy prefill_complete alone."""

    view: RoomView


@dataclass(frozen=True, slots=True)
class Awaited:
    peer: str
    wait: RoomWait


@dataclass(frozen=True, slots=True)
class Requested:
    peer: str
    request: RoomRequest


@dataclass(frozen=True, slots=True)
class RoomAborted:
    peer: str
    message: RoomAbort


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """early: it was a write of some layers, from before its chunk was sent."""

    view: RoomView
    failure: str | None
    early: bool = False


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    reason: str


Event = (
    Opened
    | ChunkSent
    | LayersFilled
    | Aborted
    | Broken
    | Closed
    | Computed
    | Awaited
    | Requested
    | RoomAborted
    | WriteEnded
    | PeerLost
    | Tick
)


# --- instructions: what to do about it ---


@dataclass(frozen=True, slots=True)
class Sent:
    """What one target of a room has been sent."""

    writes: int = 0
    pages: int = 0

    def with_write(self, pages: int) -> Sent:
        """With one more write, which ends the sending of so many pages."""
        return Sent(self.writes + 1, self.pages + pages)


@dataclass(frozen=True, slots=True)
class Write:
    """Write a part of one chunk into the target of one request.

    span: the pages of it, as positions in the room (`Chunk.first` is that of the chunk).
    pages: how many of these this rank has.
    sent: what this request has had so far, with this write; with the last chunk that is what the
        destination must have seen arrive.
    layers: of these pages.
    early: the forward that fills the other layers goes on, and the chunk is yet to be sent.
    """

    view: RoomView
    peer: str
    generation: int
    target: Target
    chunk: Chunk
    span: range
    pages: int
    sent: Sent
    layers: Layers = EVERY_LAYER
    early: bool = False


@dataclass(frozen=True, slots=True)
class FellBack:
    """Layers that were filled early do not go early, or went for nothing; with the reason."""

    view: RoomView
    reason: str


@dataclass(frozen=True, slots=True)
class Met:
    """All decode ranks of the room have asked: its pages can be sent."""

    view: RoomView


@dataclass(frozen=True, slots=True)
class CancelWrites:
    view: RoomView


@dataclass(frozen=True, slots=True)
class Tell:
    peer: str
    message: RoomComputed | RoomFailed


Instruction = Met | Write | CancelWrites | Tell | FellBack | Over
