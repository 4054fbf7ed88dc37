# SPDX-License-Identifier: Apache-2.0
"""Asks servers for their health: those that are ill often, the others now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

import aiohttp

from sglang_mooncake.router.each import TICK_S, one_for_each
from sglang_mooncake.router.failing import NO_ANSWER
from sglang_mooncake.router.options import Options
from sglang_mooncake.router.routing import note_answer, note_failure
from sglang_mooncake.router.servers import Server, Servers

__all__ = ["Prober"]


class Prober:
    """``run`` asks until it is cancelled. One question at a time to each server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Servers,
        options: Options,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._servers, self._options = session, servers, options
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=options.health_timeout_s)

    async def run(self) -> None:
        """Never returns."""
        await one_for_each("asking for the health of", self._servers.all, self._watch)

    async def _watch(self, server: Server) -> None:
        while True:
            if server.is_to_be_probed(self._clock(), self._options.health_interval_s):
                await self._probe(server)
            await asyncio.sleep(TICK_S)

    async def _probe(self, server: Server) -> None:
        most = self._options.health_failures
        url = f"{server.url}/health"
        try:
            async with self._session.get(
                url, timeout=self._timeout, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientConnectorError, UnicodeError) as error:
            note_failure(server, str(error), self._clock(), 1)
        except NO_ANSWER as error:
            note_failure(server, str(error) or "no answer", self._clock(), most)
        else:
            if status == HTTPStatus.OK:
                note_answer(server)
            else:
                # It says so itself: it is starting or ending, or its scheduler does not answer it.
                note_failure(server, f"GET /health: status {status}", self._clock(), 1)
