# SPDX-License-Identifier: Apache-2.0
"""What engines tell each other about themselves: the card, and the bodies of the greetings."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

import msgspec

from te import nesting
from te.errors import HandshakeError, VersionError
from te.plane._core import NICS_LIMIT, RAILS_LIMIT
from te.topology import Gid

__all__ = [
    "PROTOCOL_VERSION",
    "REASON_CHARS_MAX",
    "Card",
    "CardNic",
    "CardRegion",
    "Hello",
    "Nonce",
    "RailAnswer",
    "RailOffer",
    "Refusal",
    "Refuse",
    "Shared",
    "Welcome",
    "decode_body",
    "decode_card",
    "encode",
    "version_mismatch",
]

PROTOCOL_VERSION: Final = 7
"""Version of the card, the greetings and the frames. Engines talk only to their own."""

CARD_BYTES_MAX: Final = 1 << 20
REASON_CHARS_MAX: Final = 512

EngineId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Unsigned = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class CardRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region as its engine announces it: address, size in bytes, kind."""

    address: Unsigned
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    kind: Name


class CardNic(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device of the engine and the addresses it can be reached at."""

    #: For messages.
    name: Name
    #: ``ib``, ``roce`` or ``iwarp``: devices of one family can be connected.
    family: Name
    #: InfiniBand's address of its port; 0 of others.
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    #: ``enum ibv_mtu``.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    gids: Annotated[list[Gid], msgspec.Meta(max_length=1024)]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach an engine, and which of its memory was registered when the card was made."""

    #: Version of the protocol.
    protocol: Unsigned
    #: Of the engine, made when it starts.
    id: EngineId
    #: When it was started, in ns: a later engine has a greater one.
    epoch: Unsigned
    #: Where it listens over TCP: a numeric address.
    host: Name
    port: Port
    #: ``tcp``, ``samehost``, ``rdma``.
    transports: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=16)]
    #: Memory that was registered when the card was made.
    regions: list[CardRegion]
    #: RDMA devices; offers of rails name them by their place here.
    nics: Annotated[list[CardNic], msgspec.Meta(max_length=NICS_LIMIT)] = []


class _AnyCard(msgspec.Struct, frozen=True):
    """The part of a card that no version may change."""

    protocol: Unsigned


class Nonce(msgspec.Struct, frozen=True, array_like=True):
    """A few bytes of the sender's memory, to see whether the other side can read them there."""

    address: Unsigned
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the sender: to be mapped if its descriptor comes with the greeting, else to be
    unmapped. Address, size in bytes, serial of the region."""

    address: Unsigned
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    serial: Unsigned
    #: Rises with each such greeting of a link. One that comes behind a later one counts no more: it
    #: was given up, and its memory may be another region's.
    number: Annotated[int, msgspec.Meta(ge=1)]


class RailOffer(msgspec.Struct, frozen=True, kw_only=True):
    """My end of a rail over RDMA, for an open link; make yours and connect it to this."""

    #: Which of the link's rails.
    rail: Annotated[int, msgspec.Meta(ge=0, lt=RAILS_LIMIT)]
    #: Rises each time that this rail is made.
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    #: My device, by its place in my list.
    near_nic: Annotated[int, msgspec.Meta(ge=0, lt=NICS_LIMIT)]
    #: Your device, by its place on your card.
    far_nic: Annotated[int, msgspec.Meta(ge=0, lt=NICS_LIMIT)]
    #: Address of my end; empty where the LID is enough.
    gid: Annotated[bytes, msgspec.Meta(max_length=16)]
    #: Index of the address of your end; 0 where the LID is enough.
    far_gid_index: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    #: Of my queue pair. This and what follows is not of iWARP.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Of the first packet that I send.
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Of my port; 0 but for InfiniBand.
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)] = 0
    #: For both ends: ``enum ibv_mtu``.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1


class RailAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """My end, which is ready to receive; or of iWARP, ready to be dialled."""

    #: Of my queue pair; as the next not of iWARP.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Of the first packet that I send.
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: How often this link's rails have been fenced; send nothing before you know of that many.
    fences: Unsigned = 0
    #: iWARP: where I listen, at the address that was asked for.
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    #: iWARP: what to say there.
    token: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Source to destination: who I am, and whom your card says you are."""

    #: Of the source, as on its card; likewise the next.
    id: EngineId
    epoch: Unsigned
    #: Of the destination, as on its card; likewise the next.
    peer_id: EngineId
    peer_epoch: Unsigned
    #: Connections with the same number are rails of one link.
    link: Unsigned
    #: Same host only, on the first rail.
    nonce: Nonce | None = None
    #: Same host only: no rail, but memory to be mapped for the link.
    shared: Shared | None = None
    #: The link is to have rails over RDMA; this connection is about them.
    is_direct: bool = False
    #: Of such a link: no connection, but a rail.
    rail: RailOffer | None = None


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Destination to source: you may write; this is who I am."""

    #: Of the destination, as on its card; likewise the next.
    id: EngineId
    epoch: Unsigned
    #: Rails that I take for one link; the source opens no more.
    rails: Annotated[int, msgspec.Meta(ge=1)]
    #: Where the hello had one.
    nonce: Nonce | None = None
    #: Where the hello offered one.
    rail: RailAnswer | None = None


class Refusal(StrEnum):
    """Why a destination does not welcome a source."""

    #: It speaks another version.
    VERSION = "version"
    #: The hello is for another engine.
    IDENTITY = "identity"
    #: Too many connections are open.
    LIMIT = "limit"
    #: This transport cannot be used between the two; another may.
    TRANSPORT = "transport"


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Destination to source: you may not, and why."""

    code: Refusal
    #: A sentence for the log.
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


_Body = TypeVar("_Body", Hello, Welcome, Refuse)

# Made by the one thread that imports this: msgspec looks a type over when it first decodes one, and
# crashes when two threads do so at once, as the workers of a server with two new peers did.
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (_AnyCard, Card, Hello, Welcome, Refuse)
}


def encode(message: Card | Hello | Welcome | Refuse) -> bytes:
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


def decode_body(data: bytes, message: type[_Body]) -> _Body:
    """Raises ``HandshakeError`` for bytes that are not such a message."""
    problem = nesting.complaint(data)
    if problem is not None:
        raise HandshakeError(f"not a te {message.__name__} message: {problem}")
    try:
        body: _Body = _DECODERS[message].decode(data)
        return body
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise HandshakeError(f"not a te {message.__name__} message: {exc}") from None


def version_mismatch(who: str, theirs: int) -> str:
    """The sentence for an engine of another protocol version."""
    return (
        f"{who} speaks te protocol {theirs}, this engine speaks {PROTOCOL_VERSION};"
        " run the same version of sglang-mooncake on both sides"
    )
