# SPDX-License-Identifier: Apache-2.0
"""What LMCache's objects are called in the store. Pure.

LMCache's key says which tokens of which model, and which part of which world size
(``ObjectKey.kv_rank`` has both). So all of it is in the store's key. It does not say how the bytes
are arranged: shapes, in which the tokens of a chunk are one dimension, and types of numbers are the
signature, with what the operator says of the weights.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvstore.objects.changes import Keys, keys_of_digests

__all__ = ["Layout", "keys_of_objects", "rows_by", "signature_of"]

DIGEST_BYTES: Final = 16
LAYOUTS_MAX: Final = 1024


class Layout(NamedTuple):
    """How the bytes of an object are arranged: the shape and the type of each tensor in it."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]], dtypes: Iterable[Any]) -> Layout:
        """``dtypes`` are torch's."""
        return cls(tuple(map(tuple, shapes)), tuple(dtypes))

    @property
    def nbytes(self) -> int:
        """The size of an object."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


def keys_of_objects(objects: Sequence[Any]) -> Keys:
    """The store's keys, shape (n, 16), from LMCache's (``v1.distributed.api.ObjectKey``)."""
    return keys_of_digests([_digest(one) for one in objects])


def _digest(key: Any) -> bytes:
    said = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash)
    text = msgspec.msgpack.encode(said)
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"kv lmcache key").digest()


@functools.lru_cache(LAYOUTS_MAX)
def signature_of(weights: str, layout: Layout) -> bytes:
    """16 bytes that differ if the weights or the layout do."""
    said = (weights, layout.shapes, [str(one) for one in layout.dtypes])
    text = msgspec.msgpack.encode(said)
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"kv lmcache sig").digest()


def rows_by(several: Sequence[Any], what: Callable[[Any], Any]) -> Iterator[tuple[Any, list[int]]]:
    """The rows that have something in common."""
    found: dict[Any, list[int]] = {}
    for row, one in enumerate(several):
        found.setdefault(what(one), []).append(row)
    yield from found.items()
