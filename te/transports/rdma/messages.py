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
    """An RDMA device of the engine and the addresses it can be reached at."""

    #: For messages.
    name: Name
    #: ``ib``, ``roce`` or ``iwarp``: devices of one family can be connected.
    family: Name
    #: InfiniBand's address of its port; 0 of others.
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    #: ``enum ibv_mtu``.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    gids: Annotated[list[Gid], msgspec.Meta(max_length=1024)]


@message
class RdmaOffer(msgspec.Struct, frozen=True, kw_only=True):
    """On the card."""

    #: Offers of rails name them by their place here.
    nics: Annotated[list[CardNic], msgspec.Meta(max_length=NICS_LIMIT)]


class RailOffer(msgspec.Struct, frozen=True, kw_only=True):
    """My end of a rail, for an open link; make yours and connect it to this."""

    #: Which of the link's rails.
    rail: Annotated[int, msgspec.Meta(ge=0, lt=RAILS_LIMIT)]
    #: Rises each time that this rail is made.
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    #: My device, by its place in my list.
    nic: Annotated[int, msgspec.Meta(ge=0, lt=NICS_LIMIT)]
    #: Your device, by its place on your card.
    remote_nic: Annotated[int, msgspec.Meta(ge=0, lt=NICS_LIMIT)]
    #: Address of my end; empty where the LID is enough.
    gid: Annotated[bytes, msgspec.Meta(max_length=16)]
    #: Index of the address of your end; 0 where the LID is enough.
    remote_gid_index: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
    #: Number of my queue pair. iWARP leaves out this and the following fields.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Sequence number of the first packet that I send.
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: LID of my port; 0 but for InfiniBand.
    lid: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)] = 0
    #: For both ends: ``enum ibv_mtu``.
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1


class RailAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """My end, which is ready to receive; or of iWARP, ready to be dialled."""

    #: Number of my queue pair; iWARP leaves out this and ``psn``.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: Sequence number of the first packet that I send.
    psn: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)] = 0
    #: How often this link's rails have been fenced; send nothing before you know of that many.
    fences: Unsigned = 0
    #: iWARP: where I listen, at the address that was asked for.
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    #: iWARP: what to say there.
    token: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


@message
class RdmaHello(msgspec.Struct, frozen=True, kw_only=True):
    """In a hello: the connection for the words of a link; or, with ``rail``, a rail of it."""

    #: No connection, but a rail for the link, which is open.
    rail: RailOffer | None = None


@message
class RdmaWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """In a welcome."""

    #: Where the hello offered one.
    rail: RailAnswer | None = None
