# SPDX-License-Identifier: Apache-2.0
"""The bytes on a connection. Pure: no sockets, no clock.

Everything is little-endian. A connection begins with one greeting from each side (``HELLO`` from
the side that dials, then ``WELCOME`` or ``REFUSE``), whose 16-byte header is the same in every
version for ever, so that engines of different versions can say so:

    magic 8s, version u16, kind u16, body bytes u32; then a MessagePack body (te.handshake)

Then come frames, which the plane reads and writes (``te/plane``), each with a 40-byte header; on
the same host through the rings whose descriptor came with the hello, no more through the socket:

    kind u8, status u8, flags u16, count u32, transfer u64, tag u64, nbytes u64, total u64

    SEGMENT   count x (dst u64, nbytes u64) follow, then ``nbytes`` bytes of payload in that order,
              then a trailer u64: 0, or the errno that kept the source from reading its memory
    PULL      count x (src u64, dst u64, nbytes u64) follow: the destination copies by itself
    END       a transfer without blocks
    ABANDON   the source gave a transfer up after ``total`` bytes; over RDMA after so many pieces
    ACK       destination to source: ``status``, and a reason of ``count`` bytes of ASCII; with
              the status PROGRESS, that it has copied ``nbytes`` more of a transfer by PULL
    READ      like PULL, but asks the other side to write ``src`` (its own) to ``dst``

``total`` is the bytes of the whole transfer. Its frames may come on any rail of the link in any
order; it is complete when that many have landed, and is then acknowledged on the rail that
completed it. Ids of new transfers rise on each rail. The flag REPLY marks the transfers that answer
a READ: their tag is the id of that read.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from te.errors import ProtocolViolation

__all__ = ["Greeting", "GreetingKind", "GreetingReader", "encode_greeting"]

MAGIC: Final = b"te-wire\0"
GREETING: Final = struct.Struct("<8sHHI")
GREETING_BODY_MAX: Final = 4096


class GreetingKind(enum.IntEnum):
    """Kinds of greeting."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3


@dataclass(frozen=True)
class Greeting:
    """A greeting of any version; the body is only known to be ours if the version is."""

    version: int
    kind: int
    body: bytes


def encode_greeting(kind: GreetingKind, version: int, body: bytes) -> bytes:
    """A whole greeting."""
    assert len(body) <= GREETING_BODY_MAX
    return GREETING.pack(MAGIC, version, kind, len(body)) + body


class GreetingReader:
    """Reads one greeting of any version, and asks for exactly its bytes: what follows stays in the
    socket."""

    def __init__(self) -> None:
        self._buffer = bytearray(GREETING.size + GREETING_BODY_MAX)
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
            if body_nbytes > GREETING_BODY_MAX:
                raise ProtocolViolation(
                    f"a greeting of {body_nbytes} bytes; at most {GREETING_BODY_MAX}"
                )
            self._wanted += body_nbytes
        if self._filled < self._wanted:
            return None
        _, version, kind, _ = GREETING.unpack_from(self._buffer)
        return Greeting(version, kind, bytes(self._view[GREETING.size : self._wanted]))
