# SPDX-License-Identifier: Apache-2.0
"""What a trace shows of one request's hand-over on one rank: a span, with a span below it for each
stage and an event for each write. Pure; `sglang/tracing.py` hands them to OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.rooms.write_story import WriteStory
from sglang_mooncake.story import RoomStory

__all__ = ["LEVEL_STAGES", "LEVEL_WRITES", "Event", "Span", "span"]

#: Of what OpenTelemetry takes as the value of an attribute.
Value: TypeAlias = str | int | float | bool | tuple[str, ...]

_PREFIX: Final = "sglang_mooncake."
_NAMES: Final = {"prefill": "send KV cache", "decode": "receive KV cache"}
#: Somebody asked for these ends, and an operator need not look for a cause.
_NO_ERRORS: Final = frozenset(
    {RoomState.DONE.value, RoomState.ABORTED.value, RoomState.SUPERSEDED.value}
)
#: Of SGLang's trace level: from which one on there is more than the hand-over's own span.
LEVEL_STAGES: Final = 2
LEVEL_WRITES: Final = 3


@dataclass(frozen=True, slots=True)
class Event:
    """at_ns: nanoseconds since the Unix epoch."""

    name: str
    at_ns: int
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """began_ns, ended_ns: nanoseconds since the Unix epoch.
    error: why it failed, None if it did not.
    """

    name: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Value]
    error: str | None = None
    events: tuple[Event, ...] = ()
    children: tuple[Span, ...] = ()


def span(story: RoomStory, epoch_ns: int, level: int) -> Span:
    """The span of a room that is over.

    Args:
        epoch_ns: what this host's wall clock showed, in nanoseconds since the Unix epoch, when its
            monotonic clock was 0.
        level: SGLang's trace level of the request. 1: the hand-over alone; 2: with its stages;
            3: with its writes.
    """

    def wall_ns(at_s: float) -> int:
        return epoch_ns + round(at_s * 1e9)

    failed = story.end not in _NO_ERRORS
    error = (story.reason or story.end) if failed else None
    return Span(
        _NAMES[story.role],
        wall_ns(story.began_s),
        wall_ns(story.over_s),
        _attributes(story) | ({"error.type": story.end} if failed else {}),
        error,
        tuple(_write(one, wall_ns) for one in story.writes) if level >= LEVEL_WRITES else (),
        tuple(_stages(story, error, wall_ns)) if level >= LEVEL_STAGES else (),
    )


def _attributes(story: RoomStory) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        # As SGLang writes it on its own spans, so that one search finds both.
        "bootstrap_room": hex(story.room),
        # As `sglang-mooncake explain` takes it; a number of 64 bits without a sign fits no integer
        # of OpenTelemetry.
        _PREFIX + "room": str(story.room),
        _PREFIX + "rank": story.rank,
        _PREFIX + "outcome": story.end,
        _PREFIX + "pages": story.pages,
        _PREFIX + "bytes": story.nbytes,
        _PREFIX + "peers": story.peers,
    }
    if story.writes:
        transports = sorted({one.transport for one in story.writes if one.transport})
        attributes[_PREFIX + "transports"] = tuple(transports)
    if story.reason:
        attributes[_PREFIX + "reason"] = story.reason
    return attributes


def _stages(story: RoomStory, error: str | None, wall_ns: Callable[[float], int]) -> Iterator[Span]:
    """One after the other, from the room's beginning to its end. The last one of a room that failed
    is the one that it failed in."""
    at_s, spent = story.began_s, list(story.stages().items())
    for i, (stage, spent_s) in enumerate(spent):
        is_last = i == len(spent) - 1
        # Sums of floats may be off by the last digit.
        ended_s = story.over_s if is_last else min(at_s + spent_s, story.over_s)
        yield Span(stage, wall_ns(at_s), wall_ns(ended_s), {}, error if is_last else None)
        at_s = ended_s


def _write(write: WriteStory, wall_ns: Callable[[float], int]) -> Event:
    """Of several writes that the story merged, one event: `writes` says how many they are. What is
    ordinary is left out."""
    attributes: dict[str, Value] = {
        _PREFIX + "peer": write.peer,
        _PREFIX + "transport": write.transport,
        _PREFIX + "bytes": write.nbytes,
        _PREFIX + "pages": write.pages,
        _PREFIX + "seconds": write.ended_s - write.began_s,
    }
    if write.early:
        attributes[_PREFIX + "early"] = True
    if write.count > 1:
        attributes[_PREFIX + "writes"] = write.count
    if write.failed:
        attributes[_PREFIX + "failed_writes"] = write.failed
    name = "write failed" if write.failed else "write landed"
    return Event(name, wall_ns(write.ended_s), attributes)
