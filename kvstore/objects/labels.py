# SPDX-License-Identifier: Apache-2.0
"""What a client writes beside its objects, in the same transfer, into slots that were reserved for
it: their keys, their signature and their checksums. So an owner knows what has come without another
word of the client. Pure."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from kvstore.objects.changes import KEY_BYTES, Keys
from kvstore.objects.pieces import U64

__all__ = ["LABEL_BYTES_MAX", "LABEL_OBJECTS_MAX", "Label", "label_bytes", "label_of"]

_HEAD: Final = struct.Struct("<QQ16s")
_CHECKSUM_BYTES: Final = 8
LABEL_BYTES_MAX: Final = 8 << 10
LABEL_OBJECTS_MAX: Final = (LABEL_BYTES_MAX - _HEAD.size) // (KEY_BYTES + _CHECKSUM_BYTES)


class Label(NamedTuple):
    """Of the objects of one write."""

    #: That of the write, which no earlier one had: what lies there of an earlier one is no label.
    tag: int
    keys: Keys
    signature: bytes
    #: xxh3-64 of each object.
    checksums: U64

    def pack(self) -> bytes:
        """Its bytes."""
        head = _HEAD.pack(self.tag, len(self.keys), self.signature)
        return head + self.keys.tobytes() + self.checksums.astype("<u8").tobytes()


def label_bytes(count: int) -> int:
    """The size of the label of so many objects."""
    return _HEAD.size + count * (KEY_BYTES + _CHECKSUM_BYTES)


def label_of(raw: bytes, tag: int) -> Label | None:
    """The label that lies there; None if it is none of this tag."""
    found, count, signature = _HEAD.unpack_from(raw)
    if found != tag or count > LABEL_OBJECTS_MAX or label_bytes(count) > len(raw):
        return None
    keys = np.frombuffer(raw, np.uint8, count * KEY_BYTES, _HEAD.size).reshape(-1, KEY_BYTES)
    behind = _HEAD.size + count * KEY_BYTES
    return Label(tag, keys, signature, np.frombuffer(raw, "<u8", count, behind))
