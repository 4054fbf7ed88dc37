# SPDX-License-Identifier: Apache-2.0
"""An owner, as somebody stores at it: this process's own, or another's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec import structs

import te
from kvstore.client.aheads import Aheads
from kvstore.client.deadline import Deadline
from kvstore.client.following import Followed
from kvstore.client.reading import Source
from kvstore.objects.changes import Keys
from kvstore.objects.copying import gather
from kvstore.objects.outcomes import Pinned
from kvstore.objects.pieces import U64, Pieces
from kvstore.owner.claims import AHEAD_BYTES_MAX, Grant
from kvstore.owner.owner import Owner
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import (
    STORED_BYTES_MAX,
    WAIT_MS_MAX,
    Abandon,
    Answer,
    Claim,
    Clear,
    Done,
    Fetched,
    Gone,
    Granted,
    InMemory,
    Pin,
    Pins,
    Placed,
    Promote,
    Publish,
    Published,
    Question,
    Remove,
    Reserved,
    Sizes,
    SizesOf,
    Store,
    Stored,
    Unpin,
)
from kvstore.rules.object_table import Verdict, are_equal
from kvstore.rules.tiered_table import Promoted, PromotionState

__all__ = [
    "AskedHandle",
    "Handle",
    "LocalHandle",
    "RemoteHandle",
    "answered_ms",
    "check_unchanged",
    "of_each",
    "within",
]

ANSWERED_PART: Final = 0.8
"""An owner is given this part of the time for an answer to a question that waits."""

Told = TypeVar("Told", bound=Enum)
Result = TypeVar("Result")
Wanted = TypeVar(
    "Wanted", Pins, Granted, Done, Fetched, Stored, Published, InMemory, SizesOf, Reserved
)


class _Claimed(NamedTuple):
    """What a claim is for."""

    keys: Keys
    signature: bytes
    nbytes: int
    is_ahead: bool = False


class Handle(Protocol):
    """What storing needs of an owner. Each call raises ``NoAnswer`` if the owner does not answer in
    time, or refuses."""

    source: Source

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:
        """See ``Storing.claim``."""

    @property
    def take_bytes_max(self) -> int:
        """What ``take`` takes at once."""
        ...

    def take(
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> Sequence[Verdict]:
        """Has objects stored that the processor can read here: see ``Storing.take``."""

    def claimed_ahead(self, keys: Keys, signature: bytes, nbytes: int) -> Grant | None:
        """A claim that was made for objects of this size before, if there is one of so many slots;
        what is written to its first ones are these objects. Without any message."""

    def publish(
        self, grant: Grant, checksums: U64 | None, timeout_s: float
    ) -> tuple[str, Sequence[Verdict]]:
        """See ``Storing.publish``: why nothing is stored, and what became of each object that the
        claim was asked for. ``checksums``: xxh3-64 of the granted ones; None: the owner computes
        them."""

    def abandon(self, claim_id: int) -> None:
        """Ends a claim. It raises nothing."""

    def promote(
        self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float
    ) -> Sequence[Promoted]:
        """See ``Owner.promote``."""

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> tuple[Sequence[Pinned], str]:
        """See ``Owner.pin``."""

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """See ``Owner.unpin``."""

    def sizes(self, keys: Keys, signature: bytes) -> Sequence[int]:
        """See ``Owner.sizes``."""

    def remove_soon(self, keys: Keys, signature: bytes) -> Future[Answer]:
        """Has objects removed, and is answered by ``Gone``. It does not wait for that, so that many
        owners are asked side by side. It raises nothing."""

    def clear_soon(self, signature: bytes) -> Future[Answer]:
        """Has all objects of a signature removed, as ``remove_soon``."""


class LocalHandle:
    """This process's own."""

    def __init__(self, owner: Owner, engine: te.Engine, source: Source) -> None:
        self.source = source
        self._owner = owner
        self._identity = te.Identity(engine.id, engine.epoch)

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:  # noqa: ARG002
        """See ``Handle``. It does not wait."""
        return self._owner.storing.claim(keys, signature, nbytes, self._identity)

    @property
    def take_bytes_max(self) -> int:
        """See ``Handle``. All that there can be."""
        return 1 << 62

    def take(
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> Sequence[Verdict]:
        """See ``Handle``. It does not wait."""
        claim, checksums = self._owner.storing.fill(keys, signature, pieces)
        if claim.slots:
            try:
                check_unchanged(deadline)
            except NoAnswer:
                self._owner.storing.drop(claim)
                raise
            self._owner.storing.keep(claim, checksums)
            self._owner.tell()
        return claim.verdicts

    def claimed_ahead(self, keys: Keys, signature: bytes, nbytes: int) -> None:
        """See ``Handle``. A claim costs no message here."""

    def publish(
        self,
        grant: Grant,
        checksums: U64 | None,  # noqa: ARG002
        timeout_s: float,
    ) -> tuple[str, Sequence[Verdict]]:
        """See ``Handle``. It waits for the fence."""
        return self._owner.storing.publish(grant.claim_id, timeout_s), grant.verdicts

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``."""
        self._owner.storing.abandon(claim_id)

    def promote(
        self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float
    ) -> Sequence[Promoted]:
        """See ``Handle``."""
        return self._owner.promote(keys, signature, nbytes, timeout_s)

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> tuple[Sequence[Pinned], str]:
        """See ``Handle``."""
        return self._owner.pin(keys, signature, ttl_s)

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """See ``Handle``."""
        self._owner.unpin(keys, signature)

    def sizes(self, keys: Keys, signature: bytes) -> Sequence[int]:
        """See ``Handle``."""
        return self._owner.sizes(keys, signature)

    def remove_soon(self, keys: Keys, signature: bytes) -> Future[Answer]:
        """See ``Handle``."""
        removed = self._owner.remove_soon(keys, signature)
        return _answer_after(removed, lambda found: Gone(sum(found), bytes(found)))

    def clear_soon(self, signature: bytes) -> Future[Answer]:
        """See ``Handle``."""
        return _answer_after(self._owner.clear_soon(signature), Gone)


class AskedHandle:
    """Another process's, which is asked by messages."""

    #: Whether it is told of which objects a publication is, also where it knows that: for who
    #: passes the question on.
    _names_all = False

    def __init__(
        self,
        source: Source,
        name: str,
        writer: Callable[[], te.Identity],
        timeout_s: float,
        aheads: Aheads | None = None,
    ) -> None:
        """``name``: of the owner. ``writer``: the engine that writes what is claimed.
        ``timeout_s``: for answers that need no waiting at the owner. ``aheads``: claims for later
        puts; without it, none are made."""
        self.source = source
        self._aheads = aheads
        self._name = name
        self._writer = writer
        self._timeout_s = timeout_s
        #: By claim: what it is for.
        self._claimed: dict[int, _Claimed] = {}

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:
        """See ``Handle``."""
        writer = self._writer()
        question = Claim(keys.tobytes(), signature, nbytes, writer.id, writer.epoch)
        granted = self._ask(question, Granted, min(timeout_s, self._timeout_s))
        with self._sense("a claim"):
            verdicts = of_each(keys, granted.verdicts, Verdict)
            slots = np.frombuffer(granted.slots, "<u4").tolist()
            count = verdicts.count(Verdict.GRANTED)
            if len(slots) != count:
                raise ValueError(f"it grants {count} objects, and names {len(slots)} slots")
            if count and not 0 < granted.tag < 1 << 64:
                raise ValueError(f"{granted.tag} is no tag")
        rows = [row for row, one in enumerate(verdicts) if one is Verdict.GRANTED]
        self._claimed[granted.claim_id] = _Claimed(keys[rows], signature, nbytes)
        return Grant(granted.claim_id, granted.tag, verdicts, slots)

    def claimed_ahead(self, keys: Keys, signature: bytes, nbytes: int) -> Grant | None:
        """See ``Handle``. One of another shape is given up."""
        ahead = None if self._aheads is None else self._aheads.take()
        if ahead is None:
            return None
        if ahead.nbytes != nbytes or len(ahead.grant.slots) < len(keys):
            self.abandon(ahead.grant.claim_id)
            return None
        grant = ahead.grant
        self._claimed[grant.claim_id] = _Claimed(keys, signature, nbytes, is_ahead=True)
        verdicts = [Verdict.GRANTED] * len(keys)
        return Grant(grant.claim_id, grant.tag, verdicts, grant.slots[: len(keys)], grant.label)

    def publish(
        self, grant: Grant, checksums: U64 | None, timeout_s: float
    ) -> tuple[str, Sequence[Verdict]]:
        """See ``Handle``."""
        claimed = self._claimed.pop(grant.claim_id)
        keys, signature, nbytes, is_ahead = claimed
        question = Publish(
            grant.claim_id,
            b"" if checksums is None else checksums.astype("<u8").tobytes(),
            len(keys) if self._aheads is not None and len(keys) * nbytes <= AHEAD_BYTES_MAX else 0,
            keys.tobytes() if is_ahead or self._names_all else b"",
            signature,
        )
        begun_s = time.monotonic()
        published = self._ask(question, Published, timeout_s)
        verdicts = grant.verdicts
        with self._sense("what it has published"):
            if (is_ahead or published.verdicts) and not published.why_not:
                said = of_each(keys, published.verdicts, Verdict)
                keys = keys[[one is Verdict.GRANTED for one in said]]
                rest = iter(said)
                verdicts = [next(rest) if one is Verdict.GRANTED else one for one in verdicts]
            if published.placed is not None:
                self._learn(keys, signature, nbytes, published.placed)
            if published.ahead is not None and self._aheads is not None:
                self._aheads.keep(published.ahead, nbytes, begun_s)
        return published.why_not, verdicts

    def promote(
        self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float
    ) -> Sequence[Promoted]:
        """See ``Handle``. The owner answers a little before the time has passed, and after
        ``timeout_s`` of this object at the latest: so one that has died is noticed."""
        timeout_s = min(timeout_s, self._timeout_s)
        question = Promote(keys.tobytes(), signature, nbytes, answered_ms(timeout_s))
        answer = self._ask(question, InMemory, timeout_s)
        with self._sense("what is in memory"):
            states = [PromotionState(one) for one in answer.states]
            slots = np.frombuffer(answer.slots, "<u4").tolist()
            generations = np.frombuffer(answer.generations, "<u4").tolist()
            if not len(keys) == len(states) == len(slots) == len(generations):
                raise ValueError(f"it does not say it of each of {len(keys)} objects")
            return list(map(Promoted, states, slots, generations))

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> tuple[Sequence[Pinned], str]:
        """See ``Handle``."""
        question = Pin(keys.tobytes(), signature, max(int(ttl_s * 1000), 1))
        answer = self._ask(question, Pins, self._timeout_s)
        with self._sense("pins"):
            return of_each(keys, answer.outcomes, Pinned), answer.why

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """See ``Handle``."""
        self._ask(Unpin(keys.tobytes(), signature), Done, self._timeout_s)

    def sizes(self, keys: Keys, signature: bytes) -> Sequence[int]:
        """See ``Handle``."""
        answer = self._ask(Sizes(keys.tobytes(), signature), SizesOf, self._timeout_s)
        with self._sense("sizes"):
            sizes: list[int] = np.frombuffer(answer.sizes, "<u8").tolist()
            if len(sizes) != len(keys) or max(sizes, default=0) >= 1 << 63:
                raise ValueError(f"{len(sizes)} answers for {len(keys)} objects")
            return sizes

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``."""
        raise NotImplementedError

    def _answer(self, question: Question, timeout_s: float) -> Answer:
        """``NoAnswer``."""
        raise NotImplementedError

    def _learn(self, keys: Keys, signature: bytes, nbytes: int, placed: Placed) -> None:
        """What the owner says of where it has stored these. ``ValueError`` for nonsense."""

    def _ask(self, question: Question, kind: type[Wanted], timeout_s: float) -> Wanted:
        return self._expected(self._answer(question, timeout_s), kind)

    @contextmanager
    def _sense(self, what: str) -> Iterator[None]:
        """Another process may answer anything."""
        try:
            yield
        except ValueError as exc:
            raise NoAnswer(f"owner {self._name} answers nonsense of {what}: {exc}") from exc

    def _expected(self, answer: Answer, kind: type[Wanted]) -> Wanted:
        if not isinstance(answer, kind):
            raise NoAnswer(f"owner {self._name} answers with {type(answer).__name__}")
        return answer


class RemoteHandle(AskedHandle):
    """That of another host."""

    def __init__(
        self,
        owner: Followed,
        engine: te.Engine,
        source: Source,
        timeout_s: float,
    ) -> None:
        """``timeout_s``: see ``AskedHandle``."""
        super().__init__(
            source,
            owner.name,
            lambda: te.Identity(engine.id, engine.epoch),
            timeout_s,
            owner.aheads,
        )
        self._owner = owner

    @property
    def take_bytes_max(self) -> int:
        """See ``Handle``. Larger objects are written by te."""
        return STORED_BYTES_MAX

    def take(
        self, keys: Keys, signature: bytes, pieces: Pieces, deadline: Deadline
    ) -> Sequence[Verdict]:
        """See ``Handle``. In one question."""
        nbytes = pieces.object_bytes
        until_s = time.monotonic() + min(deadline.left_s, self._timeout_s)
        data = np.empty(len(pieces) * nbytes, np.uint8)
        gather(pieces, data.ctypes.data)
        check_unchanged(deadline)
        question = Store(keys.tobytes(), signature, nbytes, data.tobytes())
        taken = self._ask(question, Stored, until_s - time.monotonic())
        with self._sense("what it has stored"):
            verdicts = of_each(keys, taken.verdicts, Verdict)
            if taken.placed is not None:
                self._learn(keys, signature, nbytes, taken.placed)
        return verdicts

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``. It does not wait; an owner that does not hear it ends the claim at the
        claim's deadline."""
        self._owner.ask_soon(Abandon(claim_id))

    def remove_soon(self, keys: Keys, signature: bytes) -> Future[Answer]:
        """See ``Handle``. An owner that does not hear it keeps them."""
        return self._owner.ask_soon(Remove(keys.tobytes(), signature))

    def clear_soon(self, signature: bytes) -> Future[Answer]:
        """See ``Handle``. An owner that does not hear it keeps them."""
        return self._owner.ask_soon(Clear(signature))

    def _answer(self, question: Question, timeout_s: float) -> Answer:
        return self._owner.asker.ask(question, timeout_s)

    def _learn(self, keys: Keys, signature: bytes, nbytes: int, placed: Placed) -> None:
        self._owner.learn(keys, signature, nbytes, placed)


def within(question: Question, left_s: float) -> Question:
    """The question, of which the owner is to know how long its answer is waited for still."""
    if isinstance(question, Promote):
        return structs.replace(question, timeout_ms=answered_ms(left_s))
    return question


def answered_ms(left_s: float) -> int:
    """What an owner is given for an answer that is waited for so long."""
    return min(max(int(left_s * 1000 * ANSWERED_PART), 0), WAIT_MS_MAX)


def _answer_after(told: Future[Result], answer_of: Callable[[Result], Answer]) -> Future[Answer]:
    """Of what this process's own owner does."""
    future: Future[Answer] = Future()

    def end(told: Future[Result]) -> None:
        exc = told.exception()
        if exc is None:
            future.set_result(answer_of(told.result()))
        else:
            future.set_exception(exc)

    told.add_done_callback(end)
    return future


def of_each(keys: Keys, said: Sequence[str], kind: type[Told]) -> list[Told]:
    """``ValueError`` if it is not one of that kind for each key."""
    if len(said) != len(keys):
        raise ValueError(f"{len(said)} answers for {len(keys)} objects")
    if are_equal(said):
        return [kind(said[0])] * len(said)
    return [kind(one) for one in said]


def check_unchanged(deadline: Deadline) -> None:
    """For a source that has been copied: that the deadline is over may mean that it was used again
    meanwhile."""
    if deadline.is_over:
        raise NoAnswer("the deadline was over before the objects were stored")
