# SPDX-License-Identifier: Apache-2.0
"""What the owner of a host answers to the processes that use it. To them it is the whole store:
what they remove is removed everywhere, and what they want in memory is fetched from wherever it
is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.client.gets import Gets
from kvstore.client.managing import Managing
from kvstore.client.memory import Memory
from kvstore.client.pool import Pool
from kvstore.client.status import StoreStatus
from kvstore.client.writing import OUTCOMES
from kvstore.host.bringing import Bringing
from kvstore.host.copies import Copies
from kvstore.host.telling import Teller
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Put, Removed
from kvstore.owner.answers import answer, keys_of, promoted, published, stored
from kvstore.owner.claims import CLAIM_IS_OVER
from kvstore.owner.owner import Owner
from kvstore.protocol.messages import (
    NO_TURN,
    Answer,
    Clear,
    Copy,
    Discard,
    Done,
    Figures,
    FiguresOf,
    Gone,
    Greet,
    Hello,
    Pin,
    Pins,
    Promote,
    Publish,
    Published,
    Question,
    Refused,
    Remove,
    Sizes,
    SizesOf,
    Stored,
    Take,
    Touch,
    Unpin,
)
from kvstore.rules.object_table import Verdict

__all__ = ["PoolAnswers"]

_VERDICTS: Final = {one: verdict for verdict, one in OUTCOMES.items()} | {
    Put.STORED: Verdict.GRANTED
}
"""Of what was put at other hosts; what is not among these is not stored there."""


class PoolAnswers:
    """Is called in many threads; each call may wait."""

    def __init__(
        self,
        owner: Owner,
        pool: Pool,
        memory: Memory,
        gets: Gets,
        copier: Copier,
        memory_bytes: int,
        status: Callable[[], StoreStatus],
        teller: Teller,
        *,
        lends: bool,
    ) -> None:
        """``memory_bytes``: of the owner. ``status``: how it is; ``teller``: who tells that.
        ``lends``: else what is put is stored at others, by way of this memory."""
        self._status = status
        self._teller = teller
        self._owner = owner
        self._lends = lends
        self._managing = Managing(pool)
        self._copies = Copies(owner, pool, memory, copier)
        self._bringing = Bringing(owner, pool, gets, memory_bytes)

    def __call__(self, question: Question) -> Answer | None:
        """``Refused`` for what cannot be answered. None: nobody waits for an answer."""
        try:
            return self._answer(question)
        except ValueError as exc:
            return Refused(str(exc))

    def _answer(self, question: Question) -> Answer | None:
        match question:
            case Touch(keys, signature):
                self._owner.touch(keys_of(keys), signature)
                return None
            case Discard(keys, signature):
                self._managing.remove_soon(keys_of(keys), signature)
                return None
            case Promote(keys, signature, nbytes, timeout_ms):
                return promoted(
                    self._bringing.bring(keys_of(keys), signature, nbytes, timeout_ms / 1000)
                )
            case Remove(keys, signature):
                outcomes = self._managing.remove(keys_of(keys), signature)
                if Removed.UNREACHABLE in outcomes:
                    return Refused("not all owners of the store could be asked")
                found = [one is Removed.REMOVED for one in outcomes]
                return Gone(sum(found), bytes(found))
            case Clear(signature):
                return Gone(self._managing.clear(signature))
            case Sizes(keys, signature):
                sizes = self._managing.sizes(keys_of(keys), signature)
                return SizesOf(sizes.astype("<u8").tobytes())
            case Pin(keys, signature, ttl_ms):
                pinned = self._managing.pin(keys_of(keys), signature, ttl_ms / 1000)
                return Pins([one.value for one in pinned], "")
            case Unpin(keys, signature):
                self._managing.unpin(keys_of(keys), signature)
                return Done()
            case Greet() if not self._lends:
                hello = answer(self._owner, question)
                if isinstance(hello, Hello):
                    return msgspec.structs.replace(hello, lends=False)
                return hello
            case Publish(claim_id) if not self._lends:
                return self._published(claim_id, question)
            case Copy(keys, signature, nbytes, copies):
                self._copies.copy(keys_of(keys), signature, nbytes, copies)
                return Done()
            case Figures(asker):
                return self._figures(asker)
            case _:
                return answer(self._owner, question)

    def take(self, question: Take, address: int) -> Answer:
        """Stores objects that lie one behind the other in this process's memory. ``ValueError``."""
        keys, signature, nbytes = keys_of(question.keys), question.signature, question.nbytes
        taken = stored(self._owner, question.keys, signature, nbytes, address)
        if self._lends:
            return taken
        self._owner.tell()
        found = self._copies.copy(keys, signature, nbytes, 1)
        verdicts = list[str]()
        for said, one in zip(taken.verdicts, found, strict=True):
            is_here = said in (Verdict.GRANTED.value, Verdict.EXISTS.value)
            verdicts.append(_of_copy(one) if is_here else said)
        return Stored(verdicts, taken.placed)

    def _figures(self, asker: bytes) -> FiguresOf:
        status = self._status()
        assert status.own is not None, "who lends nothing has no users"
        told = self._teller.tell(asker, status.own, time.monotonic()) if asker else None
        turn, own = told or (NO_TURN, status.own)
        return FiguresOf(msgspec.msgpack.encode(msgspec.structs.replace(status, own=own)), turn)

    def _published(self, claim_id: int, question: Publish) -> Answer:
        """Of memory that the client's processor cannot read."""
        held = self._owner.begin_publishing(claim_id)
        if held is None:
            return Published(CLAIM_IS_OVER)
        held.wait()
        answer, claim = published(self._owner, held, question), held.claim
        if not answer.why_not:
            keys = keys_of(b"".join(claim.keys))
            found = self._copies.copy(keys, claim.signature, claim.nbytes, 1)
            return Published("", None, [_of_copy(one) for one in found])
        return answer


def _of_copy(outcome: Put) -> str:
    return _VERDICTS.get(outcome, Verdict.NOT_COPIED).value
