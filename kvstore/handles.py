# SPDX-License-Identifier: Apache-2.0
"""An owner, as somebody stores at it: this process's own, or another's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import numpy as np

import te
from kvstore.asking import NoAnswer
from kvstore.changes import Keys
from kvstore.deepshelf import Lifted, LiftState
from kvstore.far import Followed
from kvstore.messages import (
    LIFT_MS_MAX,
    Abandon,
    Claim,
    Clear,
    Done,
    Granted,
    InMemory,
    Lift,
    Publish,
    Question,
    Remove,
    Store,
    Stored,
)
from kvstore.owner import Grant, Owner
from kvstore.reading import Source
from kvstore.shelf import Verdict

__all__ = ["FarHandle", "Handle", "OwnHandle"]

ANSWERED_PART: Final = 0.8
"""An owner is given this part of the time for an answer to a question that waits."""

Wanted = TypeVar("Wanted", Granted, Done, Stored, InMemory)


class Handle(Protocol):
    """What storing needs of an owner. Each call raises ``NoAnswer`` if the owner does not answer in
    time, or refuses."""

    source: Source

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:
        """See ``Owner.claim``."""

    def store(
        self, keys: Keys, signature: bytes, nbytes: int, data: bytes, timeout_s: float
    ) -> Sequence[Verdict]:
        """See ``Owner.store``. At most ``STORED_BYTES_MAX`` bytes."""

    def publish(self, claim_id: int, timeout_s: float) -> str:
        """See ``Owner.publish``."""

    def abandon(self, claim_id: int) -> None:
        """Ends a claim. It raises nothing."""

    def lift(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Sequence[Lifted]:
        """See ``Owner.lift``."""

    def remove(self, keys: Keys, signature: bytes) -> None:
        """Removes objects."""

    def clear(self, signature: bytes) -> None:
        """Removes all objects of a signature."""


class OwnHandle:
    """This process's own."""

    def __init__(self, owner: Owner, engine: te.Engine, source: Source) -> None:
        self.source = source
        self._owner = owner
        self._identity = te.Identity(engine.id, engine.epoch)

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:  # noqa: ARG002
        """See ``Handle``. It does not wait."""
        return self._owner.claim(keys, signature, nbytes, self._identity)

    def store(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        data: bytes,
        timeout_s: float,  # noqa: ARG002
    ) -> Sequence[Verdict]:
        """See ``Handle``. It does not wait."""
        return self._owner.store(keys, signature, nbytes, data)

    def publish(self, claim_id: int, timeout_s: float) -> str:  # noqa: ARG002
        """See ``Handle``. It waits for the fence."""
        return self._owner.publish(claim_id)

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``."""
        self._owner.abandon(claim_id)

    def lift(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Sequence[Lifted]:
        """See ``Handle``."""
        return self._owner.lift(keys, signature, nbytes, timeout_s)

    def remove(self, keys: Keys, signature: bytes) -> None:
        """See ``Handle``."""
        self._owner.remove(keys, signature)

    def clear(self, signature: bytes) -> None:
        """See ``Handle``."""
        self._owner.clear(signature)


class FarHandle:
    """Another process's."""

    def __init__(
        self, owner: Followed, engine: te.Engine, source: Source, timeout_s: float
    ) -> None:
        """``timeout_s``: for answers that need no waiting at the owner."""
        self.source = source
        self._owner = owner
        self._engine = engine
        self._timeout_s = timeout_s

    def claim(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Grant:
        """See ``Handle``."""
        question = Claim(keys.tobytes(), signature, nbytes, self._engine.id, self._engine.epoch)
        granted = self._ask(question, Granted, min(timeout_s, self._timeout_s))
        return Grant(
            granted.claim_id,
            granted.tag,
            [Verdict(one) for one in granted.verdicts],
            np.frombuffer(granted.slots, "<u4").tolist(),
        )

    def store(
        self, keys: Keys, signature: bytes, nbytes: int, data: bytes, timeout_s: float
    ) -> Sequence[Verdict]:
        """See ``Handle``."""
        question = Store(keys.tobytes(), signature, nbytes, data)
        answer = self._ask(question, Stored, min(timeout_s, self._timeout_s))
        return [Verdict(one) for one in answer.verdicts]

    def publish(self, claim_id: int, timeout_s: float) -> str:
        """See ``Handle``."""
        return self._ask(Publish(claim_id), Done, timeout_s).why_not

    def abandon(self, claim_id: int) -> None:
        """See ``Handle``. If the owner does not answer, the claim's deadline ends it."""
        with contextlib.suppress(NoAnswer):
            self._ask(Abandon(claim_id), Done, self._timeout_s)

    def lift(self, keys: Keys, signature: bytes, nbytes: int, timeout_s: float) -> Sequence[Lifted]:
        """See ``Handle``. The owner answers a little before the time has passed."""
        timeout_ms = min(int(timeout_s * 1000 * ANSWERED_PART), LIFT_MS_MAX)
        question = Lift(keys.tobytes(), signature, nbytes, timeout_ms)
        answer = self._ask(question, InMemory, timeout_s)
        states = [LiftState(one) for one in answer.states]
        slots = np.frombuffer(answer.slots, "<u4").tolist()
        generations = np.frombuffer(answer.generations, "<u4").tolist()
        return list(map(Lifted, states, slots, generations))

    def remove(self, keys: Keys, signature: bytes) -> None:
        """See ``Handle``."""
        self._ask(Remove(keys.tobytes(), signature), Done, self._timeout_s)

    def clear(self, signature: bytes) -> None:
        """See ``Handle``."""
        self._ask(Clear(signature), Done, self._timeout_s)

    def _ask(self, question: Question, kind: type[Wanted], timeout_s: float) -> Wanted:
        answer = self._owner.asker.ask(question, timeout_s)
        if not isinstance(answer, kind):
            raise NoAnswer(f"owner {self._owner.name} answers with {type(answer).__name__}")
        return answer
