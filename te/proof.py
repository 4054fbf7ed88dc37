# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connection prove to each other. Pure.

A proof is a message authentication code over everything that was said before: the destination's
challenge, the source's nonce, both identities, the link, the transport and the bodies. So what was
recorded counts on no other connection, for no other engine, link or transport, and with no byte
changed. With the empty key, the only one that there is today, anybody can compute it: then a proof
shows that its maker has read what it answers, and nothing of who that is.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Final, TypeAlias

__all__ = [
    "CHALLENGE_BYTES",
    "PROOF_BYTES",
    "Prover",
    "answer_proof",
    "hello_proof",
    "is_same",
    "null_key",
]

CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32

# What a proof is for comes first, so that none can be taken for another.
_HELLO: Final = b"te hello\0"
_ANSWER: Final = b"te answer\0"

Prover: TypeAlias = Callable[[bytes], bytes]
"""Returns the code, ``PROOF_BYTES``, of what was said: with the key of an engine. Any thread."""


def null_key(said: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104) with the empty key."""
    return hmac.digest(b"", said, "sha256")


def is_same(one: bytes, other: bytes) -> bool:
    """In a time that tells nothing of where they differ."""
    return hmac.compare_digest(one, other)


def hello_proof(prover: Prover, challenge: bytes, claim: bytes, body: bytes) -> bytes:
    """The source's: it has read the challenge, and says this. Only the body's size may differ."""
    assert len(challenge) == CHALLENGE_BYTES
    return prover(_HELLO + challenge + claim + body)


def answer_proof(prover: Prover, hello: bytes, kind: int, body: bytes) -> bytes:
    """The destination's, in its welcome or refusal, to the hello with that proof."""
    assert len(hello) == PROOF_BYTES
    return prover(_ANSWER + hello + kind.to_bytes(2, "little") + body)
