# SPDX-License-Identifier: Apache-2.0
"""What two engines of one host say to each other before there is a link."""

from __future__ import annotations

from typing import Annotated

import msgspec

from te.handshake import Unsigned, message

__all__ = ["HostHello", "HostWelcome", "Nonce", "Shared"]


class Nonce(msgspec.Struct, frozen=True, array_like=True):
    """A few bytes of the sender's memory, to see whether the other side can read them there."""

    address: Unsigned
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the sender: to be mapped if its descriptor comes with the greeting, else to be
    unmapped. Address, size in bytes, serial of the region."""

    address: Unsigned
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    serial: Unsigned
    #: Rises with each such greeting of a link. One that comes behind a later one counts no more: it
    #: was given up, and its memory may be another region's.
    number: Annotated[int, msgspec.Meta(ge=1)]


@message
class HostHello(msgspec.Struct, frozen=True, kw_only=True):
    """In a hello: a rail, for which its memory file comes along; or, with ``shared``, memory."""

    #: On the first rail of a link.
    nonce: Nonce | None = None
    #: No rail, but memory to be mapped for the link, or unmapped.
    shared: Shared | None = None


@message
class HostWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """In a welcome."""

    #: Where the hello had one.
    nonce: Nonce | None = None
