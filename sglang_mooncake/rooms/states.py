# SPDX-License-Identifier: Apache-2.0
"""The states of a room on either side, and which events move it.

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
from collections.abc import Iterable
from typing import Final, TypeAlias

__all__ = [
    "ENDS",
    "RELEASED",
    "TRANSITIONS_DECODE",
    "TRANSITIONS_PREFILL",
    "IllegalTransition",
    "RoomState",
    "Step",
    "Transitions",
    "after",
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
    ALL_SENT = "all sent"  # prefill: the last chunk was handed to the engine
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


Transitions: TypeAlias = "dict[RoomState, dict[Step, RoomState]]"

_TO_ENDING = {Step.END: RoomState.ENDING}
_OVER: dict[Step, RoomState] = {}

#: `ENDING` leaves through `QUIET` for the end that was decided (`RoomView.end`, in `room.py`).
TRANSITIONS_PREFILL: Transitions = {
    RoomState.OPEN: {Step.MET: RoomState.READY, **_TO_ENDING},
    RoomState.READY: {
        Step.CHUNK: RoomState.SENDING,
        Step.LAST_CHUNK: RoomState.ALL_SENT,
        **_TO_ENDING,
    },
    RoomState.SENDING: {
        Step.CHUNK: RoomState.SENDING,
        Step.LAST_CHUNK: RoomState.ALL_SENT,
        **_TO_ENDING,
    },
    RoomState.ALL_SENT: {Step.QUIET: RoomState.DONE, **_TO_ENDING},
    RoomState.ENDING: {Step.QUIET: RoomState.ENDING},
    **dict.fromkeys(ENDS, _OVER),
}

TRANSITIONS_DECODE: Transitions = {
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


def after(
    state: RoomState, end: RoomState | None, table: Transitions, steps: Iterable[Step]
) -> RoomState:
    """Where these steps, one after the other, lead from a state; `end` is what `ENDING` leads to.

    Raises:
        IllegalTransition: the table has no such row; the message names state and step.
    """
    for step in steps:
        following = table[state].get(step)
        if following is None:
            raise IllegalTransition(f"in state {state.value!r} '{step.value}' cannot happen")
        if state is RoomState.ENDING:
            if end is None:
                raise IllegalTransition("a room is ending without a decided end")
            following = end
        state = following
    return state
