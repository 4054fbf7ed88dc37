# SPDX-License-Identifier: Apache-2.0
"""The wire format, written down a second time: what tests say on the wire. `test_te_wire.py`
compares it with the table in te/core/wire.h."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HEADER = struct.Struct("<BBHIQQQQ")
LANDING = np.dtype([("dst", "<u8"), ("nbytes", "<u8")])
BLOCK = np.dtype([("src", "<u8"), ("dst", "<u8"), ("nbytes", "<u8")])
PIECE = np.dtype([("transfer", "<u8"), ("piece", "<u8")])
FAR = np.dtype([("start", "<u8"), ("end", "<u8"), ("rights", "<u8"), ("keys", "<u4", (8,))])
REASON = np.dtype([("character", "u1")])
NOTE_BYTE = np.dtype([("byte", "u1")])
NOTE_PART_MAX, NOTE_MAX = 16 << 10, 1 << 20
REPLY = 1
MAY_READ, MAY_WRITE_TAGGED, MAY_WRITE_UNTAGGED = 1, 2, 4
ALL_RIGHTS = 7


class Kind(enum.IntEnum):
    SEGMENT = 16
    END = 17
    ABANDON = 18
    ACK = 19
    PULL = 20
    READ = 21
    ASK = 22
    TABLE = 23
    RAIL_LOST = 24
    RAIL_CLOSED = 25
    RAIL_BROKEN = 26
    CREDIT = 27
    NOTE = 28


class AckStatus(enum.IntEnum):
    LANDED = 0
    REFUSED = 1
    ABANDONED = 2
    PROGRESS = 3
    GRANTED = 4


class Told(NamedTuple):
    """Of a frame: the links over which the source sends it, and the destination; what `count`
    counts, if that follows; and how many there may be."""

    sides: tuple[str, str]
    item: np.dtype[np.void] | None = None
    count: tuple[int, int] = (0, 0)


BYTES, EACH = "TCP RINGS", "TCP RINGS RDMA"
#: By kind, and which of its frames.
FRAMES = {
    (Kind.SEGMENT, ""): Told((BYTES, ""), LANDING, (1, 1020)),
    (Kind.SEGMENT, "reply"): Told(("", BYTES), LANDING, (1, 1020)),
    (Kind.END, ""): Told((EACH, "")),
    (Kind.ABANDON, ""): Told((BYTES, "")),
    (Kind.ABANDON, "over RDMA"): Told(("RDMA", "")),
    (Kind.ABANDON, "reply"): Told(("", BYTES)),
    (Kind.ACK, "LANDED"): Told((BYTES, EACH)),
    (Kind.ACK, "REFUSED"): Told((BYTES, EACH), REASON, (0, 511)),
    (Kind.ACK, "ABANDONED"): Told((BYTES, EACH)),
    (Kind.ACK, "PROGRESS"): Told((BYTES, BYTES)),
    (Kind.ACK, "GRANTED"): Told(("", "RDMA")),
    (Kind.PULL, ""): Told(("RINGS", ""), BLOCK, (1, 1020)),
    (Kind.PULL, "reply"): Told(("", "RINGS"), BLOCK, (1, 1020)),
    (Kind.READ, ""): Told((BYTES, ""), BLOCK, (1, 1020)),
    (Kind.ASK, ""): Told(("RDMA", ""), None, (0, 1 << 16)),
    (Kind.TABLE, ""): Told(("", "RDMA"), FAR, (0, 500)),
    (Kind.RAIL_LOST, ""): Told(("RDMA", ""), PIECE, (0, 64)),
    (Kind.RAIL_CLOSED, ""): Told(("", "RDMA"), PIECE, (0, 64)),
    (Kind.RAIL_BROKEN, ""): Told(("", "RDMA")),
    (Kind.CREDIT, ""): Told(("", "RDMA")),
    (Kind.NOTE, ""): Told((EACH, ""), NOTE_BYTE, (1, 16 << 10)),
}


@dataclass(frozen=True)
class Ack:
    transfer: int
    status: AckStatus
    reason: str


def header(
    kind: int,
    *,
    status: int = 0,
    flags: int = 0,
    count: int = 0,
    transfer: int = 1,
    tag: int = 0,
    nbytes: int = 0,
    total: int = 0,
) -> bytes:
    return HEADER.pack(kind, status, flags, count, transfer, tag, nbytes, total)


def segment(
    transfer: int,
    tag: int,
    landings: list[tuple[int, int]],
    nbytes: int,
    total: int | None = None,
    flags: int = 0,
) -> bytes:
    """Header and descriptors; payload and trailer are for the caller."""
    head = header(
        Kind.SEGMENT,
        flags=flags,
        count=len(landings),
        transfer=transfer,
        tag=tag,
        nbytes=nbytes,
        total=nbytes if total is None else total,
    )
    return head + np.array(landings, LANDING).tobytes()


def trailer(fault: int = 0) -> bytes:
    return struct.pack("<Q", fault)


def descriptors(kind: Kind, transfer: int, blocks: list[tuple[int, int, int]]) -> bytes:
    """A whole PULL or READ."""
    nbytes = sum(one[2] for one in blocks)
    head = header(kind, count=len(blocks), transfer=transfer, nbytes=nbytes, total=nbytes)
    return head + np.array(blocks, BLOCK).tobytes()


def end(transfer: int, tag: int = 0) -> bytes:
    """A whole transfer without blocks."""
    return header(Kind.END, transfer=transfer, tag=tag)


def abandon(transfer: int, tag: int, sent: int) -> bytes:
    return header(Kind.ABANDON, transfer=transfer, tag=tag, total=sent)


def note(number: int, data: bytes, total: int | None = None) -> bytes:
    """A part of a note; the whole of it without ``total``."""
    whole = len(data) if total is None else total
    return header(Kind.NOTE, count=len(data), transfer=number, total=whole) + data


def ack(transfer: int, status: int, reason: bytes = b"") -> bytes:
    return header(Kind.ACK, status=status, count=len(reason), transfer=transfer) + reason
