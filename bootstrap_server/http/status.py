# SPDX-License-Identifier: Apache-2.0
"""The status page and its data: `GET /` and `GET /v1/status`.

The browser renders. At most once in `PUBLISH_EVERY_S`, and only while somebody watches, the
registry takes down which ranks there are, for all who watch. To that an answer adds the reports of
ranks that have changed since the browser asked last (`after` is the `revision` of the answer that
it has), up to `REPORTS_BYTES_MAX`: a browser gets the rest by asking again, and is never busy for
long. A request with `wait_s` is answered once there is something new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from bootstrap_server.admission.access import StatusPage
from bootstrap_server.http.body import RefusalError, Snapshot
from bootstrap_server.http.gate import PROVED
from bootstrap_server.http.query import revision_of, wait_s_of
from bootstrap_server.page import PAGE
from bootstrap_server.page.board import GONE_KEPT_S, Board, Event, Gone, Shown
from bootstrap_server.page.lately import WINDOW_S, trouble
from bootstrap_server.page.planned import planned
from bootstrap_server.ranks.instance import InstanceTable
from bootstrap_server.ranks.rank_status import Axes
from bootstrap_server.ranks.records import Rank, Role
from bootstrap_server.ranks.registry import RENEWALS_PER_LEASE, Registry, role_of

__all__ = ["PUBLISH_EVERY_S", "REPORTS_BYTES_MAX", "WATCHERS_MAX", "StatusHandlers"]

PUBLISH_EVERY_S: Final = 1.0
#: An answer is over this by one report at most. 1,024 ranks with 256 peers each have 15 MB.
REPORTS_BYTES_MAX: Final = 1 << 20
#: No more than one answer is encoded in this time, which takes up to 20 ms.
ENCODE_EVERY_S: Final = 0.05
#: How often a request that waits looks for news: there are few of them, and only while somebody
#: watches, so that nobody else has to tell them.
LOOK_EVERY_S: Final = 0.1
#: More are answered at once, with what there is.
WATCHERS_MAX: Final = 64
#: Plans for so many decode topologies are shown for each instance.
TOPOLOGIES_MAX: Final = 4
STATUS_FORM: Final = 1


class _Published(NamedTuple):
    """The board's revision, when it was published, and what is shown but for the reports."""

    revision: int
    made_s: float
    value: dict[str, object]


