# SPDX-License-Identifier: Apache-2.0
"""The states of a room on either side, which events move it, and what a scheduler may see of it.

Two rules hold for this package:

* Everything that changes the state of a room is here. The shells (`prefill_side.py`,
  `decode_side.py`) turn what happens into events, and carry out the instructions that come back.
* Nothing here does I/O, reads a clock or starts a thread: time comes in as `now_s` of `Tick`.

A room that has ended well is `DONE`. There are four other ends, and they stay apart, because a user
asks "why?": `FAILED` (something broke), `ABORTED` (somebody asked for it), `TIMED_OUT` (nobody
came), `SUPERSEDED` (the same room number is used again by a newer request).
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field
from typing import Final

from sglang_mooncake.rooms.arrival import Awaited

__all__ = [
    "ENDS",
    "RELEASED",
    "TRANSITIONS_DECODE",
    "TRANSITIONS_PREFILL",
    "IllegalTransition",
    "RoomState",
    "RoomTimes",
    "RoomView",
    "Step",
    "advance",
]


#: Why a room ends that its own side's scheduler lets go of. SGLang's tests know a request that was
#: not served by "abort" in its error's text.
RELEASED: Final = "aborted, since the scheduler released the request"


class RoomState(enum.Enum):
    """Where a room is. The comment names the side that knows the state."""

    OPEN = "open"  # both: the scheduler made a sender or receiver, the other side is not known yet
    COMPUTING = "computing"  # decode: linked, but the prompt must be computed before it is READY
    READY = "ready"  # both: the other side is known, pages may be named or sent
    REQUESTED = "requested"  # decode: pages are open for writing, and the prefill rank knows them
    SENDING = "sending"  # prefill: at least one chunk was handed to the engine
    SEALED = "sealed"  # prefill: the last chunk was handed to the engine
    #: Both: the end is decided, but bytes may still move. SGLang's schedulers raise when a room of
    #: which they have named or sent nothing is seen in this state.
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"
    SUPERSEDED = "superseded"


ENDS = frozenset(
    {
        RoomState.DONE,
        RoomState.FAILED,
        RoomState.ABORTED,
        RoomState.TIMED_OUT,
        RoomState.SUPERSEDED,
    }
)


class Step(enum.Enum):
    """What can happen to a room, as far as its state is concerned."""

    LINKED = "the other side is known, and still computes the prompt"
    MET = "the other side is known"
    PUBLISHED = "the pages are open for writing"
    CHUNK = "a chunk was sent"
    LAST_CHUNK = "the last chunk was sent"
    QUIET = "no byte of this room moves any more"
    END = "the room must end badly"


class IllegalTransition(RuntimeError):
    """A step that the room's state does not allow: a bug on our side, never a peer's doing."""


_TO_ENDING = {Step.END: RoomState.ENDING}
_OVER: dict[Step, RoomState] = {}

#: `ENDING` leaves through `QUIET` for the end that was decided (`RoomView.end`).
TRANSITIONS_PREFILL: dict[RoomState, dict[Step, RoomState]] = {
    RoomState.OPEN: {Step.MET: RoomState.READY, **_TO_ENDING},
    RoomState.READY: {
        Step.CHUNK: RoomState.SENDING,
        Step.LAST_CHUNK: RoomState.SEALED,
        **_TO_ENDING,
    },
    RoomState.SENDING: {
        Step.CHUNK: RoomState.SENDING,
        Step.LAST_CHUNK: RoomState.SEALED,
        **_TO_ENDING,
    },
    RoomState.SEALED: {Step.QUIET: RoomState.DONE, **_TO_ENDING},
    RoomState.ENDING: {Step.QUIET: RoomState.ENDING},
    **dict.fromkeys(ENDS, _OVER),
}

TRANSITIONS_DECODE: dict[RoomState, dict[Step, RoomState]] = {
    RoomState.OPEN: {
        Step.LINKED: RoomState.COMPUTING,
        Step.MET: RoomState.READY,
        **_TO_ENDING,
    },
    RoomState.COMPUTING: {Step.MET: RoomState.READY, **_TO_ENDING},
    RoomState.READY: {Step.PUBLISHED: RoomState.REQUESTED, **_TO_ENDING},
    RoomState.REQUESTED: {Step.QUIET: RoomState.DONE, **_TO_ENDING},
    RoomState.ENDING: {Step.QUIET: RoomState.ENDING},
    **dict.fromkeys(ENDS, _OVER),
}

_serial = itertools.count(1)


@dataclass(slots=True)
class RoomTimes:
    """When a room reached what `story.py` tells of it, in seconds of the side's clock; 0.0 before.

    met_s: the other side is known, and ready.
    named_s: decode: the scheduler named the pages; prefill: it sent the last of them.
    planned_s: decode: the request was made; prefill: the writes of the last chunk were chosen.
    posted_s: prefill: the engine took the latest write.
    landed_s: decode: the scheduler saw that all had arrived.
    """

    met_s: float = 0.0
    named_s: float = 0.0
    planned_s: float = 0.0
    posted_s: float = 0.0
    landed_s: float = 0.0


@dataclass(slots=True, eq=False)
class RoomView:
    """One use of a room number, written by the loop thread, except for what the scheduler thread
    has to say at once.

    The scheduler reads single attributes (each read is atomic), and never waits for the loop. It
    may do so in the middle of an event, so `state` is never one that a room only passes through,
    and is written after all else that a reader of the new state looks at.
    """

    room: int
    #: Wall-clock-free start, in the seconds of the side's clock; deadlines count from here.
    opened_s: float
    state: RoomState = RoomState.OPEN
    #: Why the room ends badly; one sentence, set before `state` says so.
    reason: str | None = None
    #: The end that `ENDING` leads to.
    end: RoomState | None = None
    #: Prefill: tokens the decode server already holds (its radix cache), so they are not sent.
    decode_prefix_len: int = 0
    #: Bytes that have landed: of prefill, those of caches and state, with every decode rank that
    #: was sent them (what SGLang's figures are made of); of decode, all that it was sent, once it
    #: has everything.
    landed_nbytes: int = 0
    #: Decode: what each source was asked for; set once before `state` becomes `REQUESTED`.
    awaited: tuple[Awaited, ...] = ()
    generation: int = 0
    #: True from the moment a peer may write to (decode) or is sent (prefill) this room's pages.
    exposed: bool = False
    #: Decode, written by the scheduler thread when it chooses the sources: the links to all of
    #: them stood then, so that the room is ready as soon as the loop has heard of it, and pages may
    #: be named without waiting for that. Those of a room whose link has ended meanwhile are kept.
    linked: bool = False
    #: Decode, written by the scheduler thread before it tells the loop: it has named its pages, so
    #: a peer may be asked to write into them at any moment from now on.
    named: bool = False
    #: How many pages those are: of decode, written with `named`; of prefill, with each chunk.
    num_pages: int = 0
    #: Decode, written by the scheduler thread before it tells the loop: the request is given up.
    #: A room whose pages are not exposed by then never exposes them.
    withdrawn: bool = False
    #: Decode: no write can land in this room's pages, now or later: they were never exposed, or
    #: the fence is confirmed. Until then pages that were named must not be used for anything else.
    safe: bool = False
    times: RoomTimes = field(default_factory=RoomTimes)
    #: Decode, written by the scheduler thread when it chooses them: whom this rank asks. `str`
    #: names each of them.
    peers: tuple[object, ...] = ()
    #: Decode, written by the scheduler thread: the registry of the room's prefill ranks, once it
    #: may be told of the room.
    registry: str = ""
    serial: int = field(default_factory=lambda: next(_serial))

    @property
    def nameable(self) -> bool:
        """Decode: whether the scheduler may name its pages."""
        state = self.state  # one read: the loop may write it at any moment
        return state is RoomState.READY or (state is RoomState.OPEN and self.linked)

    @property
    def releasable(self) -> bool:
        """Decode: whether the pages of this room, given up, may be used for something else."""
        return self.safe or not self.named

    @property
    def over(self) -> bool:
        """True when the outcome is final and no byte of this room moves any more."""
        return self.state in ENDS


def advance(view: RoomView, table: dict[RoomState, dict[Step, RoomState]], *steps: Step) -> None:
    """Moves `view` by `steps`, one after the other. The scheduler sees the last state alone: what
    an event does to a room in several steps is one step to everybody else.

    Raises:
        IllegalTransition: the table has no such row; the message names room, state and step. The
            view is what it was.
    """
    state = view.state
    for step in steps:
        following = table[state].get(step)
        if following is None:
            raise IllegalTransition(
                f"room {view.room} is {state.value!r}, where '{step.value}' cannot happen"
            )
        if state is RoomState.ENDING:
            if view.end is None:
                raise IllegalTransition(f"room {view.room} is ending without a decided end")
            following = view.end
        state = following
    view.state = state
