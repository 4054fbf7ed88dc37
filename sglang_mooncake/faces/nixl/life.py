# SPDX-License-Identifier: Apache-2.0
"""The life of a transfer's handle: what may be asked of it when, and what becomes of it. Pure.

NIXL's handles can be posted again once they have ended, and released at any time. te's transfers
are for one time, and te has done with memory when it says so and not before; so a release waits
for te, and NIXL's callers are made for that (``nixlRepostActiveError``).
"""

from __future__ import annotations

import enum
from typing import Final

from sglang_mooncake.faces.nixl.names import NotFound, NotPosted, RepostActive

__all__ = ["Event", "Life", "after", "check_asked"]


class Life(enum.Enum):
    """Where a handle stands."""

    #: Made, and not posted since.
    IDLE = "idle"
    #: Posted; te has not got it yet: the peer is being connected to, or has enough to do.
    QUEUED = "queued"
    #: te has it.
    MOVING = "moving"
    #: All bytes are there, and the notification is on its way.
    DONE = "done"
    #: It failed, and nothing of it moves any more.
    FAILED = "failed"
    #: It failed, and pieces of it may still land at the peer.
    LOST = "lost"
    #: To be released; te has been told to stop, and has not said yet that it has.
    STOPPING = "stopping"
    #: Gone: the memory is the caller's again.
    RELEASED = "released"


class Event(enum.Enum):
    """What happens to one."""

    POST = "post"
    #: te has taken it.
    BEGUN = "begun"
    LANDED = "landed"
    #: Settled: nothing of it moves any more.
    FAILED = "failed"
    #: Pieces of a write may still land at the peer. te reads this side's memory no more.
    LOST = "lost"
    #: The caller gives it up, and te has not got it, or has ended it.
    RELEASE = "release"
    #: The caller gives it up, and te has yet to end it.
    STOP = "stop"


#: Those in which it is under way.
_ACTIVE: Final = (Life.QUEUED, Life.MOVING, Life.STOPPING)

_TABLE: Final[dict[tuple[Life, Event], Life]] = {
    **{(life, Event.POST): Life.QUEUED for life in (Life.IDLE, Life.DONE, Life.FAILED, Life.LOST)},
    **{
        (life, Event.RELEASE): Life.RELEASED
        for life in (Life.IDLE, Life.QUEUED, Life.DONE, Life.FAILED, Life.LOST, Life.RELEASED)
    },
    (Life.QUEUED, Event.BEGUN): Life.MOVING,
    (Life.QUEUED, Event.FAILED): Life.FAILED,
    (Life.MOVING, Event.LANDED): Life.DONE,
    (Life.MOVING, Event.FAILED): Life.FAILED,
    (Life.MOVING, Event.LOST): Life.LOST,
    (Life.MOVING, Event.STOP): Life.STOPPING,
    (Life.STOPPING, Event.STOP): Life.STOPPING,
    # Whatever came of it: te has done with the memory, and nobody asks any more.
    (Life.STOPPING, Event.LANDED): Life.RELEASED,
    (Life.STOPPING, Event.FAILED): Life.RELEASED,
    (Life.STOPPING, Event.LOST): Life.RELEASED,
    # Released before te had it: it is not given to te then, and what is told later means nothing.
    (Life.RELEASED, Event.FAILED): Life.RELEASED,
}


def after(life: Life, event: Event) -> Life:
    """What it is then.

    Raises:
        nixlRepostActiveError: it goes on, and cannot be posted.
        nixlNotFoundError: it was released.
        AssertionError: what happened cannot have: a mistake here.
    """
    if event is Event.POST and life in _ACTIVE:
        raise RepostActive("the transfer goes on; it can be posted again once it has ended")
    if event is Event.POST and life is Life.RELEASED:
        raise NotFound("the transfer was released")
    then = _TABLE.get((life, event))
    if then is None:
        raise AssertionError(f"{event} cannot happen to a transfer that is {life}")
    return then


def check_asked(life: Life) -> None:
    """Whether its state can be told. ``nixlNotPostedError``, ``nixlNotFoundError``."""
    if life is Life.IDLE:
        raise NotPosted("the transfer was not posted")
    if life in (Life.RELEASED, Life.STOPPING):
        raise NotFound("the transfer was released")
