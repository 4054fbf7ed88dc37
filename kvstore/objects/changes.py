# SPDX-License-Identifier: Apache-2.0
"""What owners announce, and what a look-up finds: records as numpy and the compiled table have
them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore._table import digests_of_hex

__all__ = [
    "ADDED",
    "ANY",
    "CHANGE",
    "KEY_BYTES",
    "LOWER_TIER",
    "OWNERS_MAX",
    "PLACE",
    "REMOVED",
    "Found",
    "Keys",
    "Records",
    "fingerprint_of",
    "keys_of_digests",
    "keys_of_hex",
]

KEY_BYTES: Final = 16
OWNERS_MAX: Final = 1024
"""Owners that one table tells apart (OWNERS in _table.pyx)."""

Records: TypeAlias = npt.NDArray[np.void]
Keys: TypeAlias = npt.NDArray[np.uint8]
"""Key digests, shape (n, 16)."""

ADDED, REMOVED = 1, 2

CHANGE: Final = np.dtype(
    [("key", "V16"), ("fingerprint", "<u4"), ("slot", "<u4"), ("generation", "<u4"), ("op", "<u4")]
)
"""An object that was added to an owner, or removed. ``fingerprint`` is ``fingerprint_of`` its
signature and size; ``slot`` and ``generation`` say where it lies (or lay): in memory, or, with the
slot ``LOWER_TIER`` and generation 0, in a lower tier, from where its owner has to promote it before
it can be read."""

LOWER_TIER: Final = 0xFFFFFFFF
"""The slot of an object that does not lie in memory (LOWER_TIER in _table.pyx)."""

PLACE: Final = np.dtype(
    [
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("owner", "<u2"),
        ("found", "u1"),
        ("copies", "u1"),
        ("unused", "<u4"),
    ]
)
"""What a look-up finds for one key. ``copies``: the owners that have it, of those that can be used;
255 also stands for more."""


ANY: Final = 0
"""With this fingerprint a look-up finds a key as ``HERE`` or as ``OTHER``."""


class Found:
    """The values of ``PLACE["found"]``."""

    MISSING = 0
    HERE = 1
    #: The key is there, with another signature or another size alone.
    OTHER = 2
    #: It lies in the lower tier of an owner that cannot be asked for it. No table says so, only
    #: ``promoting.promote``.
    SILENT = 3


@lru_cache
def fingerprint_of(signature: bytes, nbytes: int) -> int:
    """32 bits of a signature's digest and an object's size, which a table can compare fast. The
    slot's header has both in full."""
    return xxhash.xxh32_intdigest(signature + struct.pack("<Q", nbytes))


def keys_of_hex(texts: Sequence[str]) -> Keys:
    """From digests in hex, such as SGLang's page keys: their first 16 bytes. ``ValueError`` names
    the first text that is none."""
    return np.frombuffer(digests_of_hex(texts), np.uint8).reshape(-1, KEY_BYTES)


def keys_of_digests(digests: Sequence[bytes]) -> Keys:
    """From digests of at least 16 bytes: their first 16 bytes. ``ValueError`` if one is shorter."""
    short = next((one for one in digests if len(one) < KEY_BYTES), None)
    if short is not None:
        raise ValueError(f"the key {short!r} has {len(short)} bytes, and needs {KEY_BYTES}")
    packed: Any = b"".join(one[:KEY_BYTES] for one in digests)
    return np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)
