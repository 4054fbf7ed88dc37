# SPDX-License-Identifier: Apache-2.0
"""What is told of the writes of a room once they have ended (`story.py`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

__all__ = ["SEVERAL", "WRITES_MAX", "WriteStory", "merged"]

#: Writes that the story of one room names one by one; those before the last ones are merged.
WRITES_MAX: Final = 64
#: The peer of writes that were merged without regard to where they went.
SEVERAL: Final = "several decode ranks"


class WriteStory(msgspec.Struct, frozen=True):
    """One write of a prefill rank, or several that were merged.

    peer: the decode rank that it went to.
    transport: as in `te.Config.transports`.
    began_s, ended_s: when the engine took it, and when its outcome was known (of several: the first
        and the last), in seconds of this host's monotonic clock.
    nbytes, blocks, pages: of all of them; `failed`: how many of them failed.
    early: it left while the forward was still running (layer by layer).
    """

    peer: str
    transport: str
    began_s: float
    ended_s: float
    nbytes: int
    blocks: int
    pages: int
    early: bool = False
    failed: int = 0
    count: int = 1


def merged(writes: Sequence[WriteStory]) -> tuple[WriteStory, ...]:
    """At most `WRITES_MAX` writes: the first ones become one for each peer, transport and kind, and
    one for all others where these are too many."""
    if len(writes) <= WRITES_MAX:
        return tuple(writes)
    rest = writes[-(WRITES_MAX // 2) :]
    groups: dict[tuple[str, str, bool], WriteStory] = {}
    for write in writes[: -len(rest)]:
        key = write.peer, write.transport, write.early
        if key not in groups and len(groups) >= WRITES_MAX - len(rest) - 1:
            key = SEVERAL, "", False
        former = groups.get(key)
        groups[key] = write if former is None else _joined(former, write)
    return (*groups.values(), *rest)


def _joined(one: WriteStory, other: WriteStory) -> WriteStory:
    return WriteStory(
        one.peer if one.peer == other.peer else SEVERAL,
        one.transport if one.transport == other.transport else "several",
        min(one.began_s, other.began_s),
        max(one.ended_s, other.ended_s),
        one.nbytes + other.nbytes,
        one.blocks + other.blocks,
        one.pages + other.pages,
        one.early,
        one.failed + other.failed,
        one.count + other.count,
    )
