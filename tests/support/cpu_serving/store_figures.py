# SPDX-License-Identifier: Apache-2.0
"""What `watched_linker` is told, and says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from cpu_serving.servers import ServerOptions
from cpu_serving.store import with_linker

__all__ = ["FIGURES", "SLOW_RANK", "Figures", "SlowRank", "figures_in", "total", "watched"]

FIGURES: Final = "CPU_SERVING_STORE_FIGURES"
SLOW_RANK: Final = "CPU_SERVING_STORE_SLOW_RANK"


class SlowRank(msgspec.Struct, frozen=True):
    """A rank that takes longer for each offload and each load. ``wait_max_s``: how long an offload
    may wait on any rank before it is dropped."""

    rank: int
    offload_s: float = 0.0
    load_s: float = 0.0
    wait_max_s: float = 30.0


class Figures(msgspec.Struct):
    """Of one rank. Seconds beyond the deadline are those of the worst; 0 if none was late."""

    loads: int = 0
    #: That came.
    pages: int = 0
    failed_loads: int = 0
    offloads: int = 0
    #: Offloads that have waited for too long.
    dropped: int = 0
    load_late_s: float = 0.0
    offload_late_s: float = 0.0


def watched(options: ServerOptions, folder: Path, slow: SlowRank | None = None) -> ServerOptions:
    """The options of a server on the store whose ranks write their figures there."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {FIGURES: str(folder)}
    if slow is not None:
        env[SLOW_RANK] = msgspec.json.encode(slow).decode()
    options = with_linker(options, "cpu_serving.watched_linker", "WatchedLinker")
    return replace(options, extra_env={**options.extra_env, **env})


def figures_in(folder: Path) -> list[Figures]:
    """Of each rank that has done anything."""
    return [
        msgspec.json.decode(one.read_bytes(), type=Figures) for one in sorted(folder.glob("*.json"))
    ]


def total(figures: Iterable[Figures]) -> Figures:
    """Sums, and the worst of all."""
    found = Figures()
    for one in figures:
        found.loads += one.loads
        found.pages += one.pages
        found.failed_loads += one.failed_loads
        found.offloads += one.offloads
        found.dropped += one.dropped
        found.load_late_s = max(found.load_late_s, one.load_late_s)
        found.offload_late_s = max(found.offload_late_s, one.offload_late_s)
    return found
