# SPDX-License-Identifier: Apache-2.0
"""The bytes on a connection. Pure: no sockets, no clock.

Everything is little-endian. A connection begins with one greeting from each side (``HELLO`` from
the side that dials, then ``WELCOME`` or ``REFUSE``), whose 16-byte header is the same in every
version for ever, so that engines of different versions can say so:

    magic 8s, version u16, kind u16, body bytes u32; then a MessagePack body (te.handshake)

Then come the frames of the plane (``te/core/wire.h``); on the same host through the rings whose
descriptor came with the hello, no more through the socket. docs/wire.md has all of it.
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
