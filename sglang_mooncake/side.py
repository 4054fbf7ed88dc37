# SPDX-License-Identifier: Apache-2.0
"""What the prefill and the decode side have in common: rooms that end by the scheduler's doing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sglang_mooncake.control import ControlLoop
from sglang_mooncake.executor import Executor
from sglang_mooncake.layout.indices import Indices, as_indices
from sglang_mooncake.rooms.events import Aborted, Broken, Closed, Opened, Over
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.stats import Recorder

__all__ = ["Side", "broken", "state_lists"]


def state_lists(state_indices: Iterable[Any] | None) -> tuple[Indices | None, ...]:
    """SGLang's lists of state indices, one or None for each of the model's kinds of state."""
    return tuple(
        None if indices is None else as_indices("state", indices) for indices in state_indices or ()
    )


class Side:
    """The public calls are for the scheduler thread: they cost microseconds and never wait."""

    _loop: ControlLoop
    _recorder: Recorder
    #: Of the loop thread alone.
    _executor: Executor[Any, Any]

    def new_room(self, number: int) -> Room:
        """A room for one use of this number, known to the loop."""
        room = Room(number, time.monotonic())
        self._recorder.room_opened(room)
        self._loop.post(Opened(room))
        return room

    def abort(self, room: Room, reason: str) -> None:
        """The scheduler gives the request up."""
        self._loop.post(Aborted(room, reason))

    def fail(self, room: Room, reason: str) -> None:
        """The room cannot succeed any more."""
        self._loop.post(Broken(room, reason))

    def close_room(self, room: Room) -> None:
        """The scheduler needs the room no more, whatever became of it."""
        self._loop.post(Closed(room))

    def close(self) -> None:
        """Ends the loop and its sockets. Idempotent."""
        self._loop.close()


def broken(cause: Any, error: Exception) -> Broken | None:
    """What the rules are told of an event or instruction that raised: a bug in the handling of one
    room must end that room, not hang it. None where that would not end, or names no room."""
    room = getattr(cause, "room", None)
    if room is None or isinstance(cause, Broken | Over):
        return None
    return Broken(room, f"internal error: {error!r}")
