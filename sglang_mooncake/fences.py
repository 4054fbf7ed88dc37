# SPDX-License-Identifier: Apache-2.0
"""Closes the tags of rooms in a thread of its own: a fence waits for what is landing, up to a
second when that is stuck, and everybody else's rooms must not wait with it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import te
from sglang_mooncake.rooms.room import Room

__all__ = ["Fencer"]

logger = logging.getLogger(__name__)

#: For one try. Nearly all are confirmed at once; a landing that is stuck must not keep the fences
#: of others waiting, so it is looked at again later.
_TRY_S = 0.1
_CLOSE_TIMEOUT_S = 5.0
#: How often the log names a room whose fence is still not confirmed.
_SAID_EVERY_S = 10.0


@dataclass(slots=True)
class _Job:
    """The tags of a room that no fence has confirmed yet."""

    room: Room
    tags: tuple[int, ...]
    began_s: float
    tries: int = 0
    #: When the log is to name it next; at its first failure at once.
    next_said_s: float = float("-inf")


class Fencer:
    """A fence that is not confirmed, for whatever reason, is tried again until it is: nobody else
    can say that pages are safe. Its tags stay closed meanwhile. `close_tags` and `retry` never
    wait; both are bounded by the rooms, each of which comes once.

    Args:
        fence: closes a tag within so many seconds; raises `te.FenceTimeout` when a write of it may
            still be landing.
        confirmed: called in the thread once no write of the room can land any more.
    """

    def __init__(
        self,
        fence: Callable[[int, float], object],
        confirmed: Callable[[Room], None],
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fence, self._confirmed, self._clock = fence, confirmed, clock
        self._changed = threading.Condition()
        self._new: deque[_Job] = deque()  # each is tried once before any other is tried again
        self._due: deque[_Job] = deque()
        self._unconfirmed: deque[_Job] = deque()  # until the next `retry`
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close_tags(self, room: Room, tags: tuple[int, ...]) -> None:
        """Has the tags closed."""
        with self._changed:
            self._new.append(_Job(room, tags, self._clock()))
            self._changed.notify()

    def retry(self) -> None:
        """Has those tried again that were not confirmed."""
        with self._changed:
            if self._unconfirmed:
                self._due += self._unconfirmed
                self._unconfirmed.clear()
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread. The engine, which is closed after it, lets nothing land. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job.tags = tuple(tag for tag in job.tags if not self._is_closed(job, tag))
            if job.tags:
                job.tries += 1
                with self._changed:
                    self._unconfirmed.append(job)
                continue
            if job.tries:
                logger.warning(
                    "room %d: the fence was confirmed at attempt %d, after %.1f s; its pages can "
                    "be reused",
                    job.room.number,
                    job.tries + 1,
                    self._clock() - job.began_s,
                )
            self._confirmed(job.room)

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._due or self._closed)
            if self._closed:
                return None
            return self._new.popleft() if self._new else self._due.popleft()

    def _is_closed(self, job: _Job, tag: int) -> bool:
        try:
            self._fence(tag, _TRY_S)
        except Exception as error:
            now_s = self._clock()
            if now_s >= job.next_said_s:  # a next try follows within tenths of a second
                job.next_said_s = now_s + _SAID_EVERY_S
                logger.error(
                    "room %d: the fence of tag %#x is not confirmed after %.1f s. Writes may still "
                    "land in the room's pages, so they stay reserved, and the fence is tried "
                    "again: %s",
                    job.room.number,
                    tag,
                    now_s - job.began_s,
                    error,
                    exc_info=not isinstance(error, te.FenceTimeout),
                )
            return False
        return True
