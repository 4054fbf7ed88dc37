# SPDX-License-Identifier: Apache-2.0
"""Tags: names of expected arrivals, and whom and what they are for. The plane keeps and counts
them."""

from __future__ import annotations

import re
import secrets
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from te.blocks import ADDRESS_LIMIT

__all__ = [
    "TAG_LIMIT",
    "Identified",
    "Identity",
    "check_tag",
    "new_tag",
    "packed_peer",
    "packed_ranges",
    "unpacked_peer",
]

TAG_LIMIT = 1 << 64
EPOCH_LIMIT: Final = 1 << 64
ENGINE_ID: Final = re.compile("[0-9a-f]{32}")


class Identified(Protocol):
    """One life of an engine, as ``te.Engine``, ``te.Peer`` and ``te.Identity`` are."""

    @property
    def id(self) -> str:
        """The engine's id, 32 hex digits."""

    @property
    def epoch(self) -> int:
        """When it started, in ns since 1970."""


class Identity(NamedTuple):
    """One start of an engine: its id and epoch."""

    id: str
    epoch: int


def new_tag() -> int:
    """A random tag, which nobody can guess."""
    return 1 + secrets.randbelow(TAG_LIMIT - 1)


def check_tag(value: int) -> None:
    """``ValueError`` unless the value can name an expected arrival."""
    if not 0 < value < TAG_LIMIT:
        raise ValueError(f"tag {value} must be between 1 and 2**64 - 1")


def packed_peer(peer: str | Identified) -> bytes:
    """An engine as the plane compares it: 16 bytes for all lives of it, 24 for one;
    ``ValueError``."""
    engine_id = peer if isinstance(peer, str) else peer.id
    if not ENGINE_ID.fullmatch(engine_id):
        raise ValueError(f"{engine_id!r} is no engine's id, which has 32 hex digits")
    if isinstance(peer, str):
        return bytes.fromhex(engine_id)
    if not 0 <= peer.epoch < EPOCH_LIMIT:
        raise ValueError(f"{peer.epoch} is no engine's epoch, which is between 0 and 2**64 - 1")
    return bytes.fromhex(engine_id) + peer.epoch.to_bytes(8, "little")


def unpacked_peer(packed: bytes) -> Identity:
    """Of 24 bytes, as `packed_peer` makes them."""
    return Identity(packed[:16].hex(), int.from_bytes(packed[16:], "little"))


def packed_ranges(ranges: npt.ArrayLike) -> bytes:
    """Ranges, shape (n, 2) of (address, bytes), as the plane takes them: (start, end) as two u64
    each. ``ValueError`` for an empty one, or one that is no range of addresses."""
    array = np.asarray(ranges)
    if array.size == 0:
        return b""
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"ranges are integers of shape (n, 2), address and bytes, not {array.dtype} of shape"
            f" {array.shape}"
        )
    if int(array.min()) < 0 or int(array.max()) >= ADDRESS_LIMIT:
        raise ValueError("ranges have addresses and bytes between 0 and 2**63 - 1")
    packed = array.astype("<u8")
    if not packed[:, 1].all():
        raise ValueError("a range of a tag needs at least one byte, not 0")
    packed[:, 1] += packed[:, 0]  # Cannot wrap: both are below 2**63.
    return packed.tobytes()
