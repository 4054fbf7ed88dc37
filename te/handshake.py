# SPDX-License-Identifier: Apache-2.0
"""What engines tell each other about themselves: the card, and the bodies of the greetings.

What transports say in them are messages of their own (``message``), bytes to all others.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec

from te import nesting
from te.errors import HandshakeError, VersionError

__all__ = [
    "BODY_BYTES_MAX",
    "PROTOCOL_VERSION",
    "REASON_CHARS_MAX",
    "Card",
    "CardRegion",
    "Name",
    "Refusal",
    "Refuse",
    "Unsigned",
    "Welcome",
    "decode_body",
    "decode_card",
    "encode",
    "message",
    "version_mismatch",
]

PROTOCOL_VERSION: Final = 11
"""Version of the card, the greetings and the frames. Engines talk only to their own."""

CARD_BYTES_MAX: Final = 1 << 20
REASON_CHARS_MAX: Final = 512
OFFER_BYTES_MAX: Final = 1 << 19
BODY_BYTES_MAX: Final = 2048
"""What a transport says in a greeting."""

EngineId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Unsigned = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Offer = Annotated[bytes, msgspec.Meta(max_length=OFFER_BYTES_MAX)]
Body = Annotated[bytes, msgspec.Meta(max_length=BODY_BYTES_MAX)]


_Message = TypeVar("_Message", bound=msgspec.Struct)

_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {}


def message(kind: type[_Message]) -> type[_Message]:
    """Decorates what ``decode_body`` decodes: makes its decoder at once.

    By the one thread that imports the class: msgspec looks a type over when it first decodes one,
    and crashes when two threads do so at once, as the workers of a server with two new peers did.
    """
    _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    return kind


class CardRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region as its engine announces it."""

    #: Of its first byte.
    address: Unsigned
    #: How large it is.
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    #: Of memory: ``host`` or ``cuda``, for example.
    kind: Name


@message
class Card(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach an engine, and which of its memory was registered when the card was made."""

    #: Version of the protocol.
    protocol: Unsigned
    #: Name of the engine. It makes one up when it starts.
    id: EngineId
    #: When the engine was started, in ns: a later engine has a greater one.
    epoch: Unsigned
    #: Where the engine listens over TCP: a numeric address.
    host: Name
    #: The TCP port there.
    port: Port
    #: The transports over which the engine can be reached, by name, each with its offer.
    offers: Annotated[dict[Name, Offer], msgspec.Meta(max_length=16)]
    #: Memory that was registered when the card was made.
    regions: list[CardRegion]


@message
class _AnyCard(msgspec.Struct, frozen=True):
    """The part of a card that no version may change."""

    protocol: Unsigned


@message
class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Destination to source: you may write."""

    #: How many rails the destination takes for one link. The source opens no more.
    rails: Annotated[int, msgspec.Meta(ge=1)]
    #: What the transport says.
    body: Body = b""


class Refusal(StrEnum):
    """Why a destination does not welcome a source whose hello is good."""

    #: Too many connections are open.
    LIMIT = "limit"
    #: This transport cannot be used between the two; another may.
    TRANSPORT = "transport"


@message
class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Destination to source: you may not, and why."""

    #: Whether another transport may do better.
    code: Refusal
    #: A sentence for the log.
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


def encode(message: msgspec.Struct) -> bytes:
    """The message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode_card(data: bytes) -> Card:
    """Raises ``VersionError`` for another version's card, ``HandshakeError`` for anything else."""
    if len(data) > CARD_BYTES_MAX:
        raise HandshakeError(f"a card of {len(data)} bytes; at most {CARD_BYTES_MAX} are accepted")
    problem = nesting.complaint(data)
    if problem is not None:
        raise HandshakeError(f"these {len(data)} bytes are not a te card: {problem}")
    try:
        protocol = _DECODERS[_AnyCard].decode(data).protocol
        if protocol == PROTOCOL_VERSION:
            card: Card = _DECODERS[Card].decode(data)
            return card
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise HandshakeError(f"these {len(data)} bytes are not a te card: {exc}") from None
    raise VersionError(version_mismatch("the card", protocol))


def decode_body(data: bytes, kind: type[_Message]) -> _Message:
    """Raises ``HandshakeError`` for bytes that are not such a message."""
    problem = nesting.complaint(data)
    if problem is not None:
        raise HandshakeError(f"not a te {kind.__name__} message: {problem}")
    try:
        body: _Message = _DECODERS[kind].decode(data)
        return body
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise HandshakeError(f"not a te {kind.__name__} message: {exc}") from None


def version_mismatch(who: str, theirs: int) -> str:
    """The sentence for an engine of another protocol version."""
    return (
        f"{who} speaks te protocol {theirs}, this engine speaks {PROTOCOL_VERSION};"
        " run the same version of sglang-mooncake on both sides"
    )
