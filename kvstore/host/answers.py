# SPDX-License-Identifier: Apache-2.0
"""What the owner of a host answers to the processes that use it. To them it is the whole store:
what they remove is removed everywhere, and what they want in memory is fetched from wherever it
is."""

from __future__ import annotations

from kvstore.client.gets import Gets
from kvstore.client.managing import Managing
from kvstore.client.memory import Memory
from kvstore.client.pool import Pool
from kvstore.host.bringing import Bringing
from kvstore.host.copies import Copies
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Removed
from kvstore.owner.answers import answer, keys_of, promoted
from kvstore.owner.owner import Owner
from kvstore.protocol.messages import (
    Answer,
    Clear,
    Copy,
    Discard,
    Done,
    Gone,
    Pin,
    Pins,
    Promote,
    Question,
    Refused,
    Remove,
    Sizes,
    SizesOf,
    Touch,
    Unpin,
)

__all__ = ["PoolAnswers"]


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
    ) -> None:
        """``memory_bytes``: of the owner."""
        self._owner = owner
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
            case Copy(keys, signature, nbytes, copies):
                self._copies.copy(keys_of(keys), signature, nbytes, copies)
                return Done()
            case _:
                return answer(self._owner, question)
