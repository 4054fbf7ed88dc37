# SPDX-License-Identifier: Apache-2.0
"""How a message that goes with a transfer is written in a note of te's. Pure."""

from __future__ import annotations

import struct
from typing import Final

from sglang_mooncake.faces.mooncake_engine.names import TransferNotify
from te.peers import NOTE_BYTES_MAX

__all__ = ["packed", "unpacked"]

MAGIC: Final = b"te-mooncake\x01"
"""The last byte is the version."""
_HEAD: Final = struct.Struct(f">{len(MAGIC)}sI")
"""Magic, bytes of the name; the name and the text follow."""


def packed(message: TransferNotify) -> bytes:
    """``ValueError`` if it is too long."""
    name, text = message.name.encode(), message.msg.encode()
    nbytes = _HEAD.size + len(name) + len(text)
    if nbytes > NOTE_BYTES_MAX:
        raise ValueError(
            f"a message of {len(name)} and {len(text)} bytes; together with its head of"
            f" {_HEAD.size} bytes it must have at most {NOTE_BYTES_MAX}"
        )
    return _HEAD.pack(MAGIC, len(name)) + name + text


def unpacked(data: bytes) -> TransferNotify:
    """``ValueError`` for what `packed` did not make."""
    magic, length = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (b"", 0)
    body = data[_HEAD.size :]
    if magic != MAGIC or length > len(body):
        raise ValueError(f"a note of {len(data)} bytes that is no message of Mooncake's engine")
    return TransferNotify(body[:length].decode(), body[length:].decode())
