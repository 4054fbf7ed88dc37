# SPDX-License-Identifier: Apache-2.0
"""The route of routers' reports (`router_report.py`)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from msgspec.json import Decoder

from bootstrap_server.http.body import read_body
from bootstrap_server.page.board import Board
from bootstrap_server.ranks.router_report import ROUTERS_PATH, RouterReport

__all__ = ["RouterHandlers"]

_REPORT = Decoder(RouterReport)


class RouterHandlers:
    """`PUT` of a router, again and again."""

    def __init__(self, board: Board, clock: Callable[[], float]) -> None:
        self._board, self._clock = board, clock

    def routes(self) -> list[web.RouteDef]:
        return [web.put(ROUTERS_PATH, self.put)]

    async def put(self, request: web.Request) -> web.Response:
        report = await read_body(request, _REPORT)
        self._board.router_told(request.remote or "?", report, self._clock())
        return web.Response(text="OK")
