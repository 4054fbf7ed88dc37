# SPDX-License-Identifier: Apache-2.0
"""From two looks at engines to rates, sorted. Pure: times are passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from te.stats import EngineStatus, LinkStats, RailStats

__all__ = ["EngineRow", "LinkRow", "RailRow", "Rate", "Sample", "busiest_links", "rows"]


@dataclass(frozen=True)
class Sample:
    """The engines as they were at one time."""

    #: Of a clock that does not go back.
    time_s: float
    engines: tuple[EngineStatus, ...]
    #: Sentences about engines that could not be asked.
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, order=True)
class Rate:
    """Bytes per second in each direction."""

    sent: float
    received: float

    @property
    def total(self) -> float:
        return self.sent + self.received


@dataclass(frozen=True)
class RailRow:
    """A rail, and its rate if it was there at the first look."""

    number: int
    stats: RailStats
    rate: Rate | None


@dataclass(frozen=True)
class LinkRow:
    """A link, its rate and its rails by number."""

    stats: LinkStats
    rate: Rate | None
    rails: tuple[RailRow, ...]


@dataclass(frozen=True)
class EngineRow:
    """An engine, its rate over all links, also those that have ended, and its links, the fastest
    first."""

    status: EngineStatus
    rate: Rate | None
    links: tuple[LinkRow, ...] = field(default=())


def rows(before: Sample | None, after: Sample) -> tuple[EngineRow, ...]:
    """The engines of ``after``, the fastest first; those that have no rate come by their bytes.

    A link is the same at both looks if engine, peer and direction are the same and no counter has
    fallen: else the peer has connected anew, and the link has no rate yet.
    """
    known = {} if before is None else {one.id: one for one in before.engines}
    elapsed_s = 0.0 if before is None else after.time_s - before.time_s
    found = [_engine(known.get(one.id), one, elapsed_s) for one in after.engines]
    return tuple(sorted(found, key=_rank_of_engine))


def busiest_links(engines: Iterable[EngineRow]) -> list[LinkRow]:
    """The links of all engines, the fastest first."""
    return sorted((link for engine in engines for link in engine.links), key=_rank_of_link)


def _engine(before: EngineStatus | None, after: EngineStatus, elapsed_s: float) -> EngineRow:
    rate = None
    links = dict(_keyed(before.links)) if before is not None else {}
    if before is not None:
        rate = _rate(
            (before.stats.bytes_sent, before.stats.bytes_received),
            (after.stats.bytes_sent, after.stats.bytes_received),
            elapsed_s,
        )
    found = [_link(links.get(key), one, elapsed_s) for key, one in _keyed(after.links)]
    return EngineRow(after, rate, tuple(sorted(found, key=_rank_of_link)))


def _keyed(links: tuple[LinkStats, ...]) -> Iterator[tuple[tuple[str, bool, str], LinkStats]]:
    """Two links of one peer in one direction, as while it connects anew, share a key: then the
    counters tell."""
    for one in links:
        yield (one.peer, one.is_incoming, one.address if one.is_incoming else ""), one


def _link(before: LinkStats | None, after: LinkStats, elapsed_s: float) -> LinkRow:
    old = () if before is None else before.rails
    rails = tuple(
        RailRow(
            i,
            rail,
            _rate(_counters(old[i]), _counters(rail), elapsed_s) if i < len(old) else None,
        )
        for i, rail in enumerate(after.rails)
    )
    known = [one.rate for one in rails if one.rate is not None]
    rate = None
    if known and len(known) == len(rails):
        rate = Rate(sum(one.sent for one in known), sum(one.received for one in known))
    return LinkRow(after, rate, rails)


def _counters(rail: RailStats) -> tuple[int, int]:
    return rail.flow.bytes_sent, rail.flow.bytes_received


def _rate(before: tuple[int, int], after: tuple[int, int], elapsed_s: float) -> Rate | None:
    if elapsed_s <= 0 or after[0] < before[0] or after[1] < before[1]:
        return None
    return Rate(*((new - old) / elapsed_s for old, new in zip(before, after, strict=True)))


def _rank_of_engine(row: EngineRow) -> tuple[float, int, int]:
    stats = row.status.stats
    return (*_rank(row.rate, stats.bytes_sent + stats.bytes_received), row.status.pid)


def _rank_of_link(row: LinkRow) -> tuple[float, int, str]:
    return (*_rank(row.rate, row.stats.nbytes), row.stats.peer)


def _rank(rate: Rate | None, nbytes: int) -> tuple[float, int]:
    return -(0.0 if rate is None else rate.total), -nbytes
