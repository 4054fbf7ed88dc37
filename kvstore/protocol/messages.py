# SPDX-License-Identifier: Apache-2.0
"""What clients ask owners, and the answers; MessagePack with one version for all."""

from __future__ import annotations

import struct
from typing import Annotated, Final, TypeVar

import msgspec

from kvstore.rules.pins import PIN_S_MAX

__all__ = [
    "CALL_BYTES_MAX",
    "REQUEST_ID",
    "STORED_BYTES_MAX",
    "TRAY_BYTES",
    "VERSION",
    "WAIT_MS_MAX",
    "Abandon",
    "Ahead",
    "Answer",
    "Changes",
    "Claim",
    "Clear",
    "Copy",
    "Discard",
    "Done",
    "Fetch",
    "Fetched",
    "Figures",
    "FiguresOf",
    "Follow",
    "Gone",
    "Granted",
    "Greet",
    "Hello",
    "InMemory",
    "Keep",
    "Lender",
    "Lenders",
    "LendersAre",
    "Pin",
    "Pins",
    "Placed",
    "Promote",
    "Publish",
    "Published",
    "Question",
    "Refused",
    "Relay",
    "Remove",
    "Reserve",
    "Reserved",
    "Sizes",
    "SizesOf",
    "Snapshot",
    "Store",
    "Stored",
    "Take",
    "Touch",
    "Unpin",
    "Unread",
    "decode_answer",
    "decode_question",
    "decoded",
    "encode",
    "split",
]

VERSION: Final = 14
REQUEST_ID: Final = struct.Struct("<Q")
"""Over ZeroMQ, a question and its answer begin with the same one, in one frame with it: an owner's
socket can send no more than one (`bootstrap_server.admission.routing_ids`)."""
KEYS_BYTES_MAX: Final = 4096 * 16
STORED_BYTES_MAX: Final = 128 << 10
"""Objects that are sent in a message: a claim, a write and a publication would take longer."""
WAIT_MS_MAX: Final = 60_000
COPIES_MAX: Final = 8

CALL_BYTES_MAX: Final = 128 << 10
"""Of a question or an answer over a Unix socket: the largest ones have 4,096 keys."""
NO_TURN: Final = 0
TRAY_BYTES: Final = 2 << 20
"""The memory that a client and the owner of its host share for objects on their way to the owner,
or more if one object needs it."""

