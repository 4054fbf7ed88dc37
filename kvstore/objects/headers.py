# SPDX-License-Identifier: Apache-2.0
"""The header of a slot: which object lies in it. Pure.

An owner changes a header before the first byte of the slot changes, and writes the whole one after
the last. So a reader that reads the bytes first and the header *afterwards*, and finds the header
that it expects, has read that object.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore import _bytes
from kvstore.objects.changes import PLACE, Keys, Records, fingerprint_of

__all__ = ["HEADER", "HEADER_BYTES", "LIVE", "expected", "expected_at", "tell_apart"]

HEADER: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("state", "<u4"),
        ("key", "V16"),
        ("signature", "V16"),
        ("nbytes", "<u8"),
        ("generation", "<u4"),
        ("fingerprint", "<u4"),
        ("checksum", "<u8"),  # xxh3-64 of the object's bytes; last, as ``expected`` leaves it out
    ]
)
HEADER_BYTES: Final = HEADER.itemsize
_COMPARED: Final = HEADER.fields["checksum"][1]  # type: ignore[index]

MAGIC: Final = 0x534C4F54
"""Changes with the layout of the header."""
LIVE: Final = 1
"""The state of a slot whose object may be read; any other state means that there is none."""


def expected(keys: Keys, signature: bytes, nbytes: int, generations: npt.ArrayLike) -> Records:
    """The headers of live objects, with checksums of 0; shape (n,)."""
    places = np.zeros(len(keys), PLACE)
    places["generation"] = generations
    return expected_at(keys, signature, nbytes, places)[0]


def expected_at(
    keys: Keys, signature: bytes, nbytes: int, places: Records
) -> tuple[Records, npt.NDArray[np.uint64]]:
    """``expected`` of what a look-up has found (dtype ``PLACE``), and the numbers of its slots,
    shape (n,)."""
    headers, slots = np.empty(len(keys), HEADER), np.empty(len(keys), np.uint64)
    fingerprint = fingerprint_of(signature, nbytes)
    keys, places = np.ascontiguousarray(keys), np.ascontiguousarray(places)
    _bytes.expect(keys, signature, nbytes, fingerprint, MAGIC, LIVE, places, headers, slots)
    return headers, slots


def tell_apart(read: Records, wanted: Records) -> npt.NDArray[np.bool_]:
    """Which of the headers that were read are those that were wanted, checksums aside."""
    ours = read.view(np.uint8).reshape(-1, HEADER_BYTES)[:, :_COMPARED]
    others = wanted.view(np.uint8).reshape(-1, HEADER_BYTES)[:, :_COMPARED]
    equal: npt.NDArray[np.bool_] = (ours == others).all(axis=1)
    return equal
