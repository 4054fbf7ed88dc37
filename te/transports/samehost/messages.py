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
    """Random bytes in the sender's memory. The other side reads them there, and so sees that it can
    read this process, and that this is the process that it speaks to. A child of the process has
    zeros there."""

    #: Where they are.
    address: Unsigned
    #: What they are.
    data: Annotated[bytes, msgspec.Meta(min_length=NONCE_NBYTES, max_length=NONCE_NBYTES)]


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """A part of a region of the sender, which the receiver is to map: by the descriptor that comes
    with the greeting, or by a handle. With neither, the receiver unmaps all of that region."""

    #: Of its first byte, in the sender's memory.
    address: Unsigned
    #: How large it is.
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_LIMIT - 1)]
    #: Number of the region.
    serial: Unsigned
    #: Rises with each such greeting of a link. A greeting that comes behind a later one does not
    #: count: the sender has given it up, and its memory may be another region's.
    number: Annotated[int, msgspec.Meta(ge=1)]
    #: Which kind of memory maps it (``MemoryKind.handles``).
    handles: Annotated[str, msgspec.Meta(max_length=32)] = ""
    #: By what that kind maps it. It may name descriptors of the sender by their numbers.
    handle: Annotated[bytes, msgspec.Meta(max_length=HANDLE_BYTES_MAX)] = b""


@message
class HostHello(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a hello. It asks for a rail, whose memory file comes with it. With ``shared`` it asks
    for no rail: memory is to be mapped for the link, or unmapped."""

    #: The same in all greetings of a link.
    nonce: Nonce
    #: Which memory.
    shared: Shared | None = None


@message
class HostWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the welcome of a rail."""

    #: The destination's own.
    nonce: Nonce
