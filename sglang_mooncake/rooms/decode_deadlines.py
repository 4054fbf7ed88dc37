# SPDX-License-Identifier: Apache-2.0
"""Which deadline a room of a decode rank has missed, and whom it has waited for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from sglang_mooncake.context import SettingNames
from sglang_mooncake.rooms.decode_table import DecodeRoom
from sglang_mooncake.rooms.states import RoomState

__all__ = ["DecodeDeadlines", "overdue"]

#: The scheduler may keep a request waiting for free memory much longer than any other deadline
#: allows; this one only ends what it has forgotten.
READY_S = 3_600.0
#: Of prefill ranks that a sentence names.
NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class DecodeDeadlines:
    """`bootstrap_s`: until the prefill ranks are known; `ready_s`: until the scheduler names pages;
    `waiting_s`: until the prompt is computed (where that is waited for), and until the KV has
    arrived."""

    bootstrap_s: float
    waiting_s: float
    ready_s: float = READY_S


def overdue(
    record: DecodeRoom, deadlines: DecodeDeadlines, names: SettingNames, now_s: float
) -> str | None:
    """Which deadline the room has missed; None when it has not."""
    state = record.view.state
    since_s = record.room.opened_s if state is RoomState.OPEN else record.since_s
    limit_s = _limit_s(state, deadlines)
    if limit_s is None or now_s - since_s < limit_s:
        return None
    within = f"within {now_s - since_s:.0f} s"
    match state:
        case RoomState.OPEN:
            who = _named(record, record.unlinked)
            return f"could not connect to {who} {within} ({names.bootstrap})"
        case RoomState.COMPUTING:
            who = _named(record, record.computing)
            return f"{who} did not compute the prompt {within} ({names.waiting})"
        case RoomState.REQUESTED:
            who = _named(record, {one.link for one in record.sources if one.sends})
            return f"the KV cache did not arrive from {who} {within} ({names.waiting})"
    return f"the decode server's scheduler allocated no pages for the request {within}"


def _limit_s(state: RoomState, deadlines: DecodeDeadlines) -> float | None:
    match state:
        case RoomState.OPEN:
            return deadlines.bootstrap_s
        case RoomState.COMPUTING | RoomState.REQUESTED:
            return deadlines.waiting_s
        case RoomState.READY:
            return deadlines.ready_s
    return None


def _named(record: DecodeRoom, links: Collection[Hashable]) -> str:
    """Of the room's sources those with these links, in their order."""
    names = [str(one) for one in dict.fromkeys(one.link for one in record.sources) if one in links]
    if not names:
        registry = record.room.registry
        return f"the prefill ranks of {registry}" if registry else "the prefill ranks"
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
