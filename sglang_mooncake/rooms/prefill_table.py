# SPDX-License-Identifier: Apache-2.0
"""The rooms of one prefill rank that are not over, how they are found, and how each ends."""

from __future__ import annotations

from sglang_mooncake.messages import RoomFailed
from sglang_mooncake.rooms.events import Over
from sglang_mooncake.rooms.prefill_events import CancelWrites, Instruction, Tell
from sglang_mooncake.rooms.prefill_room import PrefillRoom
from sglang_mooncake.rooms.room import Publisher, Room, RoomTable
from sglang_mooncake.rooms.states import TRANSITIONS_PREFILL, RoomState, Step

__all__ = ["ENDED_ROOMS_MAX", "PrefillTable"]

#: Rooms that ended badly are remembered, so that a decode rank which asks later is told at once.
ENDED_ROOMS_MAX = 4_096


class PrefillTable(RoomTable[PrefillRoom]):
    """
    views: what other threads see of the rooms.
    waiting: how many of `PrefillRoom.said` there are, of all rooms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.views = Publisher(TRANSITIONS_PREFILL)
        self.waiting = 0
        self._newest: dict[int, PrefillRoom] = {}  # by room number
        self._ended: dict[int, str] = {}  # room number → why it ended badly

    def newest(self, number: int) -> PrefillRoom | None:
        """The room that decode ranks mean by a number."""
        return self._newest.get(number)

    def why_ended(self, number: int) -> str | None:
        """Of a number whose newest room ended badly."""
        return self._ended.get(number)

    def add(self, room: Room) -> None:
        """Decode ranks mean this one by its number from now on."""
        self._rooms[room.serial] = self._newest[room.number] = PrefillRoom(room)
        self._ended.pop(room.number, None)

    def end(self, record: PrefillRoom | None, end: RoomState, reason: str) -> list[Instruction]:
        """The room ends badly, and all who asked for it are told, unless its end is decided
        already. It is over once nothing reads its pages."""
        if record is None or record.view.decided:
            return []
        asked = {peer: one.request.generation for peer, one in record.recipients.items()}
        told = f"prefill side: {reason}"
        instructions: list[Instruction] = [
            Tell(peer, RoomFailed(record.room.number, generation, told))
            for peer, generation in (asked | record.waiting).items()
        ]
        self._drop_said(record)
        self.views.change(record, reason=reason, end=end)
        if len(self._ended) >= ENDED_ROOMS_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[record.room.number] = told
        if record.is_quiet:
            return instructions + self.forget(record, Step.END, Step.QUIET)
        self.views.advance(record, Step.END)
        return [*instructions, CancelWrites(record.room, tuple(record.writes))]

    def forget(self, record: PrefillRoom, *steps: Step) -> list[Instruction]:
        """The room is over. The scheduler still has it; the table needs it no more."""
        self.views.advance(record, *steps)
        self._drop_said(record)
        del self._rooms[record.room.serial]
        if self._newest.get(record.room.number) is record:
            del self._newest[record.room.number]
        return [Over(record.room, tuple(record.stories))]

    def _drop_said(self, record: PrefillRoom) -> None:
        self.waiting -= len(record.said)
        record.said.clear()
