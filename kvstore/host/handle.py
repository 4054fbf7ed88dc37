# SPDX-License-Identifier: Apache-2.0
"""The owner of this host, as a process stores and manages objects that uses it: all of it goes by
questions over Unix sockets, and the bytes go through trays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import te
from kvstore.client.deadline import Deadline
from kvstore.client.handles import AskedHandle
from kvstore.client.reading import Source
from kvstore.objects.changes import Keys
from kvstore.objects.copying import gather
from kvstore.objects.pieces import Pieces
from kvstore.owner.owner import CLAIM_OBJECTS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller
from kvstore.protocol.messages import (
    TRAY_BYTES,
    Abandon,
    Answer,
    Clear,
    Copy,
    Done,
    Question,
    Remove,
    Stored,
    Take,
)
from kvstore.rules.object_table import Verdict

__all__ = ["HOST", "HostHandle"]

HOST: Final = "the owner of this host's store"
EXTRA_S: Final = 1.0
"""The owner may wait for others as long as this process waits for it, and then it answers."""


class HostHandle(AskedHandle):
    """See ``Handle``. The owner's table is that of this process: what it has stored is found."""

    def __init__(
        self, source: Source, caller: Caller, writer: Callable[[], te.Identity], timeout_s: float
    ) -> None:
        """``writer``: for memory that the processor cannot read."""
        super().__init__(source, HOST, writer, timeout_s)
        self._caller = caller

    @property
    def take_bytes_max(self) -> int:
        """See ``Handle``. All that there can be."""
        return 1 << 62

    def take(
        self, keys: Keys, signature: bytes, pieces: Pieces, timeout_s: float
    ) -> Sequence[Verdict]:
        """See ``Handle``. In as many questions as the tray is filled."""
        until_s = time.monotonic() + timeout_s
        step = max(TRAY_BYTES // pieces.object_bytes, 1)
        verdicts: list[Verdict] = []
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            part = pieces if len(some) == len(keys) else pieces.between(first, first + step)
            answer = self._caller.ask_with_tray(
                partial(gather, part),
                Take(some.tobytes(), signature, part.object_bytes),
                min(until_s - time.monotonic(), self._timeout_s),
                len(part) * part.object_bytes,
            )
            verdicts += self._verdicts(len(some), answer)
        return verdicts

    def _verdicts(self, count: int, answer: Answer | None) -> list[Verdict]:
        if not isinstance(answer, Stored):
            raise NoAnswer(f"{HOST} answers with {type(answer).__name__}")
        with self._sense("what it has stored"):
            if len(answer.verdicts) != count:
                raise ValueError(f"{len(answer.verdicts)} answers for {count} objects")
            return [Verdict(one) for one in answer.verdicts]

    def copy(
        self, keys: Keys, signature: bytes, nbytes: int, copies: int, deadline: Deadline
    ) -> None:
        """Has so many owners in all have objects that this host has; waits for it."""
        for first in range(0, len(keys), CLAIM_OBJECTS_MAX):
            some = keys[first : first + CLAIM_OBJECTS_MAX]
            question = Copy(some.tobytes(), signature, nbytes, copies)
            self._ask(question, Done, min(self._timeout_s + EXTRA_S, deadline.left_s))

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``. Raises nothing."""
        self._soon(Abandon(claim_id))

    def remove_soon(self, keys: Keys, signature: bytes) -> Future[Answer]:
        """See ``Handle``. It waits all the same: there is one to ask."""
        return self._soon(Remove(keys.tobytes(), signature))

    def clear_soon(self, signature: bytes) -> Future[Answer]:
        """See ``remove_soon``."""
        return self._soon(Clear(signature))

    def _soon(self, question: Question) -> Future[Answer]:
        future: Future[Answer] = Future()
        try:
            future.set_result(self._answer(question, self._timeout_s + EXTRA_S))
        except NoAnswer as exc:
            future.set_exception(exc)
        return future

    def _answer(self, question: Question, timeout_s: float) -> Answer:
        answer = self._caller.ask(question, timeout_s)
        assert answer is not None, "it waits for a line"
        return answer
