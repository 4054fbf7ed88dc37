# SPDX-License-Identifier: Apache-2.0
"""The frames of te/links/greeting.py, written down a second time: what tests say on the wire."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np

HEADER = struct.Struct("<BBHIQQQQ")
LANDING = np.dtype([("dst", "<u8"), ("nbytes", "<u8")])
REPLY = 1


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


class AckStatus(enum.IntEnum):
    LANDED = 0
    REFUSED = 1
    ABANDONED = 2
    PROGRESS = 3
    GRANTED = 4


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
    return head + np.array(blocks, "<u8").tobytes()


def end(transfer: int, tag: int = 0) -> bytes:
    """A whole transfer without blocks."""
    return header(Kind.END, transfer=transfer, tag=tag)


def abandon(transfer: int, tag: int, sent: int) -> bytes:
    return header(Kind.ABANDON, transfer=transfer, tag=tag, total=sent)


def ack(transfer: int, status: int, reason: bytes = b"") -> bytes:
    return header(Kind.ACK, status=status, count=len(reason), transfer=transfer) + reason
