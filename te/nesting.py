# SPDX-License-Identifier: Apache-2.0
"""How deep and how large MessagePack of strangers is, before anything decodes it. Pure.

A decoder calls itself once for each level, so that depth costs it stack: what it does at the end
of that (an exception that nobody expects, or a crash where the interpreter's limit was raised) is
not for a stranger to choose.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DEPTH_MAX", "ITEMS_MAX", "complaint"]

DEPTH_MAX: Final = 16
"""Arrays and maps inside each other. te's own messages have five levels at most."""

ITEMS_MAX: Final = 1 << 17
"""Values of one message, keys included. A card has four for each region."""

# How many bytes of length follow a first byte, and how many bytes besides that length's.
_SIZED: Final = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
_FIXED: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
# How many bytes of count follow a first byte, and how many values each unit counts.
_COUNTED: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def complaint(data: bytes) -> str | None:
    """What is too deep or too much in the first message of ``data``; None if a decoder may have it.

    It is not said whether the message is whole or well-formed: that is the decoder's.
    """
    at = items = 0
    # How many values are still to come of each array or map that is open.
    waiting = [1]
    while waiting and at < len(data):
        items += 1
        if items > ITEMS_MAX:
            return f"more than {ITEMS_MAX} values"
        waiting[-1] -= 1
        at, inside = _step(data, at)
        if inside:
            waiting.append(inside)
            if len(waiting) > DEPTH_MAX + 1:
                return f"values nested more than {DEPTH_MAX} levels deep"
        while waiting and not waiting[-1]:
            waiting.pop()
    return None


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Where what follows the value's own bytes begins, and how many values it has inside."""
    first = data[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return at, 0
    if first < 0x90:
        return at, 2 * (first & 0xF)
    if first < 0xA0:
        return at, first & 0xF
    if first < 0xC0:
        return at + (first & 0x1F), 0
    if first in _COUNTED:
        width, each = _COUNTED[first]
        return at + width, each * int.from_bytes(data[at : at + width])
    if first in _SIZED:
        width, besides = _SIZED[first]
        return at + width + besides + int.from_bytes(data[at : at + width]), 0
    return at + _FIXED.get(first, 0), 0
