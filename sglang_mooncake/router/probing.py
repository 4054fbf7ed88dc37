# SPDX-License-Identifier: Apache-2.0
"""Asks servers for their health: those that are ill often, the others now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import aiohttp

from sglang_mooncake.router.dialing import EXHAUSTED
from sglang_mooncake.router.each import TICK_S, one_for_each
from sglang_mooncake.router.failing import NO_ANSWER
from sglang_mooncake.router.options import Options
from sglang_mooncake.router.patience import within
from sglang_mooncake.router.routing import note_answer, note_failure
from sglang_mooncake.router.servers import Server, Servers
from sglang_mooncake.router.upstream import Upstream

__all__ = ["GIVE_UP_S", "Prober"]

#: A server that has answered nothing at all for so long, and is ill for that, stands still. What it
#: computes in one step is shorter, also on a CPU.
GIVE_UP_S: Final = 30.0


#: The time is looked at here.
_OURS: Final = aiohttp.ClientTimeout()


class Prober:
    """``run`` asks until it is cancelled. One question at a time to each server."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Servers,
        options: Options,
        upstream: Upstream,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``upstream``: connections for requests, which a server that stands still leaves open."""
        self._session, self._servers, self._options = session, servers, options
        self._upstream, self._clock = upstream, clock

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
            status = await within(self._options.health_timeout_s, self._status(url))
        except aiohttp.ClientConnectorError as error:
            if error.os_error.errno not in EXHAUSTED:
                note_failure(server, str(error), self._clock(), 1)
        except UnicodeError as error:
            note_failure(server, str(error), self._clock(), 1)
        except NO_ANSWER as error:
            note_failure(server, str(error) or "no answer", self._clock(), most)
            if not server.is_well:
                self._upstream.give_up(server.url, GIVE_UP_S)
        else:
            if status == HTTPStatus.OK:
                note_answer(server)
            else:
                # It says so itself: it is starting or ending, or its scheduler does not answer it.
                note_failure(server, f"GET /health: status {status}", self._clock(), 1)

    async def _status(self, url: str) -> int:
        async with self._session.get(url, timeout=_OURS, allow_redirects=False) as response:
            return response.status
