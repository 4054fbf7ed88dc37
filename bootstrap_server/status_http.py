# SPDX-License-Identifier: Apache-2.0
"""The status page and its data: `GET /` and `GET /v1/status`.

The browser renders. The registry encodes one snapshot for all who watch, at most once in
`SNAPSHOT_EVERY_S`, and none while nobody watches. A request with `after` (the `revision` of the
snapshot that the browser has) and `wait_s` is answered once there is something new.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from bootstrap_server.access import StatusPage
from bootstrap_server.board import Board, Event, Shown
from bootstrap_server.gate import PROVED
from bootstrap_server.http_body import RefusalError, Snapshot
from bootstrap_server.http_query import revision_of, wait_s_of
from bootstrap_server.instance import InstanceTable
from bootstrap_server.lease import RENEWALS_PER_LEASE
from bootstrap_server.page import PAGE
from bootstrap_server.planned import planned
from bootstrap_server.rank_status import Axes
from bootstrap_server.records import Rank
from bootstrap_server.registry import Registry

__all__ = ["SNAPSHOT_EVERY_S", "WATCHERS_MAX", "StatusHandlers"]

#: A snapshot of 1,024 ranks takes about 20 ms, most of it on a thread of its own.
SNAPSHOT_EVERY_S: Final = 1.0
#: How often a request that waits looks for news: there are few of them, and only while somebody
#: watches, so that nobody else has to tell them.
LOOK_EVERY_S: Final = 0.1
#: More are answered at once, with what there is.
WATCHERS_MAX: Final = 64
#: Plans for so many decode topologies are shown for each instance.
TOPOLOGIES_MAX: Final = 4
STATUS_FORM: Final = 1


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
        self._closed = False
        self._making = asyncio.Lock()
        self._made: tuple[int, Snapshot] | None = None
        self._made_s = -SNAPSHOT_EVERY_S

    def routes(self) -> list[web.RouteDef]:
        """None where the page is switched off."""
        if self._page is StatusPage.OFF:
            return []
        return [web.get("/", self.get_page), web.get("/v1/status", self.get_status)]

    async def let_watchers_go(self, _: web.Application) -> None:
        """The server shuts down."""
        self._closed = True

    async def get_page(self, request: web.Request) -> web.Response:
        self._check(request)
        return PAGE.response(request)

    async def get_status(self, request: web.Request) -> web.Response:
        self._check(request)
        after, wait_s = revision_of(request), wait_s_of(request)
        await self._until_after(after, wait_s)
        response = (await self._snapshot()).response(request)
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
            while (
                self._board.revision <= after
                and not self._closed
                and time.monotonic() < give_up_at_s
            ):
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._watchers -= 1

    async def _snapshot(self) -> Snapshot:
        async with self._making:
            if self._made is not None and self._made[0] == self._board.revision:
                return self._made[1]
            early_s = self._made_s + SNAPSHOT_EVERY_S - time.monotonic()
            if self._made is not None and early_s > 0 and not self._closed:
                await asyncio.sleep(early_s)
            revision, value = self._board.revision, self._value()
            # Encoded beside the loop: compressing leaves the interpreter to others.
            snapshot = await asyncio.to_thread(Snapshot, value)
            self._made, self._made_s = (revision, snapshot), time.monotonic()
            return snapshot

    def _value(self) -> dict[str, object]:
        now_s = self._clock()
        self._board.sweep(self._registry, now_s)
        return {
            "form": STATUS_FORM,
            # As text: a browser's numbers are exact up to 2^53 only.
            "revision": str(self._board.revision),
            "now_s": now_s,
            "time_s": time.time(),
            "lease_s": self._registry.lease_s,
            "renew_s": self._registry.lease_s / RENEWALS_PER_LEASE,
            "reports_left_out": self._board.left_out,
            "instances": [
                self._instance(table)
                for table in self._registry.tables()
                if table.config is not None
            ],
            "events": [_event(event) for event in self._board.events],
        }

    def _instance(self, table: InstanceTable) -> dict[str, object]:
        config = table.config
        assert config is not None
        ranks, topologies = [], set[Axes]()
        for rank, renewed_s in table.live():
            shown = self._board.find(table.name, rank.coords)
            ranks.append(_rank(rank, renewed_s, shown))
            if shown is not None and shown.report is not None:
                topologies |= shown.report.topologies
        return {
            "name": table.name,
            "generation": table.generation,
            "registered": table.registered,
            "expected": table.expected,
            "topology": msgspec.structs.astuple(config.topology),
            "format": config.format,
            "protocol": config.protocol,
            "missing": [msgspec.structs.astuple(coords) for coords in table.missing()],
            "ranks": ranks,
            "plans": [planned(config, axes) for axes in sorted(topologies)[:TOPOLOGIES_MAX]],
        }


def _rank(rank: Rank, renewed_s: float | None, shown: Shown | None) -> dict[str, object]:
    return {
        "coords": msgspec.structs.astuple(rank.coords),
        "host": rank.host,
        "port": rank.port,
        "started_s": rank.epoch / 1e9,
        "renewed_s": renewed_s,
        "lost_s": None if shown is None else shown.lost_s,
        "status": (
            None if shown is None or shown.report is None else msgspec.Raw(shown.report.encoded)
        ),
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
