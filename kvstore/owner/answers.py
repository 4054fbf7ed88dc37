# SPDX-License-Identifier: Apache-2.0
"""What an owner answers to questions, whichever way they come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

import te
from kvstore.objects.changes import KEY_BYTES, Keys
from kvstore.objects.pieces import Pieces
from kvstore.owner.claims import CLAIM_IS_OVER, Content, Held
from kvstore.owner.owner import Owner
from kvstore.protocol.messages import (
    VERSION,
    Abandon,
    Ahead,
    Answer,
    Changes,
    Claim,
    Clear,
    Done,
    Gone,
    Granted,
    Greet,
    Hello,
    InMemory,
    Pin,
    Pins,
    Placed,
    Promote,
    Publish,
    Published,
    Question,
    Refused,
    Remove,
    Sizes,
    SizesOf,
    Snapshot,
    Store,
    Stored,
    Touch,
    Unpin,
)
from kvstore.rules.tiered_table import Promoted

__all__ = ["answer", "is_slow", "keys_of", "promoted", "published", "stored"]


def is_slow(question: Question) -> bool:
    """Whether the answer waits for a tier, or looks at all objects. That to ``Publish`` waits for a
    fence, too, where it is not made by ``Owner.begin_publishing``."""
    return isinstance(question, Clear | Remove | Promote)


def answer(owner: Owner, question: Question) -> Answer:
    """``Refused`` for what cannot be answered like this, or at all."""
    try:
        return _answer(owner, question)
    except ValueError as exc:
        return Refused(str(exc))


def _answer(owner: Owner, question: Question) -> Answer:
    match question:
        case Greet(version):
            return _hello(owner, version)
        case Snapshot(first, chunks):
            number, found = owner.snapshot(first, chunks)
            return Changes(owner.card.epoch, number, found.tobytes())
        case Claim(keys, signature, nbytes, writer_id, epoch):
            grant = owner.claim(keys_of(keys), signature, nbytes, te.Identity(writer_id, epoch))
            return Granted(
                grant.claim_id,
                grant.tag,
                [one.value for one in grant.verdicts],
                np.array(grant.slots, "<u4").tobytes(),
            )
        case Store(keys, signature, nbytes, data):
            if len(data) != len(keys) // KEY_BYTES * nbytes:
                raise ValueError(
                    f"{len(data)} bytes are not {len(keys) // KEY_BYTES} objects of {nbytes}"
                )
            held = np.frombuffer(data, np.uint8)
            taken = stored(owner, keys, signature, nbytes, held.ctypes.data)
            owner.tell()
            return taken
        case Publish(claim_id):
            begun = owner.begin_publishing(claim_id)
            if begun is None:
                return Published(CLAIM_IS_OVER)
            begun.wait()
            return published(owner, begun, question)
        case Abandon(claim_id):
            owner.abandon(claim_id)
        case Clear(signature):
            return Gone(owner.clear(signature))
        case Remove(keys, signature):
            removed = owner.remove(keys_of(keys), signature)
            return Gone(sum(removed), bytes(removed))
        case Sizes(keys, signature):
            return SizesOf(np.array(owner.sizes(keys_of(keys), signature), "<u8").tobytes())
        case Promote(keys, signature, nbytes, timeout_ms):
            return promoted(owner.promote(keys_of(keys), signature, nbytes, timeout_ms / 1000))
        case Touch(keys, signature):
            owner.touch(keys_of(keys), signature)
        case Pin(keys, signature, ttl_ms):
            outcomes, why = owner.pin(keys_of(keys), signature, ttl_ms / 1000)
            return Pins([one.value for one in outcomes], why)
        case Unpin(keys, signature):
            owner.unpin(keys_of(keys), signature)
        case _:
            raise ValueError(f"{type(question).__name__} cannot be asked this way")
    return Done()


def stored(owner: Owner, keys: bytes, signature: bytes, nbytes: int, address: int) -> Stored:
    """Has the owner take objects that lie one behind the other in this process's memory; it has to
    ``tell`` then."""
    names = keys_of(keys)
    addresses = address + np.arange(len(names), dtype=np.uint64) * np.uint64(nbytes)
    verdicts = owner.take(names, signature, Pieces.whole(addresses, nbytes))
    return Stored([one.value for one in verdicts], _placed(owner, names, signature, nbytes))


def published(owner: Owner, held: Held, question: Publish) -> Published:
    """See ``Owner.end_publishing``."""
    whole = len(question.checksums) // 8 * 8
    checksums = np.frombuffer(question.checksums[:whole], "<u8")
    named = Content(checksums, keys_of(question.keys), question.signature)
    why_not, claim = owner.end_publishing(held, named)
    if why_not:
        return Published(why_not)
    keys = keys_of(b"".join(claim.keys))
    placed = _placed(owner, keys, claim.signature, claim.nbytes)
    verdicts = [] if held.claim.keys else [one.value for one in claim.verdicts]
    return Published("", placed, verdicts, _ahead(owner, held, question.ahead))


def _ahead(owner: Owner, held: Held, count: int) -> Ahead | None:
    grant = owner.claim_ahead(held, count)
    if grant is None:
        return None
    slots = np.array(grant.slots, "<u4").tobytes()
    return Ahead(grant.claim_id, grant.tag, slots, int(owner.claim_timeout_s * 1000))


def _placed(owner: Owner, keys: Keys, signature: bytes, nbytes: int) -> Placed:
    number, places = owner.places(keys, signature, nbytes)
    both = np.fromiter(chain.from_iterable(places), "<u4", 2 * len(places))
    slots, generations = both.reshape(-1, 2).T
    return Placed(number, slots.tobytes(), generations.tobytes())


def keys_of(raw: bytes) -> Keys:
    """Whole keys; what is left over is none."""
    whole = len(raw) // KEY_BYTES * KEY_BYTES
    return np.frombuffer(raw[:whole], np.uint8).reshape(-1, KEY_BYTES)


def promoted(told: Sequence[Promoted]) -> InMemory:
    """See ``Owner.promote``."""
    return InMemory(
        bytes(one.state for one in told),
        np.array([one.slot for one in told], "<u4").tobytes(),
        np.array([one.generation for one in told], "<u4").tobytes(),
    )


def _hello(owner: Owner, version: int) -> Answer:
    if version != VERSION:
        raise ValueError(f"this owner speaks version {VERSION} of the store's messages")
    card = owner.card
    return Hello(
        card.engine,
        card.epoch,
        card.headers_address,
        card.slots_address,
        card.chunks,
        card.object_bytes_max,
        card.parts,
        owner.changes,
    )
