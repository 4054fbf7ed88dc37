# SPDX-License-Identifier: Apache-2.0
"""Waits for events of GPUs' streams, in a thread of its own, and says when they have happened. What
waits for them, in which order and for how long, is for the rules of the rooms (`rooms/prefill.py`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from sglang_mooncake.rooms.prefill_events import AwaitEvents, EventsHappened, StreamEvent

__all__ = ["EventWaiter"]

logger = logging.getLogger(__name__)

#: Between two looks at the events. It grows from the first to the second, and begins anew whenever
#: one has happened or comes in, so that a wait is at most about a tenth longer than it had to be,
#: and one of a whole forward pass takes the interpreter's lock a thousand times a second at most.
_PAUSE_MIN_S, _PAUSE_MAX_S = 5e-5, 1e-3
_CLOSE_TIMEOUT_S = 5.0


class EventWaiter:
    """Waits for the events of each room in the order in which they were given; rooms do not wait
    for each other. With overlap scheduling the last chunk of one forward is sent when the layers of
    the next one have been announced, and those take that forward's time.

    Events of a room that ends are not waited for.

    Args:
        post: takes what has happened since the last look, and hands it to the loop thread.
    """

    def __init__(self, post: Callable[[Sequence[EventsHappened]], None]) -> None:
        self._post = post
        # A SimpleQueue waits for ever when a short time-out is over before it has begun to wait
        # (CPython 3.11: the time that is left is negative then).
        self._asked: queue.Queue[AwaitEvents | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kv-stream-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, asked: AwaitEvents) -> None:
        """`post` is called with `EventsHappened` once all of them have, or one has raised."""
        self._asked.put(asked)

    def close(self) -> None:
        """Ends the thread, whatever it waits for. Idempotent."""
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        #: By serial, the oldest first.
        rooms: dict[int, deque[AwaitEvents]] = {}
        pause_s = _PAUSE_MIN_S
        while True:
            try:
                added = self._asked.get(timeout=pause_s if rooms else None)
            except queue.Empty:
                pause_s = min(pause_s * 1.1, _PAUSE_MAX_S)
            else:
                if added is None:
                    return
                rooms.setdefault(added.room.serial, deque()).append(added)
                pause_s = _PAUSE_MIN_S
                if not self._asked.empty():
                    continue
            if happened := _look(rooms):
                self._post(happened)
                pause_s = _PAUSE_MIN_S


def _look(rooms: dict[int, deque[AwaitEvents]]) -> list[EventsHappened]:
    """Takes out what has happened by now: of each room as much as has, in order."""
    #: An event of a whole batch is one of many rooms.
    asked: dict[int, bool] = {}
    found: list[EventsHappened] = []
    for serial, waits in list(rooms.items()):
        room = waits[0].room
        if room.view.decided:
            waits.clear()
        while waits:
            try:
                if not all(_has_happened(event, asked) for event in waits[0].events):
                    break
            except Exception as error:  # whatever a device's library raises
                logger.exception(
                    "the GPU failed before the pages of room %d were filled", room.number
                )
                reason = f"the GPU failed before the pages of room {room.number} were filled"
                found.append(EventsHappened(room, f"{reason}: {error!r}"))
            else:
                found.append(EventsHappened(room))
            waits.popleft()
        if not waits:
            del rooms[serial]
    return found


def _has_happened(event: StreamEvent, asked: dict[int, bool]) -> bool:
    """Asks the device once for each event; `asked` is by identity, and of one look alone."""
    if id(event) not in asked:
        asked[id(event)] = event.query()
    return asked[id(event)]
