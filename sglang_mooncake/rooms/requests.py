# SPDX-License-Identifier: Apache-2.0
"""What decode ranks say of rooms: that they will ask, ask, give up, or are lost."""

from __future__ import annotations

from collections.abc import Callable

from sglang_mooncake.messages import RoomAbort, RoomComputed, RoomFailed, RoomRequest, RoomWait
from sglang_mooncake.rooms.checks import disagreement
from sglang_mooncake.rooms.early import Early, EarlyRooms
from sglang_mooncake.rooms.prefill_events import Instruction, Met, Tell
from sglang_mooncake.rooms.prefill_room import PrefillRoom, peer_gave_up
from sglang_mooncake.rooms.prefill_table import PrefillTable
from sglang_mooncake.rooms.recipient import PairPlan, Recipient
from sglang_mooncake.rooms.states import RoomState, Step

__all__ = ["ANSWERED_MAX", "Requests"]

#: Requests that were met or refused are remembered, so that what is said of them late ends no later
#: use of the same room number.
ANSWERED_MAX = 65_536


class Requests:
    """
    Args:
        plan_of: the plan of the copy to a peer that has asked; raises LookupError.
        timeout_s: how long what is said of a room that is not open is kept; `timeout_name` is the
            setting, for sentences.
    """

    def __init__(
        self,
        table: PrefillTable,
        plan_of: Callable[[str], PairPlan],
        timeout_s: float,
        timeout_name: str,
    ) -> None:
        self._table, self._plan_of = table, plan_of
        self._early = EarlyRooms(timeout_s, timeout_name)
        self._answered: dict[tuple[str, int], int] = {}  # (peer, room number) → newest generation

    def opened(self, number: int, now_s: float) -> list[Instruction]:
        """A room has opened: what was said of its number before is now said of it."""
        instructions: list[Instruction] = []
        for early in self._early.take(number):
            match early.message:
                case RoomRequest():
                    instructions += self.request(early.peer, early.message, now_s)
                case RoomWait():
                    instructions += self.wait(early.peer, early.message, now_s)
                case RoomAbort():
                    instructions += self.abort(early.peer, early.message, now_s)
        return instructions

    def wait(self, peer: str, wait: RoomWait, now_s: float) -> list[Instruction]:
        """A decode rank will ask once the prompt is computed."""
        if self._is_answered(peer, wait):
            return []
        record = self._table.newest(wait.room)
        if record is None or record.view.state is not RoomState.OPEN or peer in record.recipients:
            return self._too_late(peer, wait) or self._too_early(peer, wait, now_s)
        abort, _ = record.aborts.pop(peer, (None, 0.0))
        if abort is not None and abort.generation >= wait.generation:
            return self._table.end(record, RoomState.ABORTED, peer_gave_up(abort))
        record.waiting[peer] = wait.generation
        if record.computed_s is None:
            return []
        return [Tell(peer, RoomComputed(wait.room, wait.generation))]

    def request(self, peer: str, request: RoomRequest, now_s: float) -> list[Instruction]:
        """A decode rank asks."""
        if self._is_answered(peer, request):
            return []
        record = self._table.newest(request.room)
        is_open = record is not None and record.view.state is RoomState.OPEN
        if record is not None and is_open and peer not in record.recipients:
            return self._meet(record, peer, request, now_s)
        return self._too_late(peer, request) or self._too_early(peer, request, now_s)

    def abort(self, peer: str, message: RoomAbort, now_s: float) -> list[Instruction]:
        """A decode rank has given up."""
        record = self._table.newest(message.room)
        recipient = record.recipients.get(peer) if record is not None else None
        if (
            record is not None
            and recipient is not None
            and recipient.request.generation == message.generation
        ):
            del record.recipients[peer]  # it knows: no need to tell it
            return self._table.end(record, RoomState.ABORTED, peer_gave_up(message))
        if record is not None and record.waiting.get(peer) == message.generation:
            del record.waiting[peer]
            return self._table.end(record, RoomState.ABORTED, peer_gave_up(message))
        # A rank that gave up before it named its pages says 0: that can be of no former use which
        # had been asked for.
        if message.generation > 0 and self._is_answered(peer, message):
            return []
        if record is not None and recipient is None and record.view.state is RoomState.OPEN:
            if message.refused and not (record.recipients or record.waiting):
                return self._table.end(record, RoomState.ABORTED, peer_gave_up(message))
            record.aborts[peer] = message, now_s
            return []
        self._early.abort(peer, message, now_s)
        return self._refuse(self._early.crowd(peer))

    def lost(self, peer: str, reason: str, now_s: float) -> list[Instruction]:
        """Nothing can be written to a decode rank any more."""
        self._early.lose(peer, reason, now_s)
        instructions: list[Instruction] = []
        for record in self._table:
            waited = record.waiting.pop(peer, None) is not None
            if record.recipients.pop(peer, None) is not None or waited:
                instructions += self._table.end(record, RoomState.FAILED, reason)
        return instructions

    def tick(self, now_s: float) -> list[Instruction]:
        """Refuses those whose rooms did not open in time."""
        return self._refuse(self._early.overdue(now_s))

    def _meet(
        self, record: PrefillRoom, peer: str, request: RoomRequest, now_s: float
    ) -> list[Instruction]:
        self._remember(peer, request)
        record.waiting.pop(peer, None)
        abort, _ = record.aborts.pop(peer, (None, 0.0))
        if abort is not None and abort.generation >= request.generation:
            return self._table.end(record, RoomState.ABORTED, peer_gave_up(abort))
        record.recipients[peer] = Recipient(request, self._plan_of(peer))
        if problem := disagreement(record.requests):
            return self._table.end(record, RoomState.FAILED, problem)
        if len(record.recipients) < request.destinations:
            return []
        record.moved_s = now_s
        views = self._table.views
        views.mark(record, met_s=now_s)
        views.advance(record, Step.MET, decode_prefix_len=request.decode_prefix_len)
        return [Met(record.room)]

    def _too_late(self, peer: str, request: RoomRequest | RoomWait) -> list[Instruction]:
        """What is said of a room that has ended badly; nothing if it has not."""
        ended = self._table.why_ended(request.room)
        if ended is None:
            return []
        self._remember(peer, request)
        return [Tell(peer, RoomFailed(request.room, request.generation, ended))]

    def _too_early(
        self, peer: str, request: RoomRequest | RoomWait, now_s: float
    ) -> list[Instruction]:
        self._early.request(peer, request, now_s)
        return self._refuse(self._early.crowd(peer))

    def _refuse(self, overdue: list[tuple[Early, str]]) -> list[Instruction]:
        instructions: list[Instruction] = []
        for early, reason in overdue:
            request = early.message
            if not isinstance(request, RoomAbort):
                self._remember(early.peer, request)
                failed = RoomFailed(request.room, request.generation, reason)
                instructions.append(Tell(early.peer, failed))
        return instructions

    def _is_answered(self, peer: str, message: RoomRequest | RoomWait | RoomAbort) -> bool:
        """Whether a message repeats what was answered, or speaks of a use before that."""
        return message.generation <= self._answered.get((peer, message.room), -1)

    def _remember(self, peer: str, request: RoomRequest | RoomWait) -> None:
        key = peer, request.room
        self._answered.pop(key, None)
        self._answered[key] = request.generation
        if len(self._answered) > ANSWERED_MAX:
            del self._answered[next(iter(self._answered))]
