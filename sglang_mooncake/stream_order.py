# SPDX-License-Identifier: Apache-2.0
"""Holds what the scheduler sends back until the GPU has filled the memory that it names, and lets
nothing of the same room overtake what is held back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

__all__ = ["StreamEvent", "StreamOrder", "Waited"]

logger = logging.getLogger(__name__)

#: Far more chunks than a prefill server has under way. One is a few hundred bytes and its pages.
WAITING_MAX = 65_536
#: Between two looks at the events. It grows from the first to the second, and begins anew whenever
#: one has happened or comes in, so that a wait is at most about a tenth longer than it had to be,
#: and one of a whole forward pass takes the interpreter's lock a thousand times a second at most.
_PAUSE_MIN_S, _PAUSE_MAX_S = 5e-5, 1e-3
_CLOSE_TIMEOUT_S = 5.0


class StreamEvent(Protocol):
    """An event that was recorded on a device's stream: `torch.cuda.Event` and its likes."""

    def query(self) -> bool:
        """Whether the stream has come to it. Raises what went wrong on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Waited:
    """The thread's word on rooms, by `RoomView.serial`: the events of the oldest submission with
    any have happened (None), or why no more waiting for them makes sense."""

    rooms: tuple[tuple[int, str | None], ...]


@dataclass(frozen=True, slots=True)
class _Submission:
    room: Room
    stimulus: Any
    events: Sequence[StreamEvent]
    since_s: float = field(default_factory=time.monotonic)


class StreamOrder:
    """Delivers the stimuli of each room in the order of `submit`, each after its events.

    The loop thread alone calls `submit` and `waited`, and gets the deliveries; a thread of its own
    waits. A stimulus without events that has nothing of its room before it is delivered at once.
    Rooms do not wait for each other: with overlap scheduling the last chunk of one forward is sent
    when the layers of the next one have been announced, and those take that forward's time.

    A device that hangs must not hold a room back for ever: an event that does not happen within
    `timeout_s` of its submission fails its room, and so does one that raises.

    Args:
        deliver: takes a stimulus whose events have happened.
        fail: takes the room of one whose events have not, and why.
        post: hands a `Waited` to the loop thread, which calls `waited` with it.
        timeout_name: the setting of `timeout_s`, for sentences.
    """

    def __init__(
        self,
        deliver: Callable[[Any], None],
        fail: Callable[[Room, str], None],
        post: Callable[[Waited], None],
        timeout_s: float,
        timeout_name: str,
    ) -> None:
        self._deliver, self._fail, self._post = deliver, fail, post
        self._timeout_s, self._timeout_name = timeout_s, timeout_name
        #: By serial; of the loop thread. The oldest of each has events.
        self._waiting: dict[int, deque[_Submission]] = {}
        self._count = 0
        # A SimpleQueue waits for ever when a short time-out is over before it has begun to wait
        # (CPython 3.11: the time that is left is negative then).
        self._to_wait_for: queue.Queue[_Submission | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kv-stream-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, room: Room, stimulus: Any, events: Sequence[StreamEvent] = ()) -> None:
        """Has `stimulus`, which is about `room`, delivered when its turn comes."""
        before = self._waiting.get(room.serial)
        if not events and before is None:
            self._deliver(stimulus)
            return
        if self._count >= WAITING_MAX:
            self._fail(
                room,
                f"{WAITING_MAX} chunks are waiting for GPU events, which is the limit: the GPU "
                "seems to hang",
            )
            return
        submission = _Submission(room, stimulus, events)
        self._count += 1
        if before is None:
            self._waiting[room.serial] = deque((submission,))
        else:
            before.append(submission)
        if events:
            self._to_wait_for.put(submission)

    def waited(self, waited: Waited) -> None:
        """Waits of these rooms are over; what is behind and waits for nothing goes, too."""
        for serial, failure in waited.rooms:
            submissions = self._waiting[serial]
            over = submissions.popleft()
            ready = [over] if failure is None else []
            while submissions and not submissions[0].events:
                ready.append(submissions.popleft())
            if not submissions:
                del self._waiting[serial]
            self._count -= len(ready) + (failure is not None)
            if failure is not None:
                self._fail(over.room, failure)
            for submission in ready:
                self._deliver(submission.stimulus)

    def close(self) -> None:
        """Ends the thread, whatever it waits for. Idempotent."""
        self._to_wait_for.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        #: By serial, the oldest first.
        rooms: dict[int, deque[_Submission]] = {}
        pause_s = _PAUSE_MIN_S
        while True:
            try:
                added = self._to_wait_for.get(timeout=pause_s if rooms else None)
            except queue.Empty:
                pause_s = min(pause_s * 1.1, _PAUSE_MAX_S)
            else:
                if added is None:
                    return
                rooms.setdefault(added.room.serial, deque()).append(added)
                pause_s = _PAUSE_MIN_S
                if not self._to_wait_for.empty():
                    continue
            if over := self._look(rooms):
                self._post(Waited(tuple(over)))
                pause_s = _PAUSE_MIN_S

    def _look(self, rooms: dict[int, deque[_Submission]]) -> list[tuple[int, str | None]]:
        """Takes out what is over by now: of each room as many as are, in order."""
        #: An event of a whole batch is one of many rooms.
        asked: dict[int, bool] = {}
        found: list[tuple[int, str | None]] = []
        for serial, submissions in list(rooms.items()):
            while submissions:
                over, failure = self._is_over(submissions[0], asked)
                if not over:
                    break
                submissions.popleft()
                found.append((serial, failure))
            if not submissions:
                del rooms[serial]
        return found

    def _is_over(self, submission: _Submission, asked: dict[int, bool]) -> tuple[bool, str | None]:
        room = submission.room.number
        if _needs_no_more(submission.room):
            return True, None  # the rules drop what is sent for it
        try:
            if all(_has_happened(event, asked) for event in submission.events):
                return True, None
        except Exception as error:  # whatever a device's library raises
            logger.exception("an event of the GPU's stream, before room %d can be sent", room)
            return True, f"the event before the pages of room {room} failed on the GPU: {error!r}"
        waited_s = time.monotonic() - submission.since_s
        if waited_s < self._timeout_s:
            return False, None
        within = f"within {waited_s:.0f} s ({self._timeout_name})"
        return True, f"the GPU did not fill the pages that were sent for room {room} {within}"


def _has_happened(event: StreamEvent, asked: dict[int, bool]) -> bool:
    """Asks the device once for each event; `asked` is by identity, and of one look alone."""
    if id(event) not in asked:
        asked[id(event)] = event.query()
    return asked[id(event)]


def _needs_no_more(room: Room) -> bool:
    return room.view.over or room.view.state is RoomState.ENDING
