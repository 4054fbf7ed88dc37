# SPDX-License-Identifier: Apache-2.0
"""The bytes on a TCP connection. Pure: no sockets, no clock; bytes in, frames out.

Everything is little-endian. A connection begins with one greeting from each side (``HELLO`` from
the source of writes, then ``WELCOME`` or ``REFUSE``), whose 16-byte header is the same in every
version for ever, so that engines of different versions can say so:

    magic 8s, version u16, kind u16, body bytes u32; then a MessagePack body (te.handshake)

Then come frames, each with a 32-byte header:

    kind u8, status u8, zero u16, count u32, transfer u64, tag u64, nbytes u64

    SEGMENT   count x (dst u64, nbytes u64) follow, then ``nbytes`` bytes of payload in that order
    END       all segments of the transfer were sent, ``nbytes`` in total
    ABANDON   the source gave the transfer up; no segment of it follows
    ACK       destination to source: ``status``, and a reason of ``count`` bytes of UTF-8

A source sends one transfer after the other, with rising ids. Each gets one ACK: after END or
ABANDON, or early when the destination refuses it.
"""

from __future__ import annotations

import abc
import enum
import struct
from dataclasses import dataclass
from typing import Final, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from te.config import SEGMENT_BLOCKS_MAX, SEGMENT_BYTES_MAX
from te.errors import ProtocolViolation

__all__ = [
    "DESTINATION_FRAMES",
    "LANDING",
    "SOURCE_FRAMES",
    "Abandon",
    "Ack",
    "AckStatus",
    "End",
    "Frame",
    "FrameReader",
    "Greeting",
    "GreetingKind",
    "GreetingReader",
    "Kind",
    "Segment",
    "encode_abandon",
    "encode_ack",
    "encode_end",
    "encode_greeting",
    "encode_segment_header",
]

MAGIC: Final = b"te-wire\0"
GREETING: Final = struct.Struct("<8sHHI")
GREETING_BODY_MAX: Final = 4096

FRAME: Final = struct.Struct("<BBHIQQQ")
LANDING: Final = np.dtype([("dst", "<u8"), ("nbytes", "<u8")])
"""One descriptor of a segment: where its next ``nbytes`` bytes of payload go."""
REASON_BYTES_MAX: Final = 512
BODY_MAX: Final = max(SEGMENT_BLOCKS_MAX * LANDING.itemsize, REASON_BYTES_MAX)


class GreetingKind(enum.IntEnum):
    """Kinds of greeting."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3


class Kind(enum.IntEnum):
    """Kinds of frame."""

    SEGMENT = 16
    END = 17
    ABANDON = 18
    ACK = 19


class AckStatus(enum.IntEnum):
    """What became of a transfer at its destination."""

    LANDED = 0
    REFUSED = 1
    ABANDONED = 2


SOURCE_FRAMES: Final = frozenset({Kind.SEGMENT, Kind.END, Kind.ABANDON})
DESTINATION_FRAMES: Final = frozenset({Kind.ACK})


@dataclass(frozen=True)
class Greeting:
    """A greeting of any version; the body is only known to be ours if the version is."""

    version: int
    kind: int
    body: bytes


@dataclass(frozen=True)
class Segment:
    """Announces ``nbytes`` bytes of payload, which the reader of frames does not consume."""

    transfer: int
    tag: int
    nbytes: int
    #: Shape (count,), dtype ``LANDING``; sizes are positive and sum to ``nbytes``.
    landings: npt.NDArray[np.void]


@dataclass(frozen=True)
class End:
    """All segments of a transfer were sent."""

    transfer: int
    tag: int
    nbytes: int


@dataclass(frozen=True)
class Abandon:
    """The source gave a transfer up."""

    transfer: int


@dataclass(frozen=True)
class Ack:
    """What became of a transfer."""

    transfer: int
    status: AckStatus
    reason: str


Frame: TypeAlias = Segment | End | Abandon | Ack
_Result = TypeVar("_Result")


def encode_greeting(kind: GreetingKind, version: int, body: bytes) -> bytes:
    """A whole greeting."""
    assert len(body) <= GREETING_BODY_MAX
    return GREETING.pack(MAGIC, version, kind, len(body)) + body


def encode_segment_header(transfer: int, tag: int, count: int, nbytes: int) -> bytes:
    """The header of a SEGMENT; ``count`` descriptors and ``nbytes`` of payload must follow."""
    return FRAME.pack(Kind.SEGMENT, 0, 0, count, transfer, tag, nbytes)


def encode_end(transfer: int, tag: int, nbytes: int) -> bytes:
    """A whole END; ``nbytes`` is the sum of the transfer's segments."""
    return FRAME.pack(Kind.END, 0, 0, 0, transfer, tag, nbytes)


def encode_abandon(transfer: int) -> bytes:
    """A whole ABANDON."""
    return FRAME.pack(Kind.ABANDON, 0, 0, 0, transfer, 0, 0)


def encode_ack(transfer: int, status: AckStatus, reason: str = "") -> bytes:
    """A whole ACK; a reason that is too long is cut."""
    # Cut between characters: a decoder must never see half of one.
    text = reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore").encode()
    return FRAME.pack(Kind.ACK, status, 0, len(text), transfer, 0, 0) + text


