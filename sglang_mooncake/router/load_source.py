# SPDX-License-Identifier: Apache-2.0
"""Asks decode servers how much they have to do (``GET /v1/loads``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp
import msgspec

from sglang_mooncake.router.decode_view import DecodeView, Load
from sglang_mooncake.router.each import TICK_S, one_for_each
from sglang_mooncake.router.questions import ask, decoded
from sglang_mooncake.router.servers import Server

__all__ = ["LoadSource"]

#: A scheduler writes its figures with each of its steps; what is sent meanwhile is known.
ASK_S: Final = 1.0
#: A server that does not tell is asked again after so long.
ASK_AGAIN_S: Final = 10.0
LOADS: Final = "/v1/loads"
_CORE: Final = {"include": "core"}


class _Rank(msgspec.Struct):
    """Of one DP rank. ``num_total_tokens`` is what is taken, and what requests wait for."""

    dp_rank: int

    num_running_reqs: int
    num_waiting_reqs: int
    num_total_tokens: int
    max_total_num_tokens: int


class _Loads(msgspec.Struct):
    loads: list[_Rank]

    @property
    def by_rank(self) -> dict[int, Load]:
        return {
            one.dp_rank: Load(
                one.num_running_reqs + one.num_waiting_reqs,
                one.num_total_tokens,
                one.max_total_num_tokens,
            )
            for one in self.loads
        }


class LoadSource:
    """``run`` asks all decode servers until it is cancelled."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        views: Callable[[], Mapping[Server, DecodeView]],
        headers: dict[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``views``: of the decode servers that there are; ``headers``: of questions to them."""
        self._session, self._views = session, views
        self._headers, self._clock = headers, clock

    async def run(self) -> None:
        """Never returns."""
        await one_for_each("asking for the load of", lambda: self._views().values(), self._follow)

    async def _follow(self, view: DecodeView) -> None:
        while True:
            wait_s = TICK_S
            if view.server.is_well:
                wait_s = ASK_S if await self._ask(view) else ASK_AGAIN_S
            await asyncio.sleep(wait_s)

    async def _ask(self, view: DecodeView) -> bool:
        """Whether it has told."""
        before = view.sent
        said = await ask(self._session, view.server, LOADS, self._headers, query=_CORE)
        loads = decoded(said, _Loads)
        if loads is None:
            return False
        view.told(loads.by_rank, before, self._clock())
        return True