Keys = Annotated[bytes, msgspec.Meta(max_length=KEYS_BYTES_MAX)]
Signature = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Greet(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Who are you? The answer is ``Hello``, or ``Refused`` for another version.

    With an address a process of the owner's host asks, whose tray lies there, and which the owner
    may read (``kvstore.protocol.reach``).
    """

    version: int
    tray_address: Number = 0


class Follow(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What has changed since this number? Answered by ``Changes`` as soon as there is one, or after
    a second without."""

    number: Number


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What lies in these of the card's parts? Answered by ``Changes``."""

    first_chunk: Number
    chunks: Number


class Claim(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Slots for these keys, please. Answered by ``Granted``."""

    keys: Keys
    signature: Signature
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    writer_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    writer_epoch: Number


class Publish(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The write under the claim is done. Answered by ``Published``."""

    claim_id: Number
    #: xxh3-64 of each granted object, as u64, little-endian; empty: the owner computes them.
    checksums: Annotated[bytes, msgspec.Meta(max_length=KEYS_BYTES_MAX // 2)] = b""
    #: So many objects of this size are likely to come next: slots for them, please.
    ahead: Annotated[int, msgspec.Meta(ge=0, le=KEYS_BYTES_MAX // 16)] = 0
    #: Of a claim ahead: what was written to its first slots.
    keys: Keys = b""
    signature: Signature = bytes(16)


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The claim is not needed any more. Answered by ``Done``."""

    claim_id: Number


class Touch(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """These were read. Answered by ``Done``."""

    keys: Keys
    signature: Signature
    #: Of each. A host's owner is told it, and tells the owners of other hosts of theirs; 0: not
    #: said.
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0


class Remove(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """These shall go. Answered by ``Gone``."""

    keys: Keys
    signature: Signature


class Clear(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """All of this signature shall go. Answered by ``Gone``."""

    signature: Signature


class Store(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """These objects, one behind the other, please. Answered by ``Stored``."""

    keys: Keys
    signature: Signature
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=STORED_BYTES_MAX)]
    data: Annotated[bytes, msgspec.Meta(max_length=STORED_BYTES_MAX)]


class Promote(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """These lie in the lower tier: have them in memory, please. Answered by ``InMemory``, after so
    many milliseconds at the latest."""

    keys: Keys
    signature: Signature
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]


class Take(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """These objects, one behind the other in the tray, please. Answered by ``Stored``; an owner
    that lends nothing stores them at other hosts, and answers after so many milliseconds at the
    latest. It has no meaning but on the connection that the tray came by."""

    keys: Keys
    signature: Signature
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]


class Pin(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Keep these for so long, please. Answered by ``Pins``."""

    keys: Keys
    signature: Signature
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=int(PIN_S_MAX * 1000))]


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """One pin of these is not needed any more. Answered by ``Done``."""

    keys: Keys
    signature: Signature


class Sizes(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """How large are these, please? Answered by ``SizesOf``."""

    keys: Keys
    signature: Signature


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """So many owners in all shall have these, please. Answered by ``Done``."""

    keys: Keys
    signature: Signature
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    copies: Annotated[int, msgspec.Meta(ge=1, le=COPIES_MAX)]


class Discard(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """As ``Remove``, of objects that were found to be corrupted. Not answered. Only a host's owner
    knows it."""

    keys: Keys
    signature: Signature


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """These objects, out of the memory of the process that asks, please. In the tray lie, as u64,
    where each piece of each object begins there, and behind that the sizes of an object's pieces.
    Answered by ``Fetched`` or ``Unread``. Only who has said where its tray lies may ask so."""

    keys: Keys
    signature: Signature
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    #: Of each object.
    pieces: Annotated[int, msgspec.Meta(ge=1, le=TRAY_BYTES // 8)]


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """What was fetched is what was to be stored: its memory has not changed meanwhile. Answered by
    ``Done``. Without this, nothing of it is stored."""


class Figures(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """What does the owner hold and do? Answered by ``FiguresOf``. Only a host's owner knows it."""

    #: Of a process that tells a monitoring system: any, and always the same. Empty: it does not.
    asker: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


class Lenders(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Where do the owners of other hosts have their memory? From this number on, please, those that
    the owner can use itself. Answered by ``LendersAre``. Only a host's owner knows it."""

    first: Number


class Relay(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Ask the owner of another host this (``Claim``, ``Reserve``, ``Publish`` or ``Abandon``),
    please, for this process, which writes there itself. Answered by what that one answers. Only a
    host's owner knows it."""

    #: In the table of who is asked, and its engine's id: numbers are given anew.
    number: Number
    name: Annotated[str, msgspec.Meta(max_length=64)]
    question: Annotated[bytes, msgspec.Meta(max_length=CALL_BYTES_MAX)]
    #: Of each object that is published.
    nbytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Slots for so many objects of this size that are named when they are published, please.
    Answered by ``Reserved``. What this client had before is not used any more."""

    count: Annotated[int, msgspec.Meta(ge=1, le=KEYS_BYTES_MAX // 16)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    writer_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    writer_epoch: Number


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``owner.OwnerCard``, and the number of the next change."""

    engine: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    epoch: Number
    headers_address: Number
    slots_address: Number
    chunks: Number
    object_bytes_max: Number
    parts: Number
    number: Number
    #: Whether the owner can read the memory of who asks.
    reads: bool = False
    #: Whether objects are stored in its memory. Else it stores them at others, and has for a while
    #: what was put and got.
    lends: bool = True


class Changes(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Changes, dtype ``changes.CHANGE``, and the number behind the last. Without them (None): they
    are not kept any more, and a snapshot is needed."""

    epoch: Number
    number: Number
    changes: bytes | None


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """``owner.Grant``; slots as u32, little-endian."""

    claim_id: Number
    #: Of 64 bits.
    tag: int
    verdicts: list[str]
    slots: bytes


class Done(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """It is done, unless there is a text that says why not."""

    why_not: str = ""


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where an owner has objects, for who follows it and has not come to this number yet: for each
    of those that were asked for a slot and a generation, as ``changes.CHANGE`` has them. Both are 0
    for one that is not there."""

    number: Number
    slots: bytes
    generations: bytes


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """One ``object_table.Verdict`` for each object; those that are granted are stored. ``placed``:
    for who follows the owner."""

    verdicts: list[str]
    placed: Placed | None = None


class Ahead(msgspec.Struct, frozen=True, array_like=True):
    """A claim whose objects are named when they are published: ``owner.Grant``, and for how many
    milliseconds it can be used."""

    claim_id: Number
    #: Of 64 bits.
    tag: int
    #: As u32, little-endian.
    slots: bytes
    ms: Number
    #: Where the write may have a label (``objects.labels``); 0: nowhere.
    label: Number = 0


class Published(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The granted objects of the claim are stored, or a text says why not. Of a claim ahead, and at
    an owner that lends nothing, one ``object_table.Verdict`` for each object of the claim: those
    that are granted are stored."""

    why_not: str
    placed: Placed | None = None
    verdicts: list[str] = []
    ahead: Ahead | None = None


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The slots; None if there are none to spare."""

    ahead: Ahead | None


class InMemory(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """One ``tiered_table.Promoted`` for each object: states as u8, slots and generations as u32,
    little-endian."""

    states: bytes
    slots: bytes
    generations: bytes


class Pins(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """One ``outcomes.Pinned`` for each object, and why some were refused."""

    outcomes: list[str]
    why: str


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """So many objects were removed. Of those that were named, one byte each: 1 if it was there."""

    count: Number
    found: bytes = b""


class SizesOf(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """One size for each object, as u64, little-endian; 0 for one that is not there."""

    sizes: bytes


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """One ``object_table.Verdict`` for each object; those that are granted were copied, and are
    stored with ``Keep``."""

    verdicts: list[str]


class Unread(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The memory that was named cannot be read: that of a device, for one."""

    why: str


class FiguresOf(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """``client.status.StoreStatus`` of the owner, as MessagePack."""

    status: Annotated[bytes, msgspec.Meta(max_length=CALL_BYTES_MAX)]
    #: Of the process that asks, if it is the one of the host that tells a monitoring system: what
    #: only rises counts from this turn's beginning then. Else ``NO_TURN``.
    turn: Annotated[int, msgspec.Meta(ge=0)]


class Lender(msgspec.Struct, frozen=True, array_like=True):
    """What a process needs to read from the owner of another host by te (``owner.OwnerCard``), and
    to choose among several where it stores (``client.placement``)."""

    #: In the table of who is asked.
    number: Number
    engine: Annotated[bytes, msgspec.Meta(max_length=CALL_BYTES_MAX)]
    headers_address: Number
    slots_address: Number
    #: Its engine's id, its host, and how many bytes it lends.
    name: str
    host: str
    nbytes: Number


class LendersAre(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Some of them, and the number to ask from for more; 0: that is all."""

    lenders: list[Lender]
    next: Number


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The question cannot be answered."""

    why: str


Question = (
    Greet
    | Follow
    | Snapshot
    | Claim
    | Publish
    | Abandon
    | Touch
    | Remove
    | Clear
    | Store
    | Promote
    | Take
    | Pin
    | Unpin
    | Sizes
    | Copy
    | Discard
    | Fetch
    | Keep
    | Figures
    | Lenders
    | Relay
    | Reserve
)
Answer = (
    Hello
    | Changes
    | Granted
    | Done
    | Refused
    | Stored
    | InMemory
    | Pins
    | Published
    | Gone
    | SizesOf
    | Fetched
    | Unread
    | FiguresOf
    | LendersAre
    | Reserved
)

Message = TypeVar("Message")

_ENCODER: Final = msgspec.msgpack.Encoder()
_QUESTIONS: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(message)


def split(frame: bytes | memoryview) -> tuple[bytes, memoryview]:
    """The request id of a frame over ZeroMQ, and the bytes of its message. ``msgspec.DecodeError``
    if it is too short for both."""
    if len(frame) < REQUEST_ID.size:
        raise msgspec.DecodeError(f"{len(frame)} bytes have no request id")
    return bytes(frame[: REQUEST_ID.size]), memoryview(frame)[REQUEST_ID.size :]


def decode_question(raw: bytes | memoryview) -> Question:
    """``msgspec.DecodeError`` if it is none."""
    return decoded(_QUESTIONS, raw)


def decode_answer(raw: bytes | memoryview) -> Answer:
    """``msgspec.DecodeError`` if it is none."""
    return decoded(_ANSWERS, raw)


def decoded(decoder: msgspec.msgpack.Decoder[Message], raw: bytes | memoryview) -> Message:
    """``msgspec.DecodeError`` if it is none. msgspec raises other errors for a text that is not
    UTF-8, and for lists in lists in lists."""
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError as exc:
        raise msgspec.DecodeError(f"a text in it is not UTF-8: {exc.reason}") from exc
    except RecursionError as exc:
        raise msgspec.DecodeError("it is nested too deeply") from exc
