# SPDX-License-Identifier: Apache-2.0
"""What a doctor asks of one at the other end, and what it is answered."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from te.doctor.facts import Facts
from te.doctor.findings import Finding

__all__ = [
    "BUFFER_NBYTES",
    "REPLIES",
    "REQUESTS",
    "Digest",
    "Digested",
    "EngineOpened",
    "Host",
    "Look",
    "OpenEngine",
    "Refused",
    "Reply",
    "Request",
]

BUFFER_NBYTES: Final = 4 << 20
"""Memory that test writes go to, and come from."""

Text = Annotated[str, msgspec.Meta(max_length=255)]


class Look(msgspec.Struct, frozen=True, tag=True):
    """Tell what you have found on your host: answered with ``Host``."""


class OpenEngine(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Open an engine in place of the one before, with memory of ``BUFFER_NBYTES`` that I may write:
    answered with ``EngineOpened``."""

    transport: Text
    #: The RDMA device that it is to use, by name; ``""`` for a transport without devices.
    nic: Text = ""
    #: The address that it is to listen on: one of ``Host.addresses``.
    address: Text


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Tell the SHA-256 of that memory: answered with ``Digested``."""


Request = Look | OpenEngine | Digest


class Host(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One side of a check."""

    name: str
    #: Of the package.
    version: str
    #: Of the engines.
    protocol: int
    #: IP addresses that other hosts may reach; the first one is that of this connection.
    addresses: tuple[str, ...]
    facts: Facts
    findings: tuple[Finding, ...]
    #: The GID index that its engines are told to use.
    gid_index: int | None


class EngineOpened(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine is open."""

    card: bytes
    #: Where its memory begins.
    memory: int


class Digested(msgspec.Struct, frozen=True, tag=True):
    """The SHA-256 of the memory."""

    digest: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What was asked for cannot be done, and why."""

    reason: str


Reply = Host | EngineOpened | Digested | Refused

REQUESTS: Final = msgspec.msgpack.Decoder(Request)
REPLIES: Final = msgspec.msgpack.Decoder(Reply)
