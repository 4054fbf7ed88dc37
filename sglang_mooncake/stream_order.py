# SPDX-License-Identifier: Apache-2.0
"""Holds what the scheduler sends back until the GPU has filled the memory that it names, and lets
nothing overtake what is held back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_mooncake.rooms.states import RoomState, RoomView

__all__ = ["StreamEvent", "StreamOrder", "Waited"]

logger = logging.getLogger(__name__)

#: Far more chunks than a prefill server has under way. One is a few hundred bytes and its pages.
WAITING_MAX = 65_536
#: Between two looks at an event. It grows from the first to the second, so that a wait is at most
#: about a tenth longer than it had to be, and one of a whole forward pass takes the interpreter's
#: lock a thousand times a second at most.
_PAUSE_MIN_S, _PAUSE_MAX_S = 5e-5, 1e-3
_CLOSE_TIMEOUT_S = 5.0


class StreamEvent(Protocol):
    """An event that was recorded on a device's stream: `torch.cuda.Event` and its likes."""

    def query(self) -> bool:
        """Whether the stream has come to it. Raises what went wrong on the device."""
        ...


@dataclass(frozen=True, slots=True)
class Waited:
    """The thread's word on the oldest submission with events: they have happened, or why no more
    waiting for them makes sense."""

    failure: str | None


@dataclass(frozen=True, slots=True)
class _Submission:
    view: RoomView
    stimulus: Any
    events: Sequence[StreamEvent]
    since_s: float = field(default_factory=time.monotonic)


class StreamOrder:
    """Delivers stimuli in the order of `submit`, each after its events.

    The loop thread alone calls `submit` and `waited`, and gets the deliveries; a thread of its own
    waits. A stimulus without events that has nothing before it is delivered at once.

    A device that hangs must not hold back for ever what other streams fill: an event that does not
    happen within `timeout_s` of its submission fails its room, and so does one that raises. What
    was submitted behind it meanwhile and is ready then goes on at once.

    Args:
        deliver: takes a stimulus whose events have happened.
        fail: takes the room of one whose events have not, and why.
        post: hands a `Waited` to the loop thread, which calls `waited` with it.
        timeout_name: the setting of `timeout_s`, for sentences.
    """

    def __init__(
        self,
        deliver: Callable[[Any], None],
        fail: Callable[[RoomView, str], None],
        post: Callable[[Waited], None],
        timeout_s: float,
        timeout_name: str,
    ) -> None:
        self._deliver, self._fail, self._post = deliver, fail, post
        self._timeout_s, self._timeout_name = timeout_s, timeout_name
        self._waiting: deque[_Submission] = deque()
        self._to_wait_for: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-stream-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, view: RoomView, stimulus: Any, events: Sequence[StreamEvent] = ()) -> None:
        """Has `stimulus`, which is about the room `view`, delivered when its turn comes."""
        if not events and not self._waiting:
            self._deliver(stimulus)
            return
        if len(self._waiting) >= WAITING_MAX:
            self._fail(view, f"{WAITING_MAX} chunks wait for the GPU already: it seems to hang")
            return
        submission = _Submission(view, stimulus, events)
        self._waiting.append(submission)
        if events:
            self._to_wait_for.put(submission)

    def waited(self, waited: Waited) -> None:
        """The oldest submission's wait is over; those behind it that wait for nothing go, too."""
        submission = self._waiting.popleft()
        if waited.failure is None:
            self._deliver(submission.stimulus)
        else:
            self._fail(submission.view, waited.failure)
        while self._waiting and not self._waiting[0].events:
            self._deliver(self._waiting.popleft().stimulus)

    def close(self) -> None:
        """Ends the thread, whatever it waits for. Idempotent."""
        self._stopping.set()
        self._to_wait_for.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (submission := self._to_wait_for.get()) is not None and not self._stopping.is_set():
            self._post(Waited(self._wait(submission)))

    def _wait(self, submission: _Submission) -> str | None:
        room, pause_s = submission.view.room, _PAUSE_MIN_S
        try:
            for event in submission.events:
                while not event.query():
                    waited_s = time.monotonic() - submission.since_s
                    if waited_s >= self._timeout_s:
                        return (
                            f"the GPU did not fill the pages that were sent for room {room} within "
                            f"{waited_s:.0f} s ({self._timeout_name})"
                        )
                    if _needs_no_more(submission.view) or self._stopping.is_set():
                        return None  # the rules drop what is sent for it
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.1, _PAUSE_MAX_S)
        except Exception as error:  # whatever a device's library raises
            logger.exception("an event of the GPU's stream, before room %d can be sent", room)
            return f"the event before the pages of room {room} failed on the GPU: {error!r}"
        return None


def _needs_no_more(view: RoomView) -> bool:
    return view.over or view.state is RoomState.ENDING