class StatusHandlers:
    """`clock` gives the time of leases; `board` is told of everything by others."""

    def __init__(
        self,
        registry: Registry,
        board: Board,
        clock: Callable[[], float],
        page: StatusPage,
    ) -> None:
        self._registry, self._board, self._clock, self._page = registry, board, clock, page
        self._watchers = 0
        self._making = asyncio.Lock()
        self._published: _Published | None = None
        #: To what was published last, by `after`.
        self._answers: dict[int, Snapshot] = {}

    def routes(self) -> list[web.RouteDef]:
        """None where the page is switched off."""
        if self._page is StatusPage.OFF:
            return []
        return [web.get("/", self.get_page), web.get("/v1/status", self.get_status)]

    async def get_page(self, request: web.Request) -> web.Response:
        self._check(request)
        return PAGE.response(request)

    async def get_status(self, request: web.Request) -> web.Response:
        self._check(request)
        after, wait_s = revision_of(request), wait_s_of(request)
        await self._until_after(after, wait_s)
        async with self._making:
            snapshot = await self._answer(after)
        response = snapshot.response(request)
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    def _check(self, request: web.Request) -> None:
        if PROVED in request:
            return
        refusal = self._page.refusal(request)
        if refusal is not None:
            raise RefusalError(403, refusal)

    async def _until_after(self, after: int, wait_s: float) -> None:
        if self._watchers >= WATCHERS_MAX:
            return
        give_up_at_s = time.monotonic() + wait_s
        self._watchers += 1
        try:
            # With the same snapshot again the page knows that the registry is there.
            while self._board.revision <= after and time.monotonic() < give_up_at_s:
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._watchers -= 1

    async def _answer(self, after: int) -> Snapshot:
        published = await self._publish(after)
        found = self._answers.get(after)
        if found is not None:
            return found
        answer = self._with_reports(published, after)
        # Encoded beside the loop: compressing leaves the interpreter to others.
        found = await asyncio.to_thread(Snapshot, answer)
        if len(self._answers) >= WATCHERS_MAX:
            self._answers.clear()
        self._answers[after] = found
        # Whoever asks for ever other revisions gets a part of this server's time, not all of it.
        await asyncio.sleep(ENCODE_EVERY_S)
        return found

    async def _publish(self, after: int) -> _Published:
        """What is to be shown to somebody who has the revision `after`."""
        published = self._published
        if published is not None:
            old_s = time.monotonic() - published.made_s
            if self._board.revision == published.revision:
                return published
            if old_s < PUBLISH_EVERY_S:
                if after < published.revision:
                    return published
                await asyncio.sleep(PUBLISH_EVERY_S - old_s)
        now_s = self._clock()
        self._board.sweep(self._registry, now_s)
        published = _Published(self._board.revision, time.monotonic(), self._value(now_s))
        self._published = published
        self._answers.clear()
        return published

    def _with_reports(self, published: _Published, after: int) -> dict[str, object]:
        reports, size, upto = [], 0, published.revision
        for revision, name, coords, report in self._board.reports(after, upto):
            if size >= REPORTS_BYTES_MAX:
                upto = revision - 1
                break
            size += len(report.encoded)
            place = msgspec.structs.astuple(coords)
            reports.append((name, place, str(revision), msgspec.Raw(report.encoded)))
        # As text: a browser's numbers are exact up to 2^53 only.
        return published.value | {"revision": str(upto), "reports": reports}

    def _value(self, now_s: float) -> dict[str, object]:
        return {
            "form": STATUS_FORM,
            "started": str(self._board.first_revision),
            "now_s": now_s,
            "time_s": time.time(),
            "lease_s": self._registry.lease_s,
            "renew_s": self._registry.lease_s / RENEWALS_PER_LEASE,
            "ended_within_s": WINDOW_S,
            "reports_left_out": self._board.left_out,
            "instances": [
                self._instance(table, now_s)
                for table in self._registry.tables()
                if table.config is not None
            ],
            "routers": [
                {"address": one.address, "last_s": one.last_s, **msgspec.structs.asdict(one.report)}
                for one in self._board.routers(now_s)
            ],
            "turned_away": [one._asdict() for one in self._board.turned_away(now_s)],
            "gone": [_gone(one) for one in self._board.gone(now_s)],
            "gone_kept_s": GONE_KEPT_S,
            "events": [_event(event) for event in self._board.events],
        }

    def _instance(self, table: InstanceTable, now_s: float) -> dict[str, object]:
        config = table.config
        assert config is not None
        ranks, topologies = [], set[Axes]()
        for rank, renewed_s in table.live():
            shown = self._board.find(table.name, rank.coords)
            ranks.append(_rank(rank, table.role, renewed_s, shown, now_s))
            if shown is not None and shown.report is not None:
                topologies |= shown.report.topologies
        return {
            "name": table.name,
            "role": table.role,
            "generation": table.generation,
            "registered": table.registered,
            "expected": table.expected,
            "topology": msgspec.structs.astuple(config.topology),
            "format": config.format,
            "protocol": config.protocol,
            "missing": [msgspec.structs.astuple(coords) for coords in table.missing()],
            "ranks": ranks,
            "in_trouble": sum(rank["trouble"] is not None for rank in ranks),
            "plans": [planned(config, axes) for axes in sorted(topologies)[:TOPOLOGIES_MAX]],
        }


def _rank(
    rank: Rank, role: Role, renewed_s: float | None, shown: Shown | None, now_s: float
) -> dict[str, object]:
    lately = None if shown is None else shown.lately.since(now_s)
    return {
        "coords": msgspec.structs.astuple(rank.coords),
        "host": rank.host,
        "port": rank.port,
        "started_s": rank.epoch / 1e9,
        "renewed_s": renewed_s,
        "lost_s": None if shown is None else shown.lost_s,
        "report": None if shown is None or shown.report is None else str(shown.report_revision),
        "ended": None if lately is None else lately[0].ends,
        "trouble": None if shown is None else trouble(shown.lately, now_s, role),
    }


def _gone(gone: Gone) -> dict[str, object]:
    return {
        "at_s": gone.at_s,
        "role": role_of(gone.instance),
        "instance": gone.instance,
        "coords": msgspec.structs.astuple(gone.rank.coords),
        "host": gone.rank.host,
        "port": gone.rank.port,
        "rooms": None if gone.tally is None else gone.tally.ends,
    }


def _event(event: Event) -> dict[str, object]:
    return {
        "number": event.number,
        "at_s": event.at_s,
        "instance": event.instance,
        "coords": msgspec.structs.astuple(event.rank.coords),
        "host": event.rank.host,
        "port": event.rank.port,
        "what": event.what,
    }
