# SPDX-License-Identifier: Apache-2.0
"""What can happen to rooms on the prefill side, and what is to be done about it (`prefill.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    "Instruction",
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
    view: RoomView
    failure: str | None


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    reason: str


Event = (
    Opened
    | ChunkSent
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
        """With one more write, of so many pages."""
        return Sent(self.writes + 1, self.pages + pages)


@dataclass(frozen=True, slots=True)
class Write:
    """Write a part of one chunk into the target of one request.

    span: the pages of it, as positions in the room (`Chunk.first` is that of the chunk).
    sent: what this request has had so far, with this write; with the last chunk that is what the
        destination must have seen arrive.
    """

    view: RoomView
    peer: str
    generation: int
    target: Target
    chunk: Chunk
    span: range
    sent: Sent


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


Instruction = Met | Write | CancelWrites | Tell | Over
