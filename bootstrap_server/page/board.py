# SPDX-License-Identifier: Apache-2.0
"""What the status page shows beyond the live ranks themselves: each rank's connection and report,
and what happened to ranks lately. Pure: the caller passes the time in.

A rank renews its lease over one connection, which its kernel closes when the process ends. So the
registry hears of a killed rank at once and says so; the lease, by which ranks are matched, goes on
until it lapses, as the rank may come back over another connection.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

from bootstrap_server.page.lately import Lately, Tally
from bootstrap_server.page.routers import Router, RoutersLately
from bootstrap_server.page.turned_away import TurnedAway, TurnedAwayLately
from bootstrap_server.ranks.rank_status import Axes
from bootstrap_server.ranks.records import Rank, RankCoords, RankRecord
from bootstrap_server.ranks.registry import Registry
from bootstrap_server.ranks.router_report import RouterReport

__all__ = [
    "EVENTS_MAX",
    "GONE_KEPT_S",
    "GONE_MAX",
    "REPORTS_BYTES_MAX",
    "Board",
    "Event",
    "Gone",
    "Report",
    "Shown",
]

EVENTS_MAX: Final = 100
#: For so long a rank whose lease has lapsed is shown: with its last rank an instance is forgotten,
#: and a whole server that died would leave nothing on the page.
GONE_KEPT_S: Final = 600.0
GONE_MAX: Final = 1024
#: All reports together. One takes 0.5 to 10 kB, mostly its peers.
REPORTS_BYTES_MAX: Final = 32 << 20

_Key = tuple[str, RankCoords]


class Report(NamedTuple):
    """A rank's `RankStatus` as JSON, the decode topologies among its peers, and its counts."""

    encoded: bytes
    topologies: frozenset[Axes]
    tally: Tally


class Event(NamedTuple):
    """Something that happened to a rank: `at_s` on the clock of leases. `number` counts events."""

    number: int
    at_s: float
    instance: str
    rank: Rank
    what: str


class Gone(NamedTuple):
    """A rank whose lease has lapsed: when, and what it had reported last."""

    at_s: float
    instance: str
    rank: Rank
    tally: Tally | None


class Shown:
    """What is known of one live rank."""

    __slots__ = ("connection", "lately", "lost_s", "rank", "report", "report_revision")

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        #: Over which it registered or renewed last; None where that one was not kept open.
        self.connection: Hashable | None = None
        #: When that connection was closed by the rank's side; None while it is open, or unknown.
        self.lost_s: float | None = None
        self.report: Report | None = None
        self.lately = Lately()
        #: The board's when the report last changed.
        self.report_revision = 0


