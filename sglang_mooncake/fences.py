# SPDX-License-Identifier: Apache-2.0
"""Closes the tags of rooms in a thread of its own: a fence waits for what is landing, up to a
second when that is stuck, and everybody else's rooms must not wait with it."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import te
from sglang_mooncake.rooms.states import RoomView

__all__ = ["Fencer"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Job:
    """The tags of a room that no fence has confirmed yet."""

    view: RoomView
    tags: tuple[int, ...]
    tries: int = 0


class Fencer:
    """A fence that is not confirmed, for whatever reason, is tried again until it is: nobody else
    can say that pages are safe. Its tags stay closed meanwhile.

    Args:
        fence: closes a tag; raises `te.FenceTimeout` when a write of it may still be landing.
        confirmed: called in the thread once no write of the room can land any more.
    """

    def __init__(
        self, fence: Callable[[int], object], confirmed: Callable[[RoomView], None], name: str
    ) -> None:
        self._fence, self._confirmed = fence, confirmed
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._late: deque[_Job] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close_tags(self, view: RoomView, tags: tuple[int, ...]) -> None:
        """Has the tags closed; never waits. Bounded by the rooms, each of which comes once."""
        self._jobs.put(_Job(view, tags))

    def retry(self) -> None:
        """Has those tried again that were not confirmed; never waits."""
        while self._late:
            self._jobs.put(self._late.popleft())

    def close(self) -> None:
        """Ends the thread, after what it has been given so far. Idempotent."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.tags = tuple(tag for tag in job.tags if not self._is_closed(job, tag))
            if job.tags:
                job.tries += 1
                self._late.append(job)
                continue
            if job.tries:
                logger.warning(
                    "room %d: its fence is confirmed at last, at try %d",
                    job.view.room,
                    job.tries + 1,
                )
            self._confirmed(job.view)

    def _is_closed(self, job: _Job, tag: int) -> bool:
        try:
            self._fence(tag)
        except Exception as error:
            if not job.tries:  # once per room: the next ones come every second or faster
                logger.error(
                    "room %d: cannot confirm that nothing lands in its pages any more (tag %#x), "
                    "so they stay reserved, and the fence is tried again: %s",
                    job.view.room,
                    tag,
                    error,
                    exc_info=not isinstance(error, te.FenceTimeout),
                )
            return False
        return True
