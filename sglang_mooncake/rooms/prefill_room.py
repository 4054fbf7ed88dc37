# SPDX-License-Identifier: Apache-2.0
"""What the prefill side knows of one room, and for how long it waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang_mooncake.context import SettingNames
from sglang_mooncake.layout import Verify
from sglang_mooncake.messages import RoomAbort, RoomRequest
from sglang_mooncake.rooms.layers import EarlyLayers
from sglang_mooncake.rooms.prefill_events import ChunkSent, LayersFilled, Write
from sglang_mooncake.rooms.recipient import Recipient
from sglang_mooncake.rooms.room import Record
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.rooms.write_story import WRITES_MAX, WriteStory, merged

__all__ = [
    "ABORT_GRACE_S",
    "MISDIRECTED_S",
    "Deadlines",
    "PrefillRoom",
    "Said",
    "abort_of_nobody_else",
    "gpu_hangs",
    "leads_elsewhere",
    "overdue",
    "peer_gave_up",
    "undigested",
]

#: A decode rank that knows the right address links to this rank in a fraction of it, and a client
#: shall have its answer within 3 s.
MISDIRECTED_S = 2.0
#: An abort whose request never came is of the room's present use or of a former one. The request of
#: the present use decides; it comes within milliseconds, or, if this was its abort, never.
ABORT_GRACE_S = 2.0


@dataclass(slots=True, eq=False)
class Said:
    """What the scheduler has said at `since_s`. awaits_gpu: whether its events have yet to
    happen."""

    event: ChunkSent | LayersFilled
    since_s: float
    awaits_gpu: bool


@dataclass(slots=True, eq=False)
class PrefillRoom(Record):
    """
    recipients: the peers that have asked.
    waiting: peers that will ask once the prompt is computed; with which generation.
    misdirected: why no decode rank may ever find to this rank.
    aborts: by peers that have not asked; since when.
    said: what the scheduler has said and what waits, in its order. The first waits for the GPU, or
        until no early write is under way; the others wait for the first.
    writes: those under way, by `Write.key`.
    digesting: for which peers digests are being made, of pages that must stay what they are, and
        how much is digested.
    stories: of writes that have ended.
    next_page: where the next chunk must begin.
    moved_s: when its decode ranks had asked, or the scheduler said the latest of its pages.
    """

    recipients: dict[str, Recipient] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    computed_s: float | None = None
    misdirected: str | None = None
    aborts: dict[str, tuple[RoomAbort, float]] = field(default_factory=dict)
    said: deque[Said] = field(default_factory=deque)
    writes: dict[tuple[str, int], Write] = field(default_factory=dict)
    digesting: dict[str, Verify] = field(default_factory=dict)
    stories: list[WriteStory] = field(default_factory=list)
    next_page: int = 0
    moved_s: float = 0.0
    early: EarlyLayers = field(default_factory=EarlyLayers)

    @property
    def requests(self) -> list[RoomRequest]:
        return [one.request for one in self.recipients.values()]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads its pages."""
        return not self.writes and not self.digesting

    @property
    def writes_early(self) -> bool:
        """Whether a write of layers is under way that began before its chunk was sent."""
        return any(write.early for write in self.writes.values())

    def tell(self, story: WriteStory) -> None:
        """Keeps what is told of a write that has ended; no more of them than `merged` leaves."""
        self.stories.append(story)
        if len(self.stories) > 2 * WRITES_MAX:
            self.stories[:] = merged(self.stories)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """See `PrefillRooms`."""

    bootstrap_s: float
    chunk_s: float
    computed_first: bool
    names: SettingNames

    @property
    def gpu_s(self) -> float:
        """For what the scheduler has said to be filled on the GPU."""
        return self.chunk_s / 2

    @property
    def digest_s(self) -> float:
        """For digests, from the last chunk on. Decode ranks wait twice as long: one of a sample
        arrives without them."""
        return self.chunk_s / 4


def overdue(record: PrefillRoom, deadlines: Deadlines, now_s: float) -> str | None:
    """Why a room has waited for too long; None if it has not."""
    match record.view.state:
        case RoomState.OPEN:
            since_s = record.computed_s if deadlines.computed_first else record.room.opened_s
            waited_s = 0.0 if since_s is None else now_s - since_s
            if waited_s >= deadlines.bootstrap_s:
                return (
                    f"{_who_asked(record)} for room {record.room.number} within {waited_s:.0f} s "
                    f"({deadlines.names.bootstrap})"
                )
        case RoomState.READY | RoomState.SENDING:
            waited_s = now_s - record.moved_s
            if waited_s >= deadlines.chunk_s:
                return (
                    f"the scheduler sent nothing after page {record.next_page} of room "
                    f"{record.room.number} for {waited_s:.0f} s "
                    f"(twice {deadlines.names.waiting})"
                )
    return None


def leads_elsewhere(record: PrefillRoom, is_linked: bool, now_s: float) -> str | None:
    """Why no decode rank finds to this room. Once one has found this rank (`is_linked`), all can:
    then the address was right after all."""
    if record.misdirected is None or now_s - record.room.opened_s < MISDIRECTED_S:
        return None
    reason, record.misdirected = record.misdirected, None
    return reason if record.view.state is RoomState.OPEN and not is_linked else None


def gpu_hangs(record: PrefillRoom, deadlines: Deadlines, now_s: float) -> str | None:
    """Why what the scheduler has said waits for the GPU no more; None if it does, or must not."""
    if not record.said or not record.said[0].awaits_gpu:
        return None
    waited_s = now_s - record.said[0].since_s
    if waited_s < deadlines.gpu_s:
        return None
    return (
        f"the GPU did not fill the pages that were sent for room {record.room.number} within "
        f"{waited_s:.0f} s ({deadlines.names.waiting})"
    )


def undigested(record: PrefillRoom, deadlines: Deadlines, now_s: float) -> str | None:
    """Why digests of a room are waited for no more; None if they are, or there are none."""
    waited_s = now_s - record.moved_s
    if not record.digesting or waited_s < deadlines.digest_s:
        return None
    return (
        f"not made within {waited_s:.0f} s (half of {deadlines.names.waiting}): the thread that "
        "makes digests is behind, hangs or has ended"
    )


def abort_of_nobody_else(record: PrefillRoom, now_s: float) -> RoomAbort | None:
    """The abort that ends an open room, because no request has shown that it was of another use."""
    if record.view.state is not RoomState.OPEN:
        return None
    old = (abort for abort, since_s in record.aborts.values() if now_s - since_s >= ABORT_GRACE_S)
    return next(old, None)


def peer_gave_up(message: RoomAbort) -> str:
    return f"the decode server ended the request: {message.reason}"


def _who_asked(record: PrefillRoom) -> str:
    requests = record.requests
    if not requests:
        return "no decode rank asked"
    return f"{len(requests)} of {requests[0].destinations} decode ranks asked"