class Board:
    """`revision` grows with everything that the page should show, from `first_revision`, which is
    another one for each start of a server."""

    def __init__(self, first_revision: int = 0, bytes_max: int = REPORTS_BYTES_MAX) -> None:
        self.first_revision = self.revision = first_revision
        #: Reports that were left out for want of room, since the start.
        self.left_out = 0
        self._bytes, self._bytes_max = 0, bytes_max
        self._shown: dict[_Key, Shown] = {}
        self._of_connection: dict[Hashable, dict[_Key, None]] = {}
        self._turned_away = TurnedAwayLately()
        self._routers = RoutersLately()
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._gone: dict[_Key, Gone] = {}
        self._said = 0
        #: How often each kind of event has happened since the start.
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._shown)

    def find(self, name: str, coords: RankCoords) -> Shown | None:
        """What is known of a rank of the instance of that name."""
        return self._shown.get((name, coords))

    @property
    def events(self) -> tuple[Event, ...]:
        """The newest first."""
        return tuple(reversed(self._events))

    def turned_away(self, now_s: float) -> tuple[TurnedAway, ...]:
        """Who was not served lately, the latest first."""
        return self._turned_away.lately(now_s)

    def turn_away(self, address: str, why: str, now_s: float, count: int = 1) -> None:
        """So many requests from `address` were not served."""
        self._turned_away.note(address, why, now_s, count)
        self.revision += 1

    def routers(self, now_s: float) -> tuple[Router, ...]:
        """Those that were heard lately."""
        return self._routers.lately(now_s)

    def router_told(self, address: str, report: RouterReport, now_s: float) -> None:
        """The router at `address` tells of itself."""
        self._routers.told(address, report, now_s)
        self.revision += 1

    def reports(self, after: int, upto: int) -> list[tuple[int, str, RankCoords, Report]]:
        """Those that changed at a revision above `after`, `upto` at most, in that order; each with
        this revision, and the rank's instance and coordinates."""
        found = [
            (shown.report_revision, name, coords, shown.report)
            for (name, coords), shown in self._shown.items()
            if shown.report is not None and after < shown.report_revision <= upto
        ]
        return sorted(found, key=lambda entry: entry[0])

    def gone(self, now_s: float) -> tuple[Gone, ...]:
        """Ranks whose leases have lapsed within `GONE_KEPT_S`, and that have not come back; the
        first one first."""
        for key, gone in list(self._gone.items()):
            if now_s - gone.at_s < GONE_KEPT_S:
                break
            del self._gone[key]
        return tuple(self._gone.values())

    # --- what happens to ranks ---

    def registered(
        self, name: str, record: RankRecord, connection: Hashable | None, now_s: float
    ) -> None:
        """The registry has taken a rank in, for the first time or again."""
        rank, key = record.rank, (name, record.rank.coords)
        self._gone.pop(key, None)
        shown = self._shown.get(key)
        if shown is None or shown.rank != rank:
            self._forget(key)
            self._shown[key] = shown = Shown(rank)
            self._say(now_s, name, rank, "registered")
        self._heard(key, shown, connection, now_s)

    def renewed(
        self,
        name: str,
        coords: RankCoords,
        connection: Hashable | None,
        report: Report | None,
        now_s: float,
    ) -> None:
        """The registry has prolonged the lease of the live rank at `coords`."""
        key = name, coords
        shown = self._shown[key]
        self._heard(key, shown, connection, now_s)
        if report is not None:
            shown.lately.report(report.tally, now_s)
        if shown.report == report:
            return
        shown.report_revision = self.revision
        self._bytes -= _size(shown.report)
        shown.report = None
        if self._bytes + _size(report) > self._bytes_max:
            self.left_out += 1
            return
        self._bytes += _size(report)
        shown.report = report

    def disconnected(self, connection: Hashable, now_s: float) -> None:
        """A connection was closed by its other side."""
        for key in self._of_connection.pop(connection, ()):
            shown = self._shown[key]
            shown.connection, shown.lost_s = None, now_s
            self._say(now_s, key[0], shown.rank, "connection lost")

    def lapsed(self, name: str, rank: Rank, now_s: float) -> None:
        """A rank's lease has lapsed."""
        key = name, rank.coords
        shown = self._shown.get(key)
        self._gone.pop(key, None)  # the last one stands last
        if len(self._gone) >= GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._gone[key] = Gone(now_s, name, rank, None if shown is None else shown.lately.newest)
        self.ended(name, rank, "lease lapsed", now_s)

    def ended(self, name: str, rank: Rank, why: str, now_s: float) -> None:
        """A rank is live no longer."""
        self._forget((name, rank.coords))
        self._say(now_s, name, rank, why)

    def sweep(self, registry: Registry, now_s: float) -> None:
        """Forget ranks that others have replaced: a new generation takes all places at once."""
        for name, shown in list(self._replaced(registry)):
            self.ended(name, shown.rank, "replaced", now_s)

    # --- inside ---

    def _replaced(self, registry: Registry) -> Iterator[tuple[str, Shown]]:
        tables = {table.name: table for table in registry.tables()}
        for (name, coords), shown in self._shown.items():
            if name not in tables or tables[name].find(coords) != shown.rank:
                yield name, shown

    def _heard(self, key: _Key, shown: Shown, connection: Hashable | None, now_s: float) -> None:
        if shown.lost_s is not None:
            self._say(now_s, key[0], shown.rank, "came back")
        self._unbind(key, shown)
        shown.connection, shown.lost_s = connection, None
        if connection is not None:
            self._of_connection.setdefault(connection, {})[key] = None
        self.revision += 1

    def _unbind(self, key: _Key, shown: Shown) -> None:
        keys = self._of_connection.get(shown.connection)
        if keys is not None:
            keys.pop(key, None)
            if not keys:
                del self._of_connection[shown.connection]

    def _forget(self, key: _Key) -> None:
        shown = self._shown.pop(key, None)
        if shown is not None:
            self._unbind(key, shown)
            self._bytes -= _size(shown.report)

    def _say(self, now_s: float, name: str, rank: Rank, what: str) -> None:
        self._said += 1
        self._events.append(Event(self._said, now_s, name, rank, what))
        self.counts[what] += 1
        self.revision += 1


def _size(report: Report | None) -> int:
    return 0 if report is None else len(report.encoded)
