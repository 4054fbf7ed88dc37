# SPDX-License-Identifier: Apache-2.0
"""What is said over a session's port: a question for the card of te's engine, and its answer. Pure.

Mooncake names an engine by "host:port" and addresses its memory by number. te connects with a card
instead, and this is how one gets it. With secrets both sides prove that they have one in common: an
HMAC over a random number of the asker and the address that he has connected to, and over the answer
with both, so that nobody on the way can have another engine answer. Cards are no secret themselves:
engines prove their keys to each other once more when they connect.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bootstrap_server.admission.secret import SECRETS_MAX, mac
from te.handshake import CARD_BYTES_MAX

__all__ = [
    "ANSWER_HEAD_BYTES",
    "PROOF_BYTES",
    "QUESTION_HEAD_BYTES",
    "NoCard",
    "Told",
    "answer",
    "answer_nbytes",
    "place_of",
    "proofs_nbytes",
    "question",
    "read_answer",
    "refusal",
]

MAGIC: Final = b"te-card\x02"
"""The last byte is the version."""
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
_QUESTION: Final = struct.Struct(f">{len(MAGIC)}s{NONCE_BYTES}sB")
"""Magic, random number, count of proofs; so many proofs follow."""
_ANSWER: Final = struct.Struct(f">{len(MAGIC)}s?I")
"""Magic, whether it is a refusal, bytes of the body; the body and a proof follow."""
_FIRST: Final = struct.Struct(">Q")
QUESTION_HEAD_BYTES: Final = _QUESTION.size
ANSWER_HEAD_BYTES: Final = _ANSWER.size
BODY_BYTES_MAX: Final = CARD_BYTES_MAX + _FIRST.size
REFUSAL_CHARS_MAX: Final = 500
_ASKS, _TELLS = b"mooncake face: question", b"mooncake face: answer"


class NoCard(Exception):
    """The engine of a session could not be asked, or refused; the text says why."""


@dataclass(frozen=True)
class Told:
    """What an engine tells of itself."""

    #: ``te.Engine.card``.
    card: bytes
    #: Of the memory that was registered first; 0 if there is none.
    first_address: int


def place_of(address: tuple[str, int]) -> bytes:
    """Whom a question is for, of the address of his end of the connection. Zones of IPv6 addresses
    are each host's own."""
    return f"{address[0].partition('%')[0]} {address[1]}".encode()


def question(nonce: bytes, keys: Sequence[bytes], whom: bytes) -> bytes:
    """The bytes of a question; ``nonce``: random, of ``NONCE_BYTES``; ``whom``: ``place_of``."""
    proofs = b"".join(mac(key, _ASKS, nonce, whom) for key in keys)
    return _QUESTION.pack(MAGIC, nonce, len(keys)) + proofs


def proofs_nbytes(head: bytes) -> int:
    """How many bytes follow the head of a question. ``NoCard`` if it is none."""
    magic, _, count = _QUESTION.unpack(head)
    if magic != MAGIC or count > SECRETS_MAX:
        raise NoCard("these bytes are no question of this version for an engine's card")
    return int(count) * PROOF_BYTES


def answer(head: bytes, proofs: bytes, keys: Sequence[bytes], told: Told, whom: bytes) -> bytes:
    """The bytes of an answer to a question that has come to ``whom``. ``NoCard`` if it proves none
    of ``keys`` for him, or there are none and it wants one proved."""
    nonce = _QUESTION.unpack(head)[1]
    given = [proofs[i : i + PROOF_BYTES] for i in range(0, len(proofs), PROOF_BYTES)]
    body = _FIRST.pack(told.first_address) + told.card
    if not keys and not given:
        return _ANSWER.pack(MAGIC, False, len(body)) + body + bytes(PROOF_BYTES)
    for key in keys:
        wanted = mac(key, _ASKS, nonce, whom)
        if any(hmac.compare_digest(one, wanted) for one in given):
            return (
                _ANSWER.pack(MAGIC, False, len(body)) + body + mac(key, _TELLS, nonce, whom, body)
            )
    raise NoCard(
        "the secrets of the two processes differ, or one of them has none, or the question was put"
        f" to another address than {whom.decode()}; give all processes of the deployment the same"
        " secret, and let nothing between them translate addresses"
    )


def refusal(why: str) -> bytes:
    """The bytes of an answer that says why there is no card."""
    body = why[:REFUSAL_CHARS_MAX].encode("ascii", "replace")
    return _ANSWER.pack(MAGIC, True, len(body)) + body + bytes(PROOF_BYTES)


def answer_nbytes(head: bytes) -> int:
    """How many bytes follow the head of an answer. ``NoCard`` if it is none."""
    magic, _, nbytes = _ANSWER.unpack(head)
    if magic != MAGIC or nbytes > BODY_BYTES_MAX:
        raise NoCard(
            "what listens there is no transfer engine of sglang-mooncake, or one of another version"
        )
    return int(nbytes) + PROOF_BYTES


def read_answer(head: bytes, rest: bytes, nonce: bytes, keys: Sequence[bytes], whom: bytes) -> Told:
    """What was told by ``whom``. ``NoCard`` for a refusal, and for an answer that proves none of
    ``keys``."""
    body, proof = rest[:-PROOF_BYTES], rest[-PROOF_BYTES:]
    if _ANSWER.unpack(head)[1]:
        text = body[:REFUSAL_CHARS_MAX].decode("ascii", "replace")
        raise NoCard("it refuses: " + "".join(c if c.isprintable() else "?" for c in text))
    if len(body) < _FIRST.size:
        raise NoCard("its answer is too short")
    wanted = [mac(key, _TELLS, nonce, whom, body) for key in keys]
    if keys and not any(hmac.compare_digest(proof, one) for one in wanted):
        raise NoCard("its answer proves none of this process's secrets")
    return Told(body[_FIRST.size :], *_FIRST.unpack_from(body))
