# SPDX-License-Identifier: Apache-2.0
"""What the owner of a host answers to the processes that use it. To them it is the whole store:
what they remove is removed everywhere, and what they want in memory is fetched from wherever it
is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore.client.deadline import Deadline
from kvstore.client.gets import Gets
from kvstore.client.managing import Managing
from kvstore.client.memory import Memory
from kvstore.client.owners import Owners
from kvstore.client.status import StoreStatus
from kvstore.client.writing import OUTCOMES
from kvstore.host.bringing import Bringing
from kvstore.host.copies import Copies
from kvstore.host.telling import Teller
from kvstore.objects.changes import Keys
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Put, Removed
from kvstore.objects.pieces import U64
from kvstore.owner.answers import answer, content_of, in_row, keys_of, promoted
from kvstore.owner.claims import CLAIM_IS_OVER
from kvstore.owner.owner import Owner
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.messages import (
    CALL_BYTES_MAX,
    NO_TURN,
    Abandon,
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
    Lender,
    Lenders,
    LendersAre,
    Pin,
    Pins,
    Promote,
    Publish,
    Published,
    Question,
    Refused,
    Relay,
    Remove,
    Reserve,
    Sizes,
    SizesOf,
    Stored,
    Take,
    Touch,
    Unpin,
    decode_question,
)
from kvstore.protocol.messages import Claim as ClaimSlots
from kvstore.rules.object_table import Claim, Verdict, texts_of

__all__ = ["PoolAnswers"]

_VERDICTS: Final = {one: verdict for verdict, one in OUTCOMES.items()} | {
    Put.STORED: Verdict.GRANTED
}
"""Of what was put at other hosts; what is not among these is not stored there."""
LENDERS_BYTES: Final = CALL_BYTES_MAX // 2
"""Of the cards of owners that one answer tells."""


class PoolAnswers:
    """Is called in many threads; each call may wait."""

    def __init__(
        self,
        owner: Owner,
        pool: Owners,
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
        self._pool = pool
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
            case Touch(keys, signature, nbytes):
                # Owners of other hosts, too, as their objects are read without their knowing it.
                self._pool.touch_soon(keys_of(keys), signature, nbytes)
                return None
            case Lenders(first):
                return self._lenders(first)
            case Relay():
                return self._relayed(question)
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
        keys, signature = keys_of(question.keys), question.signature
        pieces = in_row(address, len(keys), question.nbytes)
        if self._lends:
            return Stored(texts_of(self._owner.storing.take(keys, signature, pieces)))
        claim, checksums = self._owner.storing.fill(keys, signature, pieces)
        deadline = Deadline(question.timeout_ms / 1000)
        return Stored(texts_of(self._sent(claim, keys, checksums, deadline)))

    def _sent(self, claim: Claim, keys: Keys, checksums: U64, deadline: Deadline) -> list[Verdict]:
        """Has what has come to slots stored at other hosts. One verdict for each of the keys that
        the claim was asked for."""
        verdicts = list(claim.verdicts)
        if claim.slots:
            found = iter(self._copies.send(claim, checksums, deadline))
            self._owner.tell()
            verdicts = [_of(next(found)) if one is Verdict.GRANTED else one for one in verdicts]
        # They lie here on their way from somewhere, which may not have them any more.
        here = [row for row, one in enumerate(claim.verdicts) if one is Verdict.EXISTS]
        if here:
            found = iter(self._copies.copy(keys[here], claim.signature, claim.nbytes, 1))
            for row in here:
                verdicts[row] = _of(next(found))
        return verdicts

    def _lenders(self, first: int) -> LendersAre:
        found, room = list[Lender](), LENDERS_BYTES
        for number, card, name, host in self._pool.lending(first):
            room -= len(card.engine)
            if room < 0 and found:
                return LendersAre(found, number)
            where = (card.engine, card.headers_address, card.slots_address)
            lent = card.chunks * card.object_bytes_max
            found.append(Lender(number, *where, name, host, lent))
        return LendersAre(found, 0)

    def _relayed(self, relay: Relay) -> Answer:
        question = decode_question(relay.question)
        if not isinstance(question, ClaimSlots | Reserve | Publish | Abandon):
            return Refused(f"{type(question).__name__} is not passed on to another host")
        try:
            return self._pool.relay(relay.number, relay.name, question, relay.nbytes)
        except NoAnswer as exc:
            return Refused(str(exc))

    def _figures(self, asker: bytes) -> FiguresOf:
        status = self._status()
        assert status.own is not None, "who lends nothing has no users"
        told = self._teller.tell(asker, status.own, time.monotonic()) if asker else None
        turn, own = told or (NO_TURN, status.own)
        return FiguresOf(msgspec.msgpack.encode(msgspec.structs.replace(status, own=own)), turn)

    def _published(self, claim_id: int, question: Publish) -> Answer:
        """Of memory that the client's processor cannot read."""
        held = self._owner.storing.begin_publishing(claim_id)
        if held is None:
            return Published(CLAIM_IS_OVER)
        held.wait()
        why_not, claim, checksums = self._owner.storing.filled(held, content_of(question))
        if why_not:
            return Published(why_not)
        found = self._copies.send(claim, checksums, Deadline(self._pool.request_timeout_s))
        self._owner.tell()
        return Published("", None, [_of(one).value for one in found])


def _of(outcome: Put) -> Verdict:
    """Of an object that was to be stored at another host."""
    return _VERDICTS.get(outcome, Verdict.NOT_COPIED)
