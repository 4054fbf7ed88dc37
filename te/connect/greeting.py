# SPDX-License-Identifier: Apache-2.0
"""The bytes on a connection. Pure: no sockets, no clock.

Everything is little-endian. The side that dials speaks first, with a ``CALL``, or a ``CALL_LINK``
for a link that stands: random bytes, and which keys it could prove. The other answers with a
``CHALLENGE``, which proves who it is, with one of these keys. Only then does the dialler say who it
is, in its ``HELLO``, and gets a ``WELCOME`` or a ``REFUSE``. Each is a greeting, whose 16-byte
header is the same in every version for ever, so that engines of different versions can say so:

    magic 8s, version u16, kind u16, body bytes u32; then the body

Nothing of a stranger is decoded before its proof: all but the answers are fields of fixed size, the
hello with a body of bytes behind them that the proof covers. Then come the frames of the plane
(``te/core/wire.h``), on some links by another way than the connection. docs/wire.md has all of it.

That the dialler speaks first costs no round trip: its call arrives with the end of TCP's own
handshake, before which the other side could not speak either.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from te.errors import ProtocolViolation
from te.handshake import BODY_BYTES_MAX
from te.proof import (
    CHALLENGE_BYTES,
    KEY_ID_BYTES,
    KEYS_MAX,
    PROOF_BYTES,
    Key,
    answer_proof,
    challenge_proof,
    hello_proof,
    is_same,
)

__all__ = [
    "CALL_BODY_MAX",
    "CALL_KINDS",
    "CHALLENGE_BODY",
    "CLAIM",
    "CLAIM_FIELDS",
    "GREETING",
    "GREETING_BODY_MAX",
    "HELLO_BODY_MAX",
    "MAGIC",
    "NONCE_BYTES",
    "Greeting",
    "GreetingKind",
    "GreetingReader",
    "Hello",
    "Proven",
    "Turn",
    "called_keys",
    "encode_call",
    "encode_greeting",
    "open_answer",
    "open_challenge",
    "open_hello",
    "seal_answer",
    "seal_challenge",
    "seal_hello",
]

MAGIC: Final = b"te-wire\0"
GREETING: Final = struct.Struct("<8sHHI")
GREETING_BODY_MAX: Final = 4096

NONCE_BYTES: Final = 32
ID_BYTES: Final = 16
NAME_BYTES: Final = 16
CALL_BODY_MAX: Final = NONCE_BYTES + KEYS_MAX * KEY_ID_BYTES
CHALLENGE_BODY: Final = struct.Struct(f"<{KEY_ID_BYTES}s{CHALLENGE_BYTES}s{PROOF_BYTES}s")
CLAIM_FIELDS: Final = (
    ("id", f"{ID_BYTES}s", "of the source, as on its card; likewise the next"),
    ("epoch", "Q", ""),
    ("peer id", f"{ID_BYTES}s", "of the destination, as on its card; likewise the next"),
    ("peer epoch", "Q", ""),
    ("link", "Q", "connections with the same number are about one link"),
    ("transport", f"{NAME_BYTES}s", "what the link is over: ASCII, padded with zeros"),
)
"""What a hello begins with: name, type as in ``struct``, meaning. Its proof follows."""

CLAIM: Final = struct.Struct("<" + "".join(kind for _, kind, _ in CLAIM_FIELDS))
HELLO_BODY_MAX: Final = CLAIM.size + PROOF_BYTES + BODY_BYTES_MAX
"""The most that the dialling side can say."""

_WHO: Final = struct.Struct(f"<{ID_BYTES}sQ")


class GreetingKind(enum.IntEnum):
    """Kinds of greeting."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    CHALLENGE = 4
    CALL = 5
    CALL_LINK = 6


CALL_KINDS: Final = frozenset({GreetingKind.CALL, GreetingKind.CALL_LINK})


