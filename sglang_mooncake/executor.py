# SPDX-License-Identifier: Apache-2.0
"""Carries out what a room table decides: one event at a time, each instruction on its own.

The rules (`rooms/`) turn an event into instructions, and carrying an instruction out may cause
further events: a write that the engine refuses at once, a fence that is confirmed at once. Such an
event waits in a queue until the instructions of the event before it have all been carried out, so
the rules never see an event in the middle of another one's consequences.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Executor"]

logger = logging.getLogger(__name__)

_LOGGED_CHARS_MAX = 500

Event = TypeVar("Event")
Instruction = TypeVar("Instruction")


class Executor(Generic[Event, Instruction]):
    """Not thread-safe: the loop thread alone uses it.

    Args:
        handle: the rules: an event and the time in seconds to instructions, each of which is
            carried out before the next is asked for.
        perform: carries one instruction out; may call `submit`.
        failed: the event that tells the rules of an event or instruction that raised; None when
            there is nobody to tell. It must return None for the events that it makes itself, so
            that a failure in the handling of a failure ends.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        handle: Callable[[Event, float], Iterable[Instruction]],
        perform: Callable[[Instruction], None],
        failed: Callable[[Event | Instruction, Exception], Event | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle, self._perform, self._failed, self._clock = handle, perform, failed, clock
        self._events: deque[Event] = deque()
        self._running = False

    def submit(self, event: Event) -> None:
        """Handles the event, and every event that this causes, before it returns. When called by
        `perform`, it leaves the event for the call of `submit` that is under way."""
        self._events.append(event)
        if self._running:
            return
        self._running = True
        try:
            while self._events:
                self._handle_one(self._events.popleft())
        finally:
            self._running = False

    def _handle_one(self, event: Event) -> None:
        try:
            # The rules may think of the next instruction only once this one is carried out.
            for instruction in self._handle(event, self._clock()):
                self._carry_out(instruction)
        except Exception as error:
            logger.exception(
                "internal error: the hand-over could not handle the event %s", _short(event)
            )
            self._tell(event, error)

    def _carry_out(self, instruction: Instruction) -> None:
        try:
            self._perform(instruction)
        except Exception as error:
            # The others of the batch are still carried out: they may be what ends a room.
            logger.exception(
                "internal error: the hand-over could not carry out %s", _short(instruction)
            )
            self._tell(instruction, error)

    def _tell(self, cause: Event | Instruction, error: Exception) -> None:
        event = self._failed(cause, error)
        if event is not None:
            self._events.append(event)


def _short(what: object) -> str:
    """For the log: an instruction may hold the indices of a whole prompt, megabytes of them."""
    text = repr(what)
    return text if len(text) <= _LOGGED_CHARS_MAX else f"{text[:_LOGGED_CHARS_MAX]} …"
