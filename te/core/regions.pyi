# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Final

UNUSED: Final[int]
"""Instead of a distance: the device is to be used when no other is left."""

def packed_key(
    start: int, end: int, lkeys: Sequence[int], rkeys: Sequence[int], distances: Sequence[int]
) -> bytes:
    """The range [start, end) of registered memory, with the keys by which each device, and peers of
    each device, name it, and how far each device is from it: 0 near, 1 the same NUMA node, 2
    another, or ``UNUSED``. For ``Engine.add_region``, one behind the other. ``ValueError``,
    ``OverflowError``."""
