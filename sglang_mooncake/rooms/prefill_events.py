# SPDX-License-Identifier: Apache-2.0
"""What can happen to rooms on the prefill side, and what is to be done about it (`prefill.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake.layout import Cells, CompletionRecord, Layers, Verify
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomDiffers,
    RoomDigests,
    RoomFailed,
    RoomRequest,
    RoomWait,
    Target,
)
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.write_story import WriteStory

__all__ = [
    "AwaitEvents",
    "CancelWrites",
    "Chunk",
    "ChunkSent",
    "Computed",
    "Differed",
    "Digest",
    "Digested",
    "Event",
    "EventsHappened",
    "FellBack",
    "Instruction",
    "LayersFilled",
    "LookAgain",
    "Met",
    "Misdirected",
    "PeerLost",
    "Requested",
    "RoomAborted",
    "StreamEvent",
    "Tell",
    "Undigested",
    "WaitsForPrompt",
    "Write",
    "WriteBegan",
    "WriteEnded",
]


class StreamEvent(Protocol):
    """An event that was recorded on a device's stream: `torch.cuda.Event` and its likes."""

    def query(self) -> bool:
        """Whether the stream has come to it. Raises what went wrong on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of one `send()`: `pages[i]` goes to the destination's page `first + i`. How many there
    are is known at once, but which: only when the events before the chunk have happened."""

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
    """events: nothing of the chunk is read before these have happened."""

    room: Room
    chunk: Chunk
    events: Sequence[StreamEvent] = ()


@dataclass(frozen=True, slots=True)
class LayersFilled:
    """While a forward goes on: of these pages, as in `Chunk`, every layer whose number is below
    `below` is filled once `events` have happened. A `ChunkSent` with the same pages follows when
    all of them are."""

    room: Room
    pages: npt.NDArray[np.integer]
    first: int
    below: int
    sent_s: float
    events: Sequence[StreamEvent] = ()


@dataclass(frozen=True, slots=True)
class EventsHappened:
    """Those of the room's oldest `AwaitEvents` that was not answered. failure: why they never
    will."""

    room: Room
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """The pages of the whole prompt are filled. Said with the policy prefill_complete alone."""

    room: Room


@dataclass(frozen=True, slots=True)
class Misdirected:
    """The request seems to lead decode ranks to another address than this instance's: the room does
    not wait long for a first one. reason: of its end then."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class WaitsForPrompt:
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
class WriteBegan:
    """The engine has a write of this room."""

    room: Room
    at_s: float


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The `nth` write to a peer, which may be said more than once.

    failure: why it failed; None if all of it has landed.
    story: what is told of it; None of one that never began.
    """

    room: Room
    peer: str
    nth: int
    failure: str | None
    story: WriteStory | None = None


@dataclass(frozen=True, slots=True)
class Digested:
    """What came of a `Digest`.

    message: for the peer; None if there are no digests.
    failure: why not; None if the room has ended meanwhile.
    """

    room: Room
    peer: str
    message: RoomDigests | None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Differed:
    """A decode rank has found that other bytes have arrived than were sent."""

    peer: str
    message: RoomDiffers


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: str
    reason: str


Event = (
    Opened
    | ChunkSent
    | LayersFilled
    | EventsHappened
    | Aborted
    | Broken
    | Closed
    | Computed
    | Misdirected
    | WaitsForPrompt
    | Requested
    | RoomAborted
    | WriteBegan
    | WriteEnded
    | Digested
    | Differed
    | PeerLost
    | Tick
)


# --- instructions: what to do about it ---


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Write these blocks into the target of one request; `WriteEnded` follows in any case.

    nth: write to this peer for this room, counted from 1.
    first: where its chunk begins (`Chunk.first`).
    span: the pages of it, as positions in the room.
    pages: how many of these this rank has.
    layers: of these pages.
    page_layers: how many of them that are, each page counted with each of its layers.
    early: the forward that fills the other layers goes on, and the chunk is yet to be sent.
    blocks: all of it, but for the completion record.
    cache_nbytes: of their bytes those of caches and state, without metadata.
    completion: the last write of the room carries it, behind all blocks.
    """

    room: Room
    peer: str
    nth: int
    target: Target
    first: int
    span: range
    pages: int
    layers: Layers
    page_layers: int
    early: bool
    blocks: te.Blocks
    cache_nbytes: int
    completion: CompletionRecord | None

    @property
    def key(self) -> tuple[str, int]:
        """Tells it from the other writes of its room."""
        return self.peer, self.nth


@dataclass(frozen=True, slots=True, eq=False)
class Digest:
    """The last write to a peer has begun, and its completion record announces digests: make them of
    these cells; `Digested` follows. The room keeps its pages until then, or `Deadlines.digest_s`.

    nbytes: of all cells, as their writes count them.
    lists: the cells, for the thread that reads them; raises ValueError.
    """

    room: Room
    peer: str
    generation: int
    verify: Verify
    nbytes: int
    lists: Callable[[], tuple[Cells, ...]]


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Say in the log whether the memory of this rank still has what was sent to this peer. The room
    may be over, and its pages another's: digests tell."""

    peer: str
    message: RoomDiffers


@dataclass(frozen=True, slots=True)
class Undigested:
    """Say in the log why digests of this room are waited for no more."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class AwaitEvents:
    """Say `EventsHappened` once all of these have happened, if the room goes on until then."""

    room: Room
    events: Sequence[StreamEvent]


@dataclass(frozen=True, slots=True)
class FellBack:
    """Layers that were filled early do not go early, or went for nothing; with the reason."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class Met:
    """All decode ranks of the room have asked: its pages can be sent."""

    room: Room


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """Ask these to stop (`Write.key`); each still ends, asked or not."""

    room: Room
    keys: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Tell:
    peer: str
    message: RoomComputed | RoomDigests | RoomFailed


Instruction = (
    Met
    | AwaitEvents
    | Write
    | Digest
    | Undigested
    | LookAgain
    | CancelWrites
    | Tell
    | FellBack
    | Over
)
