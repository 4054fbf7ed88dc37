# SPDX-License-Identifier: Apache-2.0
"""What can happen to rooms on the decode side, and what is to be done about it (`decode.py`).

A link, the way to one prefill rank, is whatever the shell names it by.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bootstrap_server.ranks.matching import ALL_PAGES, PageShare
from sglang_mooncake.messages import (
    RoomAbort,
    RoomComputed,
    RoomDiffers,
    RoomDigests,
    RoomFailed,
    RoomRequest,
    RoomWait,
)
from sglang_mooncake.rooms.arrival import Expected
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over, Tick
from sglang_mooncake.rooms.room import Room

__all__ = [
    "Arrived",
    "Compare",
    "Differs",
    "Event",
    "Expect",
    "Fence",
    "Fenced",
    "Instruction",
    "LinkDown",
    "LinkRefused",
    "LinkUp",
    "NotServed",
    "OpenLink",
    "PagesNamed",
    "PeerComputed",
    "PeerDigested",
    "PeerFailed",
    "RoomSource",
    "SourcesChosen",
    "Tell",
    "Verified",
    "after_failure",
]


# --- events: what happened ---


@dataclass(frozen=True, slots=True)
class RoomSource:
    """A prefill rank that this rank must ask for a room.

    destinations: how many decode ranks ask it for this room.
    sends: False for one that has no byte for this rank: it is asked, but nothing arrives from it.
    aux: it sends the request's metadata; one source of a room does.
    state: it sends what the model keeps beside its KV cache.
    share: the pages that it sends.
    required_states: which state lists it follows without fail. It may lack others: those of a
        draft model that the prefill server does not run.
    page_span: see `Target`.
    dealt_over: so many sources, this one included, have each its part of the pages, and only they
        know which: by the numbers that prefill gives them. 1: it has all that `share` says.
    """

    link: Hashable
    destinations: int = 1
    sends: bool = True
    aux: bool = True
    state: bool = True
    share: PageShare = ALL_PAGES
    required_states: frozenset[int] = frozenset()
    page_span: int = 1
    dealt_over: int = 1


@dataclass(frozen=True, slots=True)
class SourcesChosen:
    """Which prefill ranks this rank asks for a room.

    Raises:
        ValueError: not exactly one of them sends the metadata, or one does without sending.
    """

    room: Room
    sources: tuple[RoomSource, ...]

    def __post_init__(self) -> None:
        senders = [source for source in self.sources if source.aux]
        if len(senders) != 1 or not senders[0].sends:
            raise ValueError(f"one source of a room sends its metadata, not these: {senders}")


@dataclass(frozen=True, slots=True)
class NotServed:
    """The prefill ranks behind `links` hold this request, but cannot serve this rank: they are
    told, so that none waits for its deadline."""

    room: Room
    links: tuple[Hashable, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PagesNamed:
    """`states`: a list of indices or None for each of the model's kinds of state. `device_pages`:
    see `Target`. `named_s`: when that was."""

    room: Room
    pages: npt.NDArray[np.integer]
    aux_slot: int
    decode_prefix_len: int
    states: tuple[npt.NDArray[np.integer] | None, ...] = ()
    device_pages: npt.NDArray[np.integer] | None = None
    named_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """`poll()` saw every completion record, at `at_s`: the scheduler has taken the room, with so
    many bytes."""

    room: Room
    landed_nbytes: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of this room can land any more."""

    room: Room


@dataclass(frozen=True, slots=True)
class LinkUp:
    """It stands. Said when it comes up; nothing is wrong with saying it again.

    layers: see `HelloReply`.
    """

    link: Hashable
    layers: int = 0


@dataclass(frozen=True, slots=True)
class LinkDown:
    """It was lost, or could not be opened; the next `OpenLink` opens it afresh."""

    link: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class LinkRefused:
    """The prefill rank answered the hello with a no; it can still be told."""

    link: Hashable
    reason: str


@dataclass(frozen=True, slots=True)
class PeerComputed:
    link: Hashable
    message: RoomComputed


@dataclass(frozen=True, slots=True)
class PeerDigested:
    link: Hashable
    message: RoomDigests


@dataclass(frozen=True, slots=True)
class Differs:
    """A `Compare` has found a difference, of which its source hears by `tell`. `Verified` follows,
    which ends the room: its pages stay what they are until then."""

    room: Room
    tell: Tell


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of a `Compare`.

    failure: why what has arrived from this source cannot be given to the scheduler; None if its
        digests are equal.
    """

    room: Room
    tag: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class PeerFailed:
    link: Hashable
    message: RoomFailed


Event = (
    Opened
    | SourcesChosen
    | NotServed
    | PagesNamed
    | Arrived
    | Aborted
    | Broken
    | Closed
    | Fenced
    | LinkUp
    | LinkDown
    | LinkRefused
    | PeerComputed
    | PeerDigested
    | Differs
    | Verified
    | PeerFailed
    | Tick
)


# --- instructions: what to do about it ---


@dataclass(frozen=True, slots=True)
class OpenLink:
    """A room needs this link, which has not been heard to stand: open it unless that has been done,
    and hand in `LinkUp` when it stands, or `LinkDown` when it does not."""

    link: Hashable


@dataclass(frozen=True, slots=True)
class Expect:
    """Clear the slot for a completion record, then open this tag for the engine behind the link;
    all before anybody is told of it."""

    room: Room
    link: Hashable
    tag: int
    slot: int


@dataclass(frozen=True, slots=True)
class Tell:
    link: Hashable
    message: RoomWait | RoomRequest | RoomDiffers | RoomAbort


@dataclass(frozen=True, slots=True, eq=False)
class Compare:
    """Once all that this source has sent is here, compare the digests in `message` with those of
    what has landed, and hand in `Verified`."""

    room: Room
    link: Hashable
    request: RoomRequest
    expected: Expected
    message: RoomDigests


@dataclass(frozen=True, slots=True)
class Fence:
    """Close these tags, however long it takes, then hand in `Fenced(room)`."""

    room: Room
    tags: tuple[int, ...]


Instruction = OpenLink | Expect | Tell | Compare | Fence | Over


def after_failure(cause: Event | Instruction, error: Exception) -> Event | None:
    """What an event that could not be handled, or an instruction that could not be carried out,
    comes to: a bug in one room ends that room, one in a link the rooms that use it. None when
    nobody is left to end: the log has it all."""
    reason = f"internal error: {error!r}"
    match cause:
        case OpenLink(link):
            return LinkDown(link, reason)
        case Tell(link, RoomRequest(room=room, generation=generation)) | Tell(
            link, RoomWait(room, generation)
        ):
            return PeerFailed(link, RoomFailed(room, generation, reason))
        case Broken() | Tell():
            return None
        case _:
            ended: Room | None = getattr(cause, "room", None)
            return None if ended is None else Broken(ended, reason)
