# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a connection prove to each other. Pure.

A proof is a message authentication code over what is said and over the proof before it: the
destination's over the source's call, the source's over that, the destination's answer over that. So
what was recorded counts on no other connection, for no other engine, link or transport, in no other
role, and with no byte changed.

The first connection of a link is proved with a key that both engines were given
(``te.Config.keys``), or with ``NO_KEY`` if they were given none: anybody can compute those proofs,
and they show only that their maker has read what they answer. From that greeting both sides derive
the link's session key, with which every later connection of the link is proved.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

__all__ = [
    "CHALLENGE_BYTES",
    "KEYS_MAX",
    "KEY_BYTES",
    "KEY_ID_BYTES",
    "NO_KEY",
    "PROOF_BYTES",
    "Key",
    "answer_proof",
    "challenge_proof",
    "hello_proof",
    "is_same",
    "keys_of",
    "session_key",
    "stream_secrets",
]

KEY_BYTES: Final = 32
KEYS_MAX: Final = 4
"""Keys that an engine accepts: two while an operator replaces one, and two more."""
KEY_ID_BYTES: Final = 8
CHALLENGE_BYTES: Final = 32
PROOF_BYTES: Final = 32

# What a code is for comes first, so that none can be taken for another.
_CHALLENGE: Final = b"te challenge\0"
_HELLO: Final = b"te hello\0"
_ANSWER: Final = b"te answer\0"
_SESSION: Final = b"te session\0"
_ID: Final = b"te key id\0"
_FROM_SOURCE: Final = b"te from the source\0"
_FROM_DESTINATION: Final = b"te from the destination\0"


class Key:
    """Makes codes. Any thread may call anything."""

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        #: Names the key to whoever has it, too. It tells nobody else anything: it is as hard to
        #: compute the key from it as to guess the key.
        self.id: Final = self.expand(_ID)[:KEY_ID_BYTES]

    def __repr__(self) -> str:
        return f"Key({self.id.hex()})"

    def code(self, said: bytes) -> bytes:
        """HMAC-SHA256 (RFC 2104)."""
        return hmac.digest(self._secret, said, "sha256")

    def expand(self, info: bytes) -> bytes:
        """HKDF-Expand (RFC 5869, 2.3) to 32 bytes."""
        return self.code(info + b"\x01")


NO_KEY: Final = Key(b"")
"""The key of engines without keys."""


def keys_of(secrets: Iterable[bytes]) -> tuple[Key, ...]:
    """The keys that an engine with these accepts, the preferred one first; never empty."""
    return tuple(Key(one) for one in secrets) or (NO_KEY,)


def is_same(one: bytes, other: bytes) -> bool:
    """In a time that tells nothing of where they differ."""
    return hmac.compare_digest(one, other)


def challenge_proof(key: Key, challenge: bytes, who: bytes, kind: int, call: bytes) -> bytes:
    """The destination's: it is ``who``, of a fixed size, and has read that call."""
    assert len(challenge) == CHALLENGE_BYTES
    return key.code(_CHALLENGE + challenge + who + kind.to_bytes(2, "little") + call)


def hello_proof(key: Key, challenge: bytes, claim: bytes, body: bytes) -> bytes:
    """The source's: it has read the challenge with that proof, and says this. Only the body's size
    may differ."""
    assert len(challenge) == PROOF_BYTES
    return key.code(_HELLO + challenge + claim + body)


def answer_proof(key: Key, hello: bytes, kind: int, body: bytes) -> bytes:
    """The destination's, in its welcome or refusal, to the hello with that proof."""
    assert len(hello) == PROOF_BYTES
    return key.code(_ANSWER + hello + kind.to_bytes(2, "little") + body)


def session_key(key: Key, hello: bytes, answer: bytes) -> Key:
    """The session key of the link whose first hello and welcome have these proofs."""
    assert len(hello) == len(answer) == PROOF_BYTES
    return Key(key.expand(_SESSION + hello + answer))


def stream_secrets(session: Key, hello: bytes) -> tuple[bytes, bytes]:
    """Secrets to encrypt a connection of the link with that session key: of what its source says,
    and of what its destination says. The proof of its hello covers random bytes of both, so no
    other connection has these."""
    assert len(hello) == PROOF_BYTES
    return session.expand(_FROM_SOURCE + hello), session.expand(_FROM_DESTINATION + hello)
