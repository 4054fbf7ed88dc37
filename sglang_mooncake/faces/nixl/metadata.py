# SPDX-License-Identifier: Apache-2.0
"""What an agent tells others of itself, as the bytes that applications carry between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_mooncake.faces.nixl.names import InvalidParam, Mismatch, Segment
from sglang_mooncake.faces.nixl.registrations import Range
from te import nesting

__all__ = ["NAME_BYTES_MAX", "NBYTES_MAX", "Metadata", "check_name", "decode", "encode", "text_of"]

MAGIC: Final = b"te-nixl\x00"
VERSION: Final = 1
NBYTES_MAX: Final = 16 << 20
"""Larger metadata is not decoded: it would be of half a million registrations."""
NAME_BYTES_MAX: Final = 1024

_RANGE: Final = 4  # segment, device, address, bytes
_SEGMENTS: Final = frozenset(int(one) for one in Segment)
_ADDRESS_LIMIT: Final = 1 << 63


class Metadata(msgspec.Struct, array_like=True, frozen=True):
    """Of one agent, all of it or a part."""

    name: str
    #: Of its engine; empty in a part that leaves out how to reach it.
    card: bytes
    #: Whether all of its registrations are named. Then it replaces what is known, unless that is
    #: of a later generation.
    is_whole: bool
    generation: int
    #: Packed: uint64 of segment, device, address and bytes for each.
    packed: bytes

    @property
    def ranges(self) -> npt.NDArray[np.uint64]:
        """Shape (n, 2): address, bytes."""
        rows = np.frombuffer(self.packed, "<u8").reshape(-1, _RANGE)
        return np.ascontiguousarray(rows[:, 2:])


def encode(
    name: str, card: bytes, is_whole: bool, generation: int, ranges: Sequence[Range]
) -> bytes:
    """The bytes for others. ``nixlInvalidParamError`` if there are too many registrations."""
    packed = np.array([tuple(one) for one in ranges], "<u8").reshape(-1, _RANGE).tobytes()
    body = msgspec.msgpack.encode(Metadata(name, card, is_whole, generation, packed))
    if len(body) > NBYTES_MAX:
        raise InvalidParam(f"metadata of {len(body)} bytes; at most {NBYTES_MAX} may be")
    return MAGIC + bytes([VERSION]) + body


def decode(data: bytes) -> Metadata:
    """``nixlMismatchError`` with the reason for bytes that `encode` did not make."""
    head = len(MAGIC) + 1
    if not data.startswith(MAGIC):
        raise Mismatch(
            "these bytes are not the metadata of an agent over te: both sides need"
            " sglang-mooncake's nixl, or both NVIDIA's"
        )
    if data[len(MAGIC) : head] != bytes([VERSION]):
        raise Mismatch(
            f"the other agent's metadata has version {data[len(MAGIC) : head].hex()}, this one's"
            f" {VERSION:02x}: give both the same release of sglang-mooncake"
        )
    if len(data) > head + NBYTES_MAX:
        raise Mismatch(f"metadata of {len(data)} bytes; at most {NBYTES_MAX} may be")
    body = data[head:]
    problem = nesting.complaint(body)
    if problem is not None:
        raise Mismatch(f"metadata that is damaged: {problem}")
    try:
        told = msgspec.msgpack.decode(body, type=Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise Mismatch(f"metadata that is damaged: {exc}") from exc
    _check(told)
    return told


def _check(told: Metadata) -> None:
    if not 0 < len(told.name.encode()) <= NAME_BYTES_MAX or told.generation < 0:
        raise Mismatch("metadata that is damaged: no name, or no generation")
    if len(told.packed) % (8 * _RANGE):
        raise Mismatch("metadata that is damaged: half a registration")
    rows = np.frombuffer(told.packed, "<u8").reshape(-1, _RANGE)
    ends_wrong = rows[:, 3] > _ADDRESS_LIMIT - np.minimum(rows[:, 2], _ADDRESS_LIMIT)
    if ends_wrong.any() or not set(np.unique(rows[:, 0]).tolist()) <= _SEGMENTS:
        raise Mismatch("metadata that is damaged: a registration that cannot be")


def text_of(name: str | bytes) -> str:
    """Names are taken as text and as bytes, since `add_remote_agent` gives bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def check_name(name: str) -> str:
    """Of an own agent. ``ValueError`` if it is empty or too long."""
    if not name:
        raise ValueError("an agent needs a name")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"the name of an agent has at most {NAME_BYTES_MAX} bytes")
    return name
