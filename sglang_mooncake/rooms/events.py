# SPDX-License-Identifier: Apache-2.0
"""What happens to rooms on both sides alike, and the one thing that both have to say in the end."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.write_story import WriteStory

__all__ = ["Aborted", "Broken", "Closed", "Opened", "Over", "Tick"]


@dataclass(frozen=True, slots=True)
class Opened:
    """Event: the scheduler made a sender or receiver."""

    room: Room


@dataclass(frozen=True, slots=True)
class Aborted:
    """Event: the scheduler gave the request up."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Event: something on this side failed for this room alone."""

    room: Room
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Event: the scheduler forgot the request; a room that is still alive ends as aborted."""

    room: Room


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: time has passed."""


@dataclass(frozen=True, slots=True)
class Over:
    """Instruction: the room has come to its end, no byte of it moves, and it is forgotten here.

    writes: of a prefill rank, what is told of them, in the order in which they ended.
    """

    room: Room
    writes: tuple[WriteStory, ...] = ()
