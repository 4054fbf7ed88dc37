# SPDX-License-Identifier: Apache-2.0
"""What two engines of one host say to each other before there is a link."""

from __future__ import annotations

from typing import Annotated

import msgspec

from te.blocks import ADDRESS_LIMIT
from te.handshake import Unsigned, message
from te.memory_kinds.base import HANDLE_BYTES_MAX
from te.transports.samehost._core import NONCE_NBYTES

__all__ = ["HostHello", "HostWelcome", "Nonce", "Shared"]


class Nonce(msgspec.Struct, frozen=True, array_like=True):
    """Random bytes in the sender's memory, where the other side reads them, to see that it can and
    that this is the process. A child of it has zeros there."""

    address: Unsigned
    data: Annotated[bytes, msgspec.Meta(min_length=NONCE_NBYTES, max_length=NONCE_NBYTES)]


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """A part of a region of the sender: to be mapped, by the descriptor that comes with the
    greeting or by a handle. With neither, all of that region is to be unmapped. Address, size in
    bytes, serial of the region."""

    address: Unsigned
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_LIMIT - 1)]
    serial: Unsigned
    #: Rises with each such greeting of a link. One that comes behind a later one counts no more: it
    #: was given up, and its memory may be another region's.
    number: Annotated[int, msgspec.Meta(ge=1)]
    #: Which kind of memory maps it (``MemoryKind.handles``), and by what. It may name descriptors
    #: of the sender by their numbers.
    handles: Annotated[str, msgspec.Meta(max_length=32)] = ""
    handle: Annotated[bytes, msgspec.Meta(max_length=HANDLE_BYTES_MAX)] = b""


@message
class HostHello(msgspec.Struct, frozen=True, kw_only=True):
    """In a hello: a rail, for which its memory file comes along; or, with ``shared``, memory."""

    #: The same for all of a link.
    nonce: Nonce
    #: No rail, but memory to be mapped for the link, or unmapped.
    shared: Shared | None = None


@message
class HostWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """In the welcome of a rail."""

    nonce: Nonce
