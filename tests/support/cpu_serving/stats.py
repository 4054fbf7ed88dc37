# SPDX-License-Identifier: Apache-2.0
"""The figures our backend writes, one JSON file per scheduler process, and what they add up to.

They are also the proof that our classes served: SGLang only logs a failed plugin and would go on
with an engine of its own, which writes no such file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from cpu_serving.processes import ServingError
from cpu_serving.servers import Server

__all__ = ["Handover", "RankStats", "collect", "read_stats", "summarise"]

FORMAT_VERSION = 1
MANAGER = "sglang_mooncake.sglang.manager.KVManager"
OUR_PACKAGES = ("sglang_mooncake", "bootstrap_server", "te")
# The files are rewritten about once a second; a busy machine may not run a server for a while.
SETTLE_TIMEOUT_S = 60.0
POLL_S = 0.1


class RankStats(msgspec.Struct, frozen=True):
    """One file: what one scheduler process says about its hand-overs."""

    version: int
    pid: int
    role: str
    rank: dict[str, int]
    classes: dict[str, str]
    transport: str
    rails: int
    rooms: dict[str, int]
    bytes: int
    busy_s: float
    handover_ms: list[float]
    scheduler_call_us: dict[str, list[float]]
    #: Layer by layer: bytes that were written before `send()`, why requests went as a whole, and
    #: what the hooks took of each forward.
    bytes_early: int = 0
    fallbacks: dict[str, int] = {}
    hooks_us: list[float] = []
    #: Cells and bytes that were digested; what a decode rank has found equal and different.
    digests: dict[str, float] = {}


@dataclass(frozen=True)
class Handover:
    """All ranks of both servers together. A percentile without samples is None."""

    bytes: int
    gb_per_s: float
    handover_p50_ms: float | None
    handover_p99_ms: float | None
    send_p99_us: float | None
    poll_p99_us: float | None
    transport: str
    rails: int
    rooms: dict[str, int]
    #: Of `bytes`, those that were written before `send()`; and how often something went as a whole
    #: instead, by the reason.
    bytes_early: int
    fallbacks: dict[str, int]
    hooks_p50_us: float | None
    #: Of both sides: `RankStats.digests`.
    digests: dict[str, float]


def collect(server: Server, since: float) -> list[RankStats]:
    """The figures of every rank, written after the wall-clock time `since`.

    Raises ServingError if they are not written within SETTLE_TIMEOUT_S.
    """
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        files = _files(server)
        if len(files) >= server.options.ranks and all(f.stat().st_mtime > since for f in files):
            return read_stats(server)
        time.sleep(POLL_S)
    raise ServingError(
        f"the ranks of the {server.process.name} have written no new figures to "
        f"{server.stats_dir} within {SETTLE_TIMEOUT_S:g} s\n{server.process.tail()}"
    )


def read_stats(server: Server) -> list[RankStats]:
    """One RankStats per rank; raises ServingError unless all are there and name our classes."""
    found = [_decode(path) for path in _files(server)]
    if len(found) != server.options.ranks:
        raise ServingError(
            f"{len(found)} of {server.options.ranks} ranks of the {server.process.name} wrote to "
            f"{server.stats_dir}: our backend did not serve\n{server.process.tail()}"
        )
    for stats in found:
        _check(server, stats)
    return found


def _files(server: Server) -> list[Path]:
    """Of its role; it may have had another one before."""
    return sorted(server.stats_dir.glob(f"{server.role}-*.json"))


def _decode(path: Path) -> RankStats:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RankStats)
    except msgspec.DecodeError as error:
        raise ServingError(f"{path} is not a file of figures: {error}") from error


def _check(server: Server, stats: RankStats) -> None:
    name = server.process.name
    if stats.version != FORMAT_VERSION:
        raise ServingError(
            f"figures of the {name} have version {stats.version}, not {FORMAT_VERSION}"
        )
    if stats.role != server.role:
        raise ServingError(f"a rank of the {name} says that its role is {stats.role!r}")
    foreign = [c for c in stats.classes.values() if c.partition(".")[0] not in OUR_PACKAGES]
    if foreign or stats.classes.get("manager") != MANAGER:
        raise ServingError(f"the {name} was served by {stats.classes}, not by our classes")


def summarise(prefill: Sequence[RankStats], decode: Sequence[RankStats]) -> Handover:
    """Bytes and times as the prefill ranks saw them; scheduler calls over both sides."""
    ranks = [*prefill, *decode]
    total = sum(rank.bytes for rank in prefill)
    busy_s = max(rank.busy_s for rank in prefill)
    times = [ms for rank in prefill for ms in rank.handover_ms]
    calls = {
        call: [us for rank in ranks for us in rank.scheduler_call_us.get(call, [])]
        for call in ("send", "poll")
    }
    rooms = {
        state: sum(rank.rooms.get(state, 0) for rank in prefill)
        for state in ("done", "failed", "aborted", "open")
    }
    return Handover(
        bytes=total,
        gb_per_s=total / 1e9 / busy_s if busy_s > 0 else 0.0,
        handover_p50_ms=_percentile(times, 50),
        handover_p99_ms=_percentile(times, 99),
        send_p99_us=_percentile(calls["send"], 99),
        poll_p99_us=_percentile(calls["poll"], 99),
        transport=", ".join(sorted({rank.transport for rank in ranks} - {""})),
        rails=max(rank.rails for rank in ranks),
        rooms=rooms,
        bytes_early=sum(rank.bytes_early for rank in prefill),
        fallbacks=dict(sum((Counter(rank.fallbacks) for rank in prefill), Counter())),
        hooks_p50_us=_percentile([us for rank in prefill for us in rank.hooks_us], 50),
        digests={
            name: sum(rank.digests.get(name, 0) for rank in ranks)
            for name in ("cells", "bytes", "seconds", "equal", "different")
        },
    )


def _percentile(samples: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(samples, percent)) if samples else None
