# SPDX-License-Identifier: Apache-2.0
"""What an owner answers to questions, whichever way they come."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

import te
from kvstore.objects.changes import KEY_BYTES, Keys
from kvstore.objects.pieces import Pieces
from kvstore.owner.claims import CLAIM_IS_OVER, Content, Grant, Held
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
    Reserve,
    Reserved,
    Sizes,
    SizesOf,
    Snapshot,
    Store,
    Stored,
    Touch,
    Unpin,
)
from kvstore.rules.object_table import texts_of
from kvstore.rules.tiered_table import Promoted

__all__ = ["answer", "content_of", "in_row", "is_slow", "keys_of", "promoted", "published"]


def is_slow(question: Question) -> bool:
    """Whether the answer waits for a tier, or looks at all objects. That to ``Publish`` waits for a
    fence, too, where it is not made by ``Storing.begin_publishing``."""
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
            grant = owner.storing.claim(
                keys_of(keys), signature, nbytes, te.Identity(writer_id, epoch)
            )
            return Granted(
                grant.claim_id,
                grant.tag,
                texts_of(grant.verdicts),
                np.array(grant.slots, "<u4").tobytes(),
            )
        case Store(keys, signature, nbytes, data):
            if len(data) != len(keys) // KEY_BYTES * nbytes:
                raise ValueError(
                    f"{len(data)} bytes are not {len(keys) // KEY_BYTES} objects of {nbytes}"
                )
            return _stored(owner, question)
        case Publish(claim_id):
            begun = owner.storing.begin_publishing(claim_id)
            if begun is None:
                return Published(CLAIM_IS_OVER)
            begun.wait()
            return published(owner, begun, question)
        case Reserve(count, nbytes, writer_id, epoch):
            writer = te.Identity(writer_id, epoch)
            return Reserved(_ahead(owner, owner.storing.reserve(writer, nbytes, count)))
        case Abandon(claim_id):
            owner.storing.abandon(claim_id)
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


def _stored(owner: Owner, question: Store) -> Stored:
    keys, held = keys_of(question.keys), np.frombuffer(question.data, np.uint8)
    pieces = in_row(held.ctypes.data, len(keys), question.nbytes)
    verdicts = owner.storing.take(keys, question.signature, pieces)
    placed = _placed(owner, keys, question.signature, question.nbytes)
    owner.tell()
    return Stored(texts_of(verdicts), placed)


def in_row(address: int, count: int, nbytes: int) -> Pieces:
    """Objects that lie one behind the other."""
    starts = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
    return Pieces.whole(starts, nbytes)


def content_of(question: Publish) -> Content:
    """What it says of the objects."""
    whole = len(question.checksums) // 8 * 8
    checksums = np.frombuffer(question.checksums[:whole], "<u8")
    return Content(checksums, keys_of(question.keys), question.signature)


def published(owner: Owner, held: Held, question: Publish) -> Published:
    """See ``Owner.end_publishing``."""
    why_not, claim = owner.storing.end_publishing(held, content_of(question))
    if why_not:
        return Published(why_not)
    keys = keys_of(b"".join(claim.keys))
    placed = _placed(owner, keys, claim.signature, claim.nbytes)
    verdicts = [] if held.claim.keys else texts_of(claim.verdicts)
    grant = owner.storing.claim_ahead(held, question.ahead)
    return Published("", placed, verdicts, _ahead(owner, grant))


def _ahead(owner: Owner, grant: Grant | None) -> Ahead | None:
    if grant is None:
        return None
    slots = np.array(grant.slots, "<u4").tobytes()
    ms = int(owner.claim_timeout_s * 1000)
    return Ahead(grant.claim_id, grant.tag, slots, ms, grant.label)


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
