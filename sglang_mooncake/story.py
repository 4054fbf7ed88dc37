# SPDX-License-Identifier: Apache-2.0
"""Where the time of each request's hand-over went on this rank: a bounded record in memory, for
`sglang-mooncake explain`, metrics and traces. Pure: times are passed in.

A room's time on a rank is cut into stages. A stage ends when its mark is reached, and the next one
begins, so that the stages of a room add up to its time exactly.

* bootstrap: prefill: until every decode rank of the room has asked for its pages. Decode: until the
  rank is linked to every prefill rank of the room.
* queued: prefill: until the prompt is computed and SGLang's scheduler sends its last pages. Decode:
  until SGLang's scheduler has allocated pages.
* planned: prefill: until the GPU has filled the last pages and the rules have chosen their writes.
  Decode: until the request to the prefill ranks is made.
* posted: prefill alone: until the engine has taken the last write.
* landed: decode alone: until every page has arrived, and SGLang's scheduler has seen it.
* acknowledged: prefill: until every destination has acknowledged every write. Decode: until nothing
  more can land in the room's pages.

The time that a request spends in `planned`, `posted` and `acknowledged` on a prefill rank is what
`handover_ms` of the statistics file samples: from the last `send()` until all has landed.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.rooms.write_story import WriteStory, merged

__all__ = ["STAGES", "RoomStory", "Stories", "tell"]

#: In their order. A rank leaves out those that its role does not have.
STAGES: Final = ("bootstrap", "queued", "planned", "posted", "landed", "acknowledged")
#: The slowest rooms are kept longer than others.
SLOWEST: Final = 32


class RoomStory(msgspec.Struct, frozen=True):
    """What happened to one use of a room number on one rank.

    serial: rises with each room of the rank.
    began_s, over_s: in seconds of this host's monotonic clock; `over_s` is when the record was made
        if the room is still open.
    marks: when each stage ended; those that the room has not reached are left out.
    end: how the room ended (`RoomState`), or the state that it is in.
    reason: why it ended badly.
    nbytes: bytes of caches and state: of prefill, those that landed; of decode, those asked for
        that have arrived (0 until the room has).
    """

    room: int
    serial: int
    role: str
    rank: str
    began_s: float
    over_s: float
    marks: dict[str, float]
    end: str
    reason: str | None = None
    is_open: bool = False
    pages: int = 0
    nbytes: int = 0
    peers: tuple[str, ...] = ()
    writes: tuple[WriteStory, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.over_s - self.began_s

    def stages(self) -> dict[str, float]:
        """Seconds in each stage that the room has reached, in their order. They add up to
        `duration_s`: the time after the last mark belongs to the stage in which the room ended, or
        is now."""
        spent, at_s = {}, self.began_s
        for stage, mark_s in self.marks.items():
            spent[stage] = mark_s - at_s
            at_s = mark_s
        if at_s < self.over_s:
            stage = next((s for s in _of_role(self.role) if s not in self.marks), STAGES[-1])
            spent[stage] = spent.get(stage, 0.0) + self.over_s - at_s
        return spent


def _of_role(role: str) -> Iterable[str]:
    left_out = "landed" if role == "prefill" else "posted"
    return (stage for stage in STAGES if stage != left_out)


def tell(
    room: Room,
    role: str,
    rank: str,
    now_s: float,
    *,
    is_open: bool = False,
    writes: Sequence[WriteStory] = (),
) -> RoomStory:
    """The story of a room that is over, or of one that is open at `now_s`.

    A mark that was set before the one of an earlier stage (a decode rank may name pages before it
    knows that its links stand) counts as reached with that one.
    """
    view = room.view
    times = view.times
    known = {
        "bootstrap": times.met_s,
        "queued": times.named_s,
        "planned": times.planned_s,
        "posted": times.posted_s,
        "landed": times.landed_s,
        "acknowledged": now_s if view.state is RoomState.DONE else 0.0,
    }
    is_done = view.state is RoomState.DONE
    marks, at_s = {}, room.opened_s
    for stage in _of_role(role):
        if not known[stage] and not is_done:
            break
        # A rank that has no byte to send posts none, and is done all the same.
        at_s = marks[stage] = min(max(known[stage], at_s), now_s)
    return RoomStory(
        room.number,
        room.serial,
        role,
        rank,
        room.opened_s,
        max(now_s, at_s),
        marks,
        view.state.value,
        view.reason,
        is_open,
        view.num_pages,
        view.landed_nbytes,
        tuple(sorted({str(peer) for peer in view.peers} | {write.peer for write in writes})),
        merged(writes),
    )


class Stories:
    """The stories of rooms of one rank that are over: the latest, and the slowest of all. The loop
    thread adds, any thread asks.

    Args:
        rooms: how many ended ones are kept; 0 keeps none. One takes about 1 KiB, and 12 KiB with
            `WRITES_MAX` writes.
    """

    def __init__(self, rooms: int) -> None:
        self._rooms_max = rooms
        self._lock = threading.Lock()
        self._ended: OrderedDict[int, RoomStory] = OrderedDict()  # by serial, the oldest first
        self._slowest: list[tuple[float, int, RoomStory]] = []  # a heap
        self.count = 0

    def add(self, story: RoomStory) -> None:
        """A room is over."""
        with self._lock:
            self.count += 1
            if not self._rooms_max:
                return
            self._ended[story.serial] = story
            if len(self._ended) > self._rooms_max:
                self._ended.popitem(last=False)
            entry = story.duration_s, story.serial, story
            if len(self._slowest) < min(SLOWEST, self._rooms_max):
                heapq.heappush(self._slowest, entry)
            else:
                heapq.heappushpop(self._slowest, entry)

    def of_room(self, room: int) -> list[RoomStory]:
        """Every use of a room number that is kept, the latest last."""
        return [story for story in self._kept() if story.room == room]

    def last(self, count: int = 1) -> list[RoomStory]:
        """Those that have ended last, the latest last."""
        with self._lock:
            return list(self._ended.values())[-count:] if count > 0 else []

    def slowest(self, count: int) -> list[RoomStory]:
        """Of all rooms since the start, the slowest first."""
        with self._lock:
            return [story for _, _, story in sorted(self._slowest, reverse=True)[:count]]

    def oldest(self) -> RoomStory | None:
        """Of those that are kept in the order of their ends."""
        with self._lock:
            return next(iter(self._ended.values()), None)

    def _kept(self) -> list[RoomStory]:
        with self._lock:
            kept = {serial: story for _, serial, story in self._slowest} | self._ended
        return [kept[serial] for serial in sorted(kept)]
