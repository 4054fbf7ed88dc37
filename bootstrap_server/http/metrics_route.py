# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics`, and what counts the requests for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from bootstrap_server.admission.connections import ConnectionWatch
from bootstrap_server.build import build_text, version
from bootstrap_server.http.metrics import Counts, process_lines, text
from bootstrap_server.page.board import Board
from bootstrap_server.prometheus_text import CONTENT_TYPE
from bootstrap_server.ranks.records import ROLES
from bootstrap_server.ranks.registry import Registry

__all__ = ["MetricsHandlers"]

#: Other methods are answered, too, and told apart from none of these no further.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})


class MetricsHandlers:
    """`lease_clock` gives the time of leases, `clock` another one, in seconds."""

    def __init__(
        self,
        registry: Registry,
        board: Board,
        watch: ConnectionWatch,
        lease_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry, self._board, self._watch = registry, board, watch
        self._lease_clock, self._clock = lease_clock, clock
        self._counts = Counts()
        self._build = build_text(version())

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/metrics", self.get)]

    async def get(self, _: web.Request) -> web.Response:
        instances, decode_servers = (
            [(table.registered, table.expected) for table in self._registry.of(role)]
            for role in ROLES
        )
        answer = text(
            self._counts,
            instances,
            decode_servers,
            len(self._board.gone(self._lease_clock())),
            self._board.counts,
            self._watch.open,
            process_lines(),
        )
        answer += self._build
        return web.Response(body=answer.encode(), headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts a request by what it was answered, also when a stranger is refused."""
        began_s, status = self._clock(), 500
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as answer:
            status = answer.status
            raise
        finally:
            resource = request.match_info.route.resource
            route = "other" if resource is None else resource.canonical
            method = request.method if request.method in _METHODS else "other"
            self._counts.answered(route, method, status, self._clock() - began_s)
