# SPDX-License-Identifier: Apache-2.0
"""What stands at the begin of a bundle, so that it tells by itself what it has; and what tells,
beside it, which of its objects were removed. Pure.

    | head: fields, an entry for each object | object | object | ... |
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import xxhash

from kvstore.tiers.base import NAME_BYTES, Laid
from kvstore.tiers.bundles import Page

__all__ = ["HEAD_BYTES_MAX", "PAGES_MAX", "bundle_head", "pages_of", "removed_head", "removed_of"]

PAGES_MAX: Final = 256
"""Objects of a bundle."""

_FIELDS: Final = struct.Struct("<8sQQ")  # what it is, entries, bytes of the whole bundle
_OWN: Final = struct.Struct("<Q")  # xxh3-64 of the head without it
_BUNDLE: Final = b"kvbundle"
_REMOVED: Final = b"kvremove"
_ENTRY: Final = np.dtype(
    [("name", f"V{NAME_BYTES}"), ("nbytes", "<u8"), ("checksum", "<u8"), ("offset", "<u8")]
)
_FIXED: Final = _FIELDS.size + _OWN.size
HEAD_BYTES_MAX: Final = _FIXED + PAGES_MAX * _ENTRY.itemsize
"""No head is larger."""


def bundle_head(objects: Sequence[Laid]) -> tuple[bytes, dict[bytes, Page]]:
    """The head of a bundle of so many objects, which follow it without gaps, and where they are. At
    most ``PAGES_MAX``."""
    entries = np.zeros(len(objects), _ENTRY)
    offset = _FIXED + entries.nbytes
    pages = {}
    for i, one in enumerate(objects):
        pages[one.name] = Page(one.name, one.nbytes, one.checksum, offset)
        entries[i] = (np.void(one.name), one.nbytes, one.checksum, offset)
        offset += one.nbytes
    return _sealed(_FIELDS.pack(_BUNDLE, len(objects), offset), entries.tobytes()), pages


def pages_of(raw: bytes, nbytes: int) -> dict[bytes, Page] | None:
    """What a bundle of so many bytes has, by its begin: ``HEAD_BYTES_MAX`` of it, or all. None if
    that cannot be the head of such a bundle."""
    body = _opened(raw, _BUNDLE, _ENTRY.itemsize, nbytes)
    if body is None:
        return None
    entries = np.frombuffer(body, _ENTRY)
    if (entries["nbytes"] > nbytes).any() or (entries["offset"] > nbytes - entries["nbytes"]).any():
        return None
    return {
        name: Page(name, size, checksum, offset)
        for name, size, checksum, offset in zip(
            (one.tobytes() for one in entries["name"]),
            entries["nbytes"].tolist(),
            entries["checksum"].tolist(),
            entries["offset"].tolist(),
            strict=True,
        )
    }


def removed_head(bundle_id: bytes, names: Collection[bytes]) -> bytes:
    """The object that tells which objects were removed from a bundle."""
    body = bundle_id + b"".join(names)
    nbytes = _FIXED + len(body)
    return _sealed(_FIELDS.pack(_REMOVED, len(names), nbytes), body)


def removed_of(raw: bytes, bundle_id: bytes) -> set[bytes] | None:
    """The names that such an object tells; None if it cannot be that bundle's."""
    # The id comes before the names.
    body = _opened(raw, _REMOVED, NAME_BYTES, len(raw), before=len(bundle_id))
    if body is None or body[: len(bundle_id)] != bundle_id:
        return None
    names = body[len(bundle_id) :]
    return {names[i : i + NAME_BYTES] for i in range(0, len(names), NAME_BYTES)}


def _sealed(fields: bytes, body: bytes) -> bytes:
    return fields + _OWN.pack(xxhash.xxh3_64_intdigest(fields + body)) + body


def _opened(
    raw: bytes, what: bytes, entry_bytes: int, nbytes: int, before: int = 0
) -> bytes | None:
    """What follows the fields, if they fit and nothing of it has changed."""
    if len(raw) < _FIXED:
        return None
    said, count, said_bytes = _FIELDS.unpack_from(raw)
    end = _FIXED + before + count * entry_bytes
    if said != what or said_bytes != nbytes or not _FIXED + before < end <= len(raw):
        return None
    body = raw[_FIXED:end]
    return body if _sealed(raw[: _FIELDS.size], body) == raw[:end] else None
