# SPDX-License-Identifier: Apache-2.0
"""The rooms of one decode rank that are not over, and how they are found; which links stand.

What is known of a room stands in its `DecodeRoom`. The indexes are kept here alone, where rooms
come, get sources and go, so that no event has to look through rooms that it does not concern.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from sglang_mooncake.messages import RoomRequest
from sglang_mooncake.rooms.arrival import Expected
from sglang_mooncake.rooms.decode_events import RoomSource
from sglang_mooncake.rooms.room import Record, Room, RoomTable
from sglang_mooncake.rooms.targets import Targets

__all__ = ["DecodeRoom", "DecodeTable"]


@dataclass(slots=True, eq=False)
class DecodeRoom(Record):
    """
    unlinked: links of its sources that the room waits for.
    computing: links of those that have not said that the prompt is computed; empty unless that
        matters.
    since_s: when it reached its present state; counted from COMPUTING on.
    targets: of pages that were named before the room was ready.
    slots: of the buffer of completion records.
    asked: the request to each source that sends, for the digests that may follow.
    """

    sources: tuple[RoomSource, ...] = ()
    unlinked: frozenset[Hashable] = frozenset()
    computing: frozenset[Hashable] = frozenset()
    since_s: float = 0.0
    targets: Targets | None = None
    slots: tuple[int, ...] = ()
    asked: Mapping[Hashable, tuple[RoomRequest, Expected]] = field(default_factory=dict)


class DecodeTable(RoomTable[DecodeRoom]):
    """Any thread may read `standing`."""

    def __init__(self) -> None:
        super().__init__()
        #: By generation, once the room has one.
        self._by_generation: dict[int, DecodeRoom] = {}
        #: By the links of their sources, and of these the ones that wait for a link; by serial.
        self._by_link: dict[Hashable, dict[int, DecodeRoom]] = {}
        self._waiting: dict[Hashable, dict[int, DecodeRoom]] = {}
        #: The links that stand, each with how many layers of a page its rank writes
        #: (`HelloReply.layers`). Replaced, and never changed.
        self.standing: Mapping[Hashable, int] = {}

    @property
    def is_empty(self) -> bool:
        """Of rooms, the indexes included."""
        return not (self._rooms or self._by_generation or self._by_link or self._waiting)

    def add(self, room: Room) -> None:
        self._rooms[room.serial] = DecodeRoom(room)

    def ask(self, record: DecodeRoom, sources: tuple[RoomSource, ...]) -> None:
        """The room has these sources from now on, and waits for their links that do not stand."""
        record.sources = sources
        record.unlinked = frozenset(one.link for one in sources) - self.standing.keys()
        for source in sources:
            self._by_link.setdefault(source.link, {})[record.room.serial] = record
        for link in record.unlinked:
            self._waiting.setdefault(link, {})[record.room.serial] = record

    def name_use(self, record: DecodeRoom, generation: int) -> None:
        """`generation` tells this use of the room number from any other."""
        self._by_generation[generation] = record

    def of_link(self, link: Hashable) -> list[DecodeRoom]:
        """The rooms that have it."""
        return list(self._by_link.get(link, {}).values())

    def of_use(self, link: Hashable, number: int, generation: int) -> DecodeRoom | None:
        """The room that a peer speaks of, if the peer is one of its sources."""
        record = self._by_generation.get(generation)
        if record is None or record.room.number != number:
            return None
        return record if any(source.link == link for source in record.sources) else None

    def link_up(self, link: Hashable, layers: int) -> list[DecodeRoom]:
        """A link stands. Returns the rooms that have waited for it and wait for no other."""
        if self.standing.get(link) != layers:
            self.standing = {**self.standing, link: layers}
        rooms = self._waiting.pop(link, {}).values()
        for record in rooms:
            record.unlinked -= {link}
        return [record for record in rooms if not record.unlinked]

    def link_down(self, link: Hashable) -> None:
        """It stands no more. The rooms that have it are to end."""
        if link in self.standing:
            self.standing = {other: n for other, n in self.standing.items() if other != link}

    def leave_out(self, record: DecodeRoom, link: Hashable) -> None:
        """The room has nothing to do with a link any more."""
        record.sources = tuple(source for source in record.sources if source.link != link)
        record.unlinked -= {link}
        for index in (self._by_link, self._waiting):
            rooms = index.get(link, {})
            rooms.pop(record.room.serial, None)
            if not rooms:
                index.pop(link, None)

    def drop(self, record: DecodeRoom) -> None:
        """The room is over."""
        del self._rooms[record.room.serial]
        self._by_generation.pop(record.view.generation, None)
        for source in record.sources:
            self.leave_out(record, source.link)
