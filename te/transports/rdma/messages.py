# SPDX-License-Identifier: Apache-2.0
"""What engines with RDMA devices say to each other: on cards, and in the greetings of a link."""

from __future__ import annotations

from typing import Annotated

import msgspec

from te.core.wire import NICS_LIMIT, RAILS_LIMIT
from te.handshake import Name, Unsigned, message
from te.topology import Gid

__all__ = ["CardNic", "RailAnswer", "RailOffer", "RdmaHello", "RdmaOffer", "RdmaWelcome"]


class CardNic(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA device of the engine, and the addresses at which it can be reached."""

    #: What log and errors call it.
    name: Name
    #: ``ib``, ``roce`` or ``iwarp``. Only devices of one family can be connected.
    family: Name
    #: InfiniBand: the port's local address. 0 for other families.
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    #: Largest packet of the port, as ``enum ibv_mtu`` says it.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    #: Addresses of the port.
    gids: Annotated[list[Gid], msgspec.Meta(max_length=1024)]


@message
class RdmaOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The offer on the card."""

    #: RailOffer names a device by its place in this list.
    nics: Annotated[list[CardNic], msgspec.Meta(max_length=NICS_LIMIT)]


class RailOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The source's end of a rail for a link that stands. The destination makes its own end and
    connects it to this one."""

    #: Which of the link's rails.
    rail: Annotated[int, msgspec.Meta(ge=0, lt=RAILS_LIMIT)]
    #: Rises each time that this rail is made.
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    #: The source's device, by its place on the source's own card.
    nic: Annotated[int, msgspec.Meta(ge=0, lt=NICS_LIMIT)]
    #: The destination's device, by its place on the card.
    remote_nic: Annotated[int, msgspec.Meta(ge=0, lt=NICS_LIMIT)]
    #: Address of the source's end; empty where the LID is enough.
    gid: Annotated[bytes, msgspec.Meta(max_length=16)]
    #: Index of the address of the destination's end; 0 where the LID is enough.
    remote_gid_index: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    #: Of the source's queue pair. iWARP leaves this field and the next three out.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Number of the first packet that the source sends.
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Of the source's port; 0 for RoCE.
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)] = 0
    #: Largest packet for both ends, as ``enum ibv_mtu`` says it.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1


class RailAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The destination's end, which is ready to receive. With iWARP it is ready to be connected
    to."""

    #: Of the destination's queue pair. iWARP leaves this field and the next one out.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Number of the first packet that the destination sends.
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: How often this link's rails have been fenced. The source sends nothing before it has heard of
    #: that many fences.
    fences: Unsigned = 0
    #: iWARP: the port where the destination listens, at the address that was asked for.
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    #: iWARP: what the source says there.
    token: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


@message
class RdmaHello(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a hello. It begins a link, and the connection carries the link's frames. With
    ``rail`` it asks for a rail of a link that stands."""

    #: The rail.
    rail: RailOffer | None = None


@message
class RdmaWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the welcome."""

    #: The other end, where the hello has a rail.
    rail: RailAnswer | None = None
