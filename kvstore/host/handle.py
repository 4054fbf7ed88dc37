# SPDX-License-Identifier: Apache-2.0
"""The owner of this host, as a process stores and manages objects that uses it: all of it goes by
questions over Unix sockets, and the bytes go through trays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import numpy as np

import te
from kvstore.client.deadline import Deadline
from kvstore.client.handles import AskedHandle, answered_ms, check_unchanged, of_each, within
from kvstore.client.reading import Source
from kvstore.objects.changes import Keys
from kvstore.objects.copying import gather
from kvstore.objects.pieces import Pieces
from kvstore.owner.claims import CLAIM_OBJECTS_MAX
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.calling import Caller
from kvstore.protocol.messages import (
    TRAY_BYTES,
    Abandon,
    Answer,
    Clear,
    Copy,
    Done,
    Fetch,
    Fetched,
    Keep,
    Promote,
    Question,
    Relay,
    Remove,
    Stored,
    Take,
    Unread,
)
from kvstore.rules.object_table import Verdict

__all__ = ["HOST", "HostHandle"]

logger = logging.getLogger(__name__)

HOST: Final = "the owner of this host's store"
FETCH_PIECE_BYTES: Final = 2 << 10
"""Of smaller pieces each takes longer than to copy it (0.5 µs)."""
FETCH_BYTES: Final = 64 << 20
"""What the owner reads for one question, or one object."""
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
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> Sequence[Verdict]:
        """See ``Handle``. The owner reads what is much out of this process's memory, if it can;
        what is not, it copies out of the tray, in as many questions as that is filled."""
        verdicts = list[Verdict]()
        can_fetch, step = self._fetch_step(pieces)
        while len(verdicts) < len(keys):
            first = len(verdicts)
            some, part = keys[first : first + step], pieces.between(first, first + step)
            found = self._fetched(some, signature, part, deadline) if can_fetch else None
            if found is None and can_fetch:
                can_fetch, step = False, max(TRAY_BYTES // pieces.object_bytes, 1)
                continue
            verdicts += self._taken(some, signature, part, deadline) if found is None else found
        return verdicts

    def _fetch_step(self, pieces: Pieces) -> tuple[bool, int]:
        """Whether the owner is to read these, and how many for one question."""
        nbytes, count = pieces.object_bytes, len(pieces.nbytes)
        room = TRAY_BYTES // 8 // count - 1  # Their addresses go through the tray.
        # What fits the tray takes one question instead of two.
        is_much = len(pieces) * nbytes > TRAY_BYTES and nbytes >= count * FETCH_PIECE_BYTES
        if is_much and room > 0 and self._caller.hello.reads:
            return True, min(max(FETCH_BYTES // nbytes, 1), room)
        return False, max(TRAY_BYTES // nbytes, 1)

    def _taken(
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> list[Verdict]:
        # An owner that lends nothing stores them at other hosts, which takes its time.
        lends = self._caller.hello.lends
        until_s = self._until_s(deadline) if lends else time.monotonic() + deadline.left_s
        nbytes = len(pieces) * pieces.object_bytes
        with self._caller.line(until_s - time.monotonic(), nbytes) as line:
            gather(pieces, line.tray.address)
            check_unchanged(deadline)
            left_ms = answered_ms(until_s - time.monotonic())
            question = Take(keys.tobytes(), signature, pieces.object_bytes, left_ms)
            taken = self._expected(self._caller.answer(line, question, until_s), Stored)
            return self._verdicts(keys, taken.verdicts)

    def _fetched(
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> list[Verdict] | None:
        """None if the owner cannot read this memory."""
        until_s, count = self._until_s(deadline), len(pieces.nbytes)
        with self._caller.line(until_s - time.monotonic()) as line:
            told = np.frombuffer(line.tray.memory, "<u8", (len(keys) + 1) * count)
            told[: len(keys) * count], told[len(keys) * count :] = (
                pieces.addresses.reshape(-1),
                pieces.nbytes,
            )
            question = Fetch(keys.tobytes(), signature, pieces.object_bytes, count)
            answer = self._caller.answer(line, question, until_s)
            if isinstance(answer, Unread):
                logger.debug("%s copies out of the tray: %s", HOST, answer.why)
                return None
            fetched = self._expected(answer, Fetched)
            verdicts = self._verdicts(keys, fetched.verdicts)
            check_unchanged(deadline)
            if Verdict.GRANTED in verdicts:
                self._expected(self._caller.answer(line, Keep(), until_s), Done)
            return verdicts

    def _until_s(self, deadline: Deadline) -> float:
        return time.monotonic() + min(deadline.left_s, self._timeout_s)

    def _verdicts(self, keys: Keys, said: Sequence[str]) -> list[Verdict]:
        with self._sense("what it has stored"):
            return of_each(keys, said, Verdict)

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
        until_s = time.monotonic() + timeout_s
        with self._caller.line(timeout_s, is_slow=isinstance(question, Promote | Relay)) as line:
            # Others may have had all lines for a part of the time.
            told = within(question, until_s - time.monotonic())
            return self._caller.answer(line, told, until_s)
