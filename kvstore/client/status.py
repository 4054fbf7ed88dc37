# SPDX-License-Identifier: Apache-2.0
"""How a process's part of the store is, as it answers to programs that ask (``te.status``), and as
text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvstore.client.load_times import AdmissionCounts
from kvstore.owner.card import OwnerStats
from te.printable import printable

__all__ = ["QUESTION", "OwnerSeen", "StoreStatus", "lines", "status_of", "with_owner"]

QUESTION: Final = "store"
"""What an engine's status socket answers."""


class OwnerSeen(msgspec.Struct, frozen=True):
    """Another owner, as this process knows it."""

    name: str
    #: Objects that it is said to hold.
    objects: int
    usable: bool
    #: At which this process reads from it; 0.0 while that is not known.
    bytes_per_s: float = 0.0


class StoreStatus(msgspec.Struct, frozen=True):
    """The answer to ``QUESTION``."""

    pid: int
    process: str
    #: Bytes of memory that it lends; 0 for none.
    memory: int
    #: What lies there; None if it lends none.
    own: OwnerStats | None
    owners: tuple[OwnerSeen, ...]
    #: How often each outcome of gets, puts and look-ups has come, by object.
    gets: dict[str, int]
    puts: dict[str, int]
    lookups: dict[str, int]
    #: Bytes of objects that came right, and that were stored.
    bytes_got: int
    bytes_put: int
    #: Of the table of what owners hold.
    table_bytes: int
    #: What of the objects that were found was worth loading.
    admission: AdmissionCounts = AdmissionCounts()
    #: What the application calls its engine (``te.Config.label``).
    label: str = ""


def status_of(answer: Mapping[str, Any]) -> StoreStatus:
    """From what ``te.status.ask`` returns; ``msgspec.ValidationError``."""
    return msgspec.convert(answer, StoreStatus)


def with_owner(mine: StoreStatus, host: StoreStatus, own: OwnerStats | None) -> StoreStatus:
    """For a monitoring system: how a process's part is that uses its host's owner, with the owners
    that this one knows. ``own``: what this process tells of what that one holds and has done; None
    if another process tells it."""
    held = 0 if host.own is None else host.own.objects
    owners = tuple(msgspec.structs.replace(one, objects=held) for one in mine.owners)
    mine = msgspec.structs.replace(mine, owners=owners + host.owners)
    if own is None:
        return mine
    return msgspec.structs.replace(mine, memory=host.memory, own=own, table_bytes=host.table_bytes)


def lines(statuses: Sequence[StoreStatus], most: int | None = None) -> list[str]:
    """A line for each process, below a heading.

    Args:
        most: how many processes are shown: those that have stored and loaded the most bytes; the
            last line says how many are not. None: all.
    """
    shown = list(statuses)
    if most is not None and len(shown) > most:
        shown = sorted(shown, key=lambda one: -(one.bytes_got + one.bytes_put))[:most]
    more = len(statuses) - len(shown)
    rest = [f"… {more} more processes; --all shows them"] if more else []
    return _table(shown) + rest


def _table(statuses: Sequence[StoreStatus]) -> list[str]:
    heading = [
        "PID",
        "LENDS",
        "OBJECTS",
        "EVICTED",
        "PINNED",
        "LOWER",
        "PROMOTED",
        "DROPPED",
        "OWNERS",
        "HITS",
        "REJECTED",
        "LOST",
        "DECLINED",
        "UNPAID",
        "PROCESS",
    ]
    rows: list[Sequence[str]] = [heading, *map(_row, statuses)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heading) - 1)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        + f"  {row[-1]}"
        for row in rows
    ]


def _row(one: StoreStatus) -> tuple[str, ...]:
    found, asked = one.lookups.get("found", 0), sum(one.lookups.values())
    lost = sum(one.gets.values()) - one.gets.get("right", 0)
    return (
        str(one.pid),
        _bytes(one.memory) if one.memory else "-",
        str(one.own.objects) if one.own else "-",
        str(one.own.evicted) if one.own else "-",
        str(one.own.pinned) if one.own else "-",
        *_tier(one.own),
        f"{sum(each.usable for each in one.owners)}/{len(one.owners)}",
        f"{found / asked:.0%}" if asked else "-",
        str(one.lookups.get("rejected", 0)),
        str(lost),
        str(one.admission.declined),
        f"{one.admission.unpaid}/{one.admission.loads}",
        printable(one.label or one.process),
    )


def _tier(own: OwnerStats | None) -> tuple[str, str, str]:
    if own is None or not own.lower_tier_capacity:
        return "-", "-", "-"
    return str(own.lower_tier), str(own.promoted), str(own.dropped)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
