# SPDX-License-Identifier: Apache-2.0
"""The latest digests that a prefill rank has sent: when a decode rank has found a difference, the
memory of which they were made is looked at again. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mooncake.layout import Cells, Digests, differences
from sglang_mooncake.messages import ListDigests, RoomDiffers, RoomDigests
from sglang_mooncake.rooms.prefill_events import Digest

__all__ = ["Found", "SentDigest", "SentLately", "look"]

#: A decode rank answers within milliseconds of the arrival. What is kept of an item, such as a
#: page, is about 60 bytes: 16 MB in all.
ROOMS_MAX = 256
ITEMS_MAX = 1 << 18


class Found(enum.Enum):
    """Of the memory of a prefill rank, when it is looked at again."""

    AS_DIGESTED = (
        "still has what its digests are of: something changes bytes on their way or in the decode"
        " rank's memory, or this memory was filled again between the copy and the digests"
    )
    AS_LANDED = (
        "has what has arrived there: it was changed behind the digests, while its pages were sent"
    )
    OTHER = "has been used again since, so that it cannot tell where the difference comes from"


def look(
    lists: Sequence[Cells],
    now: Sequence[Digests],
    sent: Sequence[Digests],
    landed: Sequence[Digests],
) -> Found:
    """What the digests of now tell, beside those that were sent and those of what has landed."""
    if not differences(lists, now, sent):
        return Found.AS_DIGESTED
    return Found.OTHER if differences(lists, now, landed) else Found.AS_LANDED


@dataclass(frozen=True, slots=True)
class SentDigest:
    asked: Digest
    message: RoomDigests

    @property
    def items(self) -> int:
        return sum(len(one.of_items) // 8 for one in self.message.lists)


class SentLately:
    """The latest, of bounded size. One thread at a time uses it."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int, int], SentDigest] = {}  # by peer, room and generation
        self._items = 0

    def add(self, asked: Digest, message: RoomDigests) -> None:
        key, one = (asked.peer, message.room, message.generation), SentDigest(asked, message)
        former = self._sent.pop(key, None)
        self._items += one.items - (former.items if former is not None else 0)
        self._sent[key] = one
        while len(self._sent) > ROOMS_MAX or self._items > ITEMS_MAX:
            self._items -= self._sent.pop(next(iter(self._sent))).items

    def take(self, peer: str, message: RoomDiffers) -> SentDigest:
        """Once: a peer cannot have the same memory looked at again and again.

        Raises:
            ValueError: they are not known, or the peer tells digests of other cells.
        """
        one = self._sent.pop((peer, message.room, message.generation), None)
        if one is None:
            raise ValueError("its digests are no longer known")
        self._items -= one.items
        if _cells(message.lists) != _cells(one.message.lists):
            raise ValueError("digests of other cells were told")
        return one


def _cells(lists: Sequence[ListDigests]) -> list[tuple[int, bytes, int]]:
    """Of which these are."""
    return [(one.which, one.positions, len(one.of_buffers)) for one in lists]