@dataclass(frozen=True)
class Greeting:
    """A greeting of any version; the body is only known to be ours if the version is."""

    version: int
    kind: int
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Source to destination: who I am, whom your card says you are, and what this connection is
    about."""

    #: The source's id (32 hex digits) and epoch, as on its card.
    id: str
    epoch: int
    #: The destination's id and epoch, as on its card.
    peer_id: str
    peer_epoch: int
    link: int
    #: Name of the link's transport.
    transport: str
    #: What this transport has to say of the link.
    body: bytes = b""


@dataclass(frozen=True)
class Turn:
    """What a hello has to prove that it answers."""

    key: Key
    #: The proof of the challenge, which depends on the call and on the destination.
    proof: bytes


@dataclass(frozen=True)
class Proven:
    """A hello with what its answer has to prove that it is an answer to."""

    hello: Hello
    key: Key
    #: The proof of the hello, which depends on the challenge and all of the hello.
    proof: bytes


def encode_call(nonce: bytes, keys: tuple[Key, ...]) -> bytes:
    """The body of a call, with keys in the order in which the dialler prefers them; of a
    ``CALL_LINK`` with the session key alone."""
    assert len(nonce) == NONCE_BYTES
    assert 0 < len(keys) <= KEYS_MAX
    return nonce + b"".join(one.id for one in keys)


def called_keys(greeting: Greeting) -> list[bytes]:
    """Identifiers of the keys that a dialler could prove. Raises ``ProtocolViolation`` for a body
    that is not one of a call."""
    said = greeting.body[NONCE_BYTES:]
    count, rest = divmod(len(said), KEY_ID_BYTES)
    if rest or not 0 < count <= (KEYS_MAX if greeting.kind == GreetingKind.CALL else 1):
        raise ProtocolViolation(f"a call of {len(greeting.body)} bytes")
    return [said[at : at + KEY_ID_BYTES] for at in range(0, len(said), KEY_ID_BYTES)]


def seal_challenge(
    call: Greeting, challenge: bytes, key: Key, id_: str, epoch: int
) -> tuple[bytes, Turn]:
    """The body of the destination's challenge, which has that id and epoch; and what the hello has
    to answer."""
    who = _WHO.pack(bytes.fromhex(id_), epoch)
    proof = challenge_proof(key, challenge, who, call.kind, call.body)
    return CHALLENGE_BODY.pack(key.id, challenge, proof), Turn(key, proof)


def open_challenge(
    body: bytes, call: Greeting, keys: tuple[Key, ...], id_: str, epoch: int
) -> Turn | None:
    """What the hello has to answer; None unless the challenge answers that call, and comes from the
    engine with that id and epoch, which has one of the keys."""
    key_id, challenge, proof = CHALLENGE_BODY.unpack(body)
    key = next((one for one in keys if one.id == key_id), None)
    if key is None:
        return None
    _, turn = seal_challenge(call, challenge, key, id_, epoch)
    return turn if is_same(turn.proof, proof) else None


def seal_hello(hello: Hello, turn: Turn) -> tuple[bytes, bytes]:
    """The body of a greeting for that hello, and its proof."""
    assert len(hello.transport) <= NAME_BYTES
    claim = CLAIM.pack(
        bytes.fromhex(hello.id),
        hello.epoch,
        bytes.fromhex(hello.peer_id),
        hello.peer_epoch,
        hello.link,
        hello.transport.encode("ascii"),
    )
    proof = hello_proof(turn.key, turn.proof, claim, hello.body)
    return claim + proof + hello.body, proof


def open_hello(body: bytes, turn: Turn) -> Proven | None:
    """The hello in the body of a greeting, if it was made for this challenge by one who has the
    key; else None. Raises ``ProtocolViolation`` for what is not the size of one, or names no
    transport."""
    if len(body) < CLAIM.size + PROOF_BYTES:
        raise ProtocolViolation(f"a hello of {len(body)} bytes")
    claim, rest = body[: CLAIM.size], body[CLAIM.size :]
    proof, said = rest[:PROOF_BYTES], rest[PROOF_BYTES:]
    if not is_same(hello_proof(turn.key, turn.proof, claim, said), proof):
        return None
    id_, epoch, peer_id, peer_epoch, link, name = CLAIM.unpack(claim)
    try:
        transport = name.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        raise ProtocolViolation("a hello for a transport whose name is no text") from None
    hello = Hello(
        id=id_.hex(),
        epoch=epoch,
        peer_id=peer_id.hex(),
        peer_epoch=peer_epoch,
        link=link,
        transport=transport,
        body=said,
    )
    return Proven(hello, turn.key, proof)


def seal_answer(kind: GreetingKind, body: bytes, proven: Proven) -> tuple[bytes, bytes]:
    """The body of a greeting that answers the hello, and its proof."""
    proof = answer_proof(proven.key, proven.proof, kind, body)
    return proof + body, proof


def open_answer(greeting: Greeting, hello: bytes, key: Key) -> bytes | None:
    """What such a greeting says; None unless it answers the hello with that proof, from one who has
    the key."""
    proof, said = greeting.body[:PROOF_BYTES], greeting.body[PROOF_BYTES:]
    return said if is_same(answer_proof(key, hello, greeting.kind, said), proof) else None


def encode_greeting(kind: GreetingKind, version: int, body: bytes) -> bytes:
    """A whole greeting."""
    assert len(body) <= GREETING_BODY_MAX
    return GREETING.pack(MAGIC, version, kind, len(body)) + body


class GreetingReader:
    """Reads one greeting of any version, and asks for exactly its bytes: what follows stays in the
    socket."""

    def __init__(self, body_max: int = GREETING_BODY_MAX) -> None:
        self._body_max = body_max
        self._buffer = bytearray(GREETING.size + body_max)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._wanted = GREETING.size

    def room(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        return self._view[self._filled : self._wanted]

    def filled(self, nbytes: int) -> Greeting | None:
        """Says that ``nbytes`` bytes were put into ``room()``; returns the greeting once complete.

        Raises ``ProtocolViolation``, after which the stream is lost.
        """
        assert 0 < nbytes <= self._wanted - self._filled
        self._filled += nbytes
        if self._filled == GREETING.size:
            magic, _, _, body_nbytes = GREETING.unpack_from(self._buffer)
            if magic != MAGIC:
                raise ProtocolViolation(f"not a te engine: its first bytes are {magic!r}")
            if body_nbytes > self._body_max:
                raise ProtocolViolation(
                    f"a greeting of {body_nbytes} bytes; at most {self._body_max}"
                )
            self._wanted += body_nbytes
        if self._filled < self._wanted:
            return None
        _, version, kind, _ = GREETING.unpack_from(self._buffer)
        return Greeting(version, kind, bytes(self._view[GREETING.size : self._wanted]))
