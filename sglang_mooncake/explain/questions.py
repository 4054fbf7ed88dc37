# SPDX-License-Identifier: Apache-2.0
"""What a rank answers over its engine's status socket (`te.status`) about its rooms."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from sglang_mooncake.context import RankContext
from sglang_mooncake.refused import RefusedServer
from sglang_mooncake.stats import Recorder
from sglang_mooncake.story import RoomStory, tell
from te.errors import StatusSocketError
from te.status import Answer

__all__ = ["COUNT_MAX", "RankStories", "answers"]

#: Stories in one answer: 64 with all the writes that they may have are below 1 MiB.
COUNT_MAX: Final = 64
#: Servers that refuse a rank, in one answer.
REFUSED_TOLD_MAX: Final = 16


class RankStories(msgspec.Struct, frozen=True):
    """The answer of one rank.

    host, boot_id: of the machine; monotonic clocks with one boot id are one clock.
    wall_s, monotonic_s: both clocks, read together.
    ended: rooms that have ended since the rank started.
    oldest_s: when the oldest room began that is kept in the order of their ends; None if none is.
    refused: of a decode rank, the prefill servers with which it shares no request now.
    """

    rank: str
    role: str
    pid: int
    host: str
    boot_id: str
    wall_s: float
    monotonic_s: float
    ended: int
    oldest_s: float | None
    stories: tuple[RoomStory, ...]
    refused: tuple[RefusedServer, ...] = ()


def answers(recorder: Recorder, context: RankContext) -> dict[str, Answer]:
    """By question: "room" (with `room`), "last" and "slowest" (with `count`)."""
    stories = recorder.stories

    def answer(choose: Callable[[Mapping[str, Any]], list[RoomStory]]) -> Answer:
        return lambda arguments: _told(recorder, context, choose(arguments))

    def of_room(arguments: Mapping[str, Any]) -> list[RoomStory]:
        room = _number(arguments, "room")
        return [*stories.of_room(room), *_open(recorder, context, room)][-COUNT_MAX:]

    return {
        "room": answer(of_room),
        "last": answer(lambda arguments: stories.last(_count(arguments))),
        "slowest": answer(lambda arguments: stories.slowest(_count(arguments))),
    }


def _told(recorder: Recorder, context: RankContext, found: list[RoomStory]) -> RankStories:
    stories, refused = recorder.stories, recorder.refused
    oldest = stories.oldest()
    return RankStories(
        context.name,
        context.role,
        os.getpid(),
        context.host,
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        time.time(),
        time.monotonic(),
        stories.count,
        None if oldest is None else oldest.began_s,
        tuple(found),
        () if refused is None else refused()[:REFUSED_TOLD_MAX],
    )


def _open(recorder: Recorder, context: RankContext, number: int) -> list[RoomStory]:
    """Uses of the number that are not over."""
    now_s = time.monotonic()
    rooms = [one for one in recorder.open_rooms() if one.number == number and not one.view.over]
    return [tell(room, context.role, context.name, now_s, is_open=True) for room in rooms]


def _count(arguments: Mapping[str, Any]) -> int:
    count = _number(arguments, "count")
    if not 1 <= count <= COUNT_MAX:
        raise StatusSocketError(f"count is {count}; a rank tells of 1 to {COUNT_MAX} rooms at once")
    return count


def _number(arguments: Mapping[str, Any], name: str) -> int:
    value = arguments.get(name)
    if not isinstance(value, int):
        raise StatusSocketError(f"{name} is {value!r}, and must be a whole number")
    return value
