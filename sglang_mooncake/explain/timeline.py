# SPDX-License-Identifier: Apache-2.0
"""From what the ranks tell to one timeline of a request. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sglang_mooncake.explain.questions import RankStories
from sglang_mooncake.story import STAGES, RoomStory

__all__ = ["ARRIVAL", "Lane", "Timeline", "longest", "timelines", "verdict"]

#: What a rank cannot tell itself: the time from the moment at which the first rank had the request
#: until this one had it.
ARRIVAL: Final = "arrival"

#: Uses of one room number that lie further apart than this are different requests, when they do not
#: overlap: SGLang's routers draw room numbers at random, but tests and clients may repeat them.
APART_S: Final = 1.0

_PORT: Final = re.compile(r"(?<= at )(?:\[(?P<v6>[^\]]+)\]|(?P<v4>[^:\[\]]+)):\d+$")

_ADVICE: Final = {
    ("prefill", ARRIVAL): (
        "A decode rank had the request, and this prefill rank did not have it yet. Look at the"
        " router, at the tokenizer of the prefill server, and at long forwards: its scheduler takes"
        " new requests between two of them."
    ),
    ("decode", ARRIVAL): (
        "Another rank had the request, and this decode rank did not have it yet. Look at the"
        " router, at the tokenizer of the decode server, and at a busy scheduler there."
    ),
    ("prefill", "bootstrap"): (
        "The prefill rank waited for the decode ranks to ask for the request's pages. Look at the"
        " decode ranks: their queue (no free KV pages?), their links, or a router that reached the"
        " decode server late."
    ),
    ("prefill", "queued"): (
        "The request waited in SGLang's scheduler or was being computed. This is prefill time, not"
        " transfer time: look at SGLang's queue metrics, the chunk size and the prompt's length."
    ),
    ("prefill", "planned"): (
        "The last pages were sent to the hand-over, and it waited for the GPU to fill them or for"
        " its control thread. Look at overlap scheduling and at a busy interpreter."
    ),
    ("prefill", "posted"): (
        "The transfer engine took long to accept the writes: the rank has too many transfers under"
        " way, or the planning of very many small blocks took long (different TP sizes?)."
    ),
    ("prefill", "acknowledged"): (
        "The bytes were on their way. Compare the rate of the writes with `te bench` and the"
        " transport with the one that you expect; `te doctor --peer` measures each pair of rails."
    ),
    ("decode", "bootstrap"): (
        "The decode rank was connecting to the prefill ranks: the registry's answer, the control"
        " links and the data connections. This is long for the first request to a server only."
    ),
    ("decode", "queued"): (
        "SGLang's decode scheduler had no free KV pages or request slots for the request. Look at"
        " the KV pool's usage on the decode server."
    ),
    ("decode", "planned"): "The control thread of the decode rank was busy. Look at its CPU usage.",
    ("decode", "landed"): (
        "The decode rank had asked and waited for the KV cache: prefill's queue, its forward and"
        " the transfer. Ask the hosts of the prefill ranks, too (--on): their lanes say which."
    ),
    ("decode", "acknowledged"): (
        "Closing the request's tags took long: a write was still under way when the request ended."
    ),
}


@dataclass(frozen=True, slots=True)
class Lane:
    """One rank's part in a request. Times are seconds since the timeline began."""

    rank: str
    role: str
    host: str
    story: RoomStory
    began_s: float
    #: From this rank's monotonic clock to the timeline.
    offset_s: float

    @property
    def spans(self) -> list[tuple[str, float, float]]:
        """Stage, begin and length, in their order; before them the time until the rank had the
        request, unless it was the first to have it."""
        found, at_s = [], self.began_s
        if self.began_s > 0:
            found.append((ARRIVAL, 0.0, self.began_s))
        for stage, spent_s in self.story.stages().items():
            found.append((stage, at_s, spent_s))
            at_s += spent_s
        return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request. `is_one_clock`: all ranks share a clock; otherwise lanes of different hosts are
    aligned by their wall clocks, and are as exact as those are synchronised."""

    room: int
    lanes: tuple[Lane, ...]
    duration_s: float
    is_one_clock: bool

    @property
    def problem(self) -> str | None:
        """Why the request failed; None if it did not."""
        return next((lane.story.reason for lane in self.lanes if lane.story.reason), None)

    @property
    def absent(self) -> tuple[str, ...]:
        """Ranks that took part, as the others say, and have not told."""
        told = {lane.rank for lane in self.lanes}
        named = {_without_port(peer) for lane in self.lanes for peer in lane.story.peers}
        return tuple(sorted(named - told))


def timelines(told: Sequence[RankStories]) -> list[Timeline]:
    """One for each use of a room number, the latest last; decode ranks stand before prefill ranks.

    The beginnings are put on one axis: by the monotonic clock for ranks of one boot of one host,
    else by the wall clock.
    """
    placed = [
        (story.began_s + answer.wall_s - answer.monotonic_s, answer, story)
        for answer in _on_one_wall(told)
        for story in answer.stories
    ]
    uses: list[list[tuple[float, RankStories, RoomStory]]] = []
    for one in sorted(placed, key=lambda one: (one[2].room, one[0])):
        if uses and _same_use(uses[-1], one):
            uses[-1].append(one)
        else:
            uses.append([one])
    return [line for _, line in sorted(map(_timeline, uses), key=lambda one: one[0])]


def _on_one_wall(told: Sequence[RankStories]) -> Iterable[RankStories]:
    """Ranks that share a clock get the same wall clock, too: they read it at different moments, and
    it may have been set in between."""
    walls: dict[str, float] = {}
    for one in told:
        wall_s = walls.setdefault(one.boot_id, one.wall_s - one.monotonic_s)
        yield msgspec.structs.replace(one, wall_s=wall_s, monotonic_s=0.0)


def _same_use(
    use: Sequence[tuple[float, RankStories, RoomStory]],
    one: tuple[float, RankStories, RoomStory],
) -> bool:
    began_s, answer, story = one
    ranks = {(other.rank, other.pid) for _, other, _ in use}
    ends_s = max(begin_s + other.duration_s for begin_s, _, other in use)
    return (
        story.room == use[0][2].room
        and (answer.rank, answer.pid) not in ranks
        and began_s <= ends_s + APART_S
    )


def _timeline(use: Sequence[tuple[float, RankStories, RoomStory]]) -> tuple[float, Timeline]:
    zero_s = min(began_s for began_s, _, _ in use)
    lanes = [
        Lane(
            answer.rank,
            answer.role,
            answer.host,
            story,
            began_s - zero_s,
            began_s - zero_s - story.began_s,
        )
        for began_s, answer, story in use
    ]
    lanes.sort(key=lambda lane: (lane.role, lane.rank))
    duration_s = max(lane.began_s + lane.story.duration_s for lane in lanes)
    is_one_clock = len({answer.boot_id for _, answer, _ in use}) == 1
    return zero_s, Timeline(use[0][2].room, tuple(lanes), duration_s, is_one_clock)


def _without_port(peer: str) -> str:
    """A rank's name: its peers may name the port, too, at which they reach it."""
    return _PORT.sub(lambda found: found["v6"] or found["v4"], peer)


def longest(lane: Lane) -> tuple[str, float]:
    """The stage in which the request spent most of its time on this rank, or on its way to it, and
    how long that was. Of equal ones the first."""
    return max(
        ((stage, spent_s) for stage, _, spent_s in lane.spans),
        key=lambda one: one[1],
        default=(STAGES[0], 0.0),
    )


def verdict(line: Timeline) -> tuple[Lane, str, float, str]:
    """The lane and stage in which most of the time went, how long that was, and where to look.

    A decode rank that has asked waits for the prefill ranks: where those took part, they say why.
    """
    ranked = sorted(line.lanes, key=lambda lane: longest(lane)[1], reverse=True)
    waited_for = [lane for lane in ranked if lane.role == "prefill"]
    lane = ranked[0]
    if (lane.role, longest(lane)[0]) == ("decode", "landed") and waited_for:
        lane = waited_for[0]
    stage, spent_s = longest(lane)
    where_to_look = _ADVICE[lane.role, stage]
    if stage == ARRIVAL and not line.is_one_clock:
        where_to_look += " Or the clocks of the hosts differ: synchronise them (NTP, PTP)."
    return lane, stage, spent_s, where_to_look