class _Reader(abc.ABC, Generic[_Result]):
    """Collects a header, then the body it announces. Asks for exactly the bytes of one item, so
    that payload behind it stays in the socket."""

    def __init__(self, header_bytes: int, body_max: int) -> None:
        self._header_bytes = header_bytes
        self._buffer = bytearray(header_bytes + body_max)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._wanted = header_bytes

    def room(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        return self._view[self._filled : self._wanted]

    @property
    def idle(self) -> bool:
        """Whether the stream stands between two items."""
        return self._filled == 0

    def filled(self, nbytes: int) -> _Result | None:
        """Says that ``nbytes`` bytes were put into ``room()``; returns an item once complete.

        Raises ``ProtocolViolation``, after which the stream is lost.
        """
        assert 0 < nbytes <= self._wanted - self._filled
        self._filled += nbytes
        if self._filled == self._header_bytes:
            self._wanted = self._header_bytes + self._body_bytes(self._buffer)
        if self._filled < self._wanted:
            return None
        item = self._item(self._buffer, bytes(self._view[self._header_bytes : self._wanted]))
        self._filled, self._wanted = 0, self._header_bytes
        return item

    @abc.abstractmethod
    def _body_bytes(self, header: bytearray) -> int:
        """Checks a complete header; the size of the body it announces."""

    @abc.abstractmethod
    def _item(self, header: bytearray, body: bytes) -> _Result:
        """The item of a checked header and its body."""


class GreetingReader(_Reader[Greeting]):
    """Reads one greeting of any version."""

    def __init__(self) -> None:
        super().__init__(GREETING.size, GREETING_BODY_MAX)

    def _body_bytes(self, header: bytearray) -> int:
        magic, _, _, nbytes = GREETING.unpack_from(header)
        if magic != MAGIC:
            raise ProtocolViolation(f"not a te engine: its first bytes are {magic!r}")
        if nbytes > GREETING_BODY_MAX:
            raise ProtocolViolation(f"a greeting of {nbytes} bytes; at most {GREETING_BODY_MAX}")
        return int(nbytes)

    def _item(self, header: bytearray, body: bytes) -> Greeting:
        _, version, kind, _ = GREETING.unpack_from(header)
        return Greeting(version, kind, body)


class FrameReader(_Reader[Frame]):
    """Reads the frames of one direction."""

    def __init__(self, accepts: frozenset[Kind]) -> None:
        super().__init__(FRAME.size, BODY_MAX)
        self._accepts = accepts

    def _body_bytes(self, header: bytearray) -> int:
        kind, status, zero, count, _, _, nbytes = FRAME.unpack_from(header)
        if kind not in self._accepts:
            raise ProtocolViolation(f"a frame of kind {kind} is not expected here")
        if zero or (status and kind != Kind.ACK):
            raise ProtocolViolation(f"reserved fields of a frame of kind {kind} are not zero")
        if kind == Kind.SEGMENT:
            if not 1 <= count <= SEGMENT_BLOCKS_MAX:
                _violation("a segment", count, "blocks", SEGMENT_BLOCKS_MAX)
            if not count <= nbytes <= SEGMENT_BYTES_MAX:
                _violation(f"a segment of {count} blocks", nbytes, "bytes", SEGMENT_BYTES_MAX)
            return int(count) * LANDING.itemsize
        if kind == Kind.ACK:
            if status > AckStatus.ABANDONED:
                raise ProtocolViolation(f"an acknowledgement with the unknown status {status}")
            if count > REASON_BYTES_MAX:
                _violation("a reason", count, "bytes", REASON_BYTES_MAX)
            return int(count)
        if count:
            _violation(f"a frame of kind {kind}", count, "blocks", 0)
        return 0

    def _item(self, header: bytearray, body: bytes) -> Frame:
        kind, status, _, _, transfer, tag, nbytes = FRAME.unpack_from(header)
        if kind == Kind.SEGMENT:
            landings = np.frombuffer(body, LANDING)
            _check_landings(landings, nbytes)
            return Segment(transfer, tag, nbytes, landings)
        if kind == Kind.END:
            return End(transfer, tag, nbytes)
        if kind == Kind.ABANDON:
            return Abandon(transfer)
        try:
            return Ack(transfer, AckStatus(status), body.decode())
        except UnicodeDecodeError:
            raise ProtocolViolation("the reason of an acknowledgement is not UTF-8") from None


def _check_landings(landings: npt.NDArray[np.void], nbytes: int) -> None:
    sizes = landings["nbytes"]
    low, high = int(sizes.min()), int(sizes.max())
    if low < 1 or high > nbytes:
        raise ProtocolViolation(f"a segment of {nbytes} bytes with blocks of {low} to {high} bytes")
    # Cannot wrap: at most SEGMENT_BLOCKS_MAX sizes of at most SEGMENT_BYTES_MAX.
    total = int(sizes.sum(dtype=np.uint64))
    if total != nbytes:
        raise ProtocolViolation(f"a segment of {nbytes} bytes with blocks of {total} bytes in all")


def _violation(what: str, value: int, unit: str, limit: int) -> NoReturn:
    raise ProtocolViolation(f"{what} of {value} {unit}; at most {limit} are allowed")
