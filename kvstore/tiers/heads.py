# SPDX-License-Identifier: Apache-2.0
"""What stands at the begin of a segment file and of each place in it, so that a file tells by
itself what it has. Pure.

    | head of the segment: 4 KiB | place: head of 4 KiB, object | place ... |
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.objects.changes import Records
from kvstore.tiers.segments import Place, place_units

__all__ = ["PLACE_HEAD", "place_head", "places_of", "segment_head", "segment_of_head", "told"]

_SEGMENT: Final = struct.Struct("<8sIIQQQ")
_NAME: Final = b"kvstore\0"
VERSION: Final = 1
MAGIC: Final = 0x4C504B56
"""Changes with the layout of a place."""

PLACE_HEAD: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("unused", "<u4"),
        ("name", "V32"),
        ("nbytes", "<u8"),
        ("checksum", "<u8"),  # xxh3-64 of the object
        ("serial", "<u8"),
        ("sequence", "<u8"),
        ("own", "<u8"),  # xxh3-64 of what stands before it
    ]
)
_OWN: Final = PLACE_HEAD.itemsize - 8


def segment_head(segment_bytes: int, units: int, serial: int) -> bytes:
    """The head of a segment of some size, for a class of places."""
    raw = _SEGMENT.pack(_NAME, VERSION, units, segment_bytes, serial, 0)
    own = xxhash.xxh3_64_intdigest(raw)
    return _SEGMENT.pack(_NAME, VERSION, units, segment_bytes, serial, own)


def segment_of_head(raw: bytes, segment_bytes: int) -> tuple[int, int] | None:
    """Class and serial of a segment; None if it has no head that can be right."""
    _, _, units, _, serial, _ = _SEGMENT.unpack_from(raw)
    if raw[: _SEGMENT.size] != segment_head(segment_bytes, units, serial) or units < 2:
        return None
    return units, serial


def place_head(name: bytes, place: Place, checksum: int) -> bytes:
    """The head of a place."""
    head = np.zeros(1, PLACE_HEAD)
    head["magic"], head["name"] = MAGIC, np.void(name)
    head["nbytes"], head["checksum"] = place.nbytes, checksum
    head["serial"], head["sequence"] = place.serial, place.sequence
    raw = head.tobytes()
    return raw[:_OWN] + struct.pack("<Q", xxhash.xxh3_64_intdigest(raw[:_OWN]))


def told(raw: bytes, name: bytes, place: Place) -> int | None:
    """The object's checksum, if this is the head of that write; else None."""
    checksum = int(np.frombuffer(raw, PLACE_HEAD, 1)["checksum"][0])
    return checksum if raw[: PLACE_HEAD.itemsize] == place_head(name, place, checksum) else None


def places_of(heads: Records, units: int, serial: int) -> list[tuple[int, bytes, Place]]:
    """The objects of a segment by its places' heads, shape (places,): number of the place, name,
    and a ``Place`` whose slot counts from the segment's begin. What cannot be right is left out."""
    right: npt.NDArray[np.bool_] = (heads["magic"] == MAGIC) & (heads["serial"] == serial)
    found = []
    for number in np.flatnonzero(right).tolist():
        head = heads[number]
        raw = head.tobytes()
        place = Place(number * units, int(head["nbytes"]), serial, int(head["sequence"]))
        if not place.nbytes or place_units(place.nbytes) != units:
            continue
        if int(head["own"]) == xxhash.xxh3_64_intdigest(raw[:_OWN]):
            found.append((number, head["name"].tobytes(), place))
    return found
