# SPDX-License-Identifier: Apache-2.0
"""The two routes of rooms that decode servers have given up (`given_up.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiohttp import web
from msgspec.json import Decoder

from bootstrap_server.http.body import RefusalError, json_response, read_body
from bootstrap_server.http.query import revision_of, wait_s_of
from bootstrap_server.http.waiting import Waiting
from bootstrap_server.ranks.errors import RegistryFull
from bootstrap_server.ranks.given_up import GIVEN_UP_PATH, NOTICE_BYTES_MAX, GivenUpRooms, Notice

__all__ = ["GivenUpHandlers"]

_NOTICE = Decoder(Notice)
_ALL: Final = "given up"


class GivenUpHandlers:
    """`POST` leaves a notice, from whomever; `GET` waits for notices, for those with a proof."""

    def __init__(
        self,
        clock: Callable[[], float],
        noted: Callable[[web.Request, Notice], None],
        first_revision: int,
    ) -> None:
        """``noted`` is told of each notice. ``first_revision``: see `GivenUpRooms`."""
        self._rooms = GivenUpRooms(first_revision=first_revision)
        self._clock, self._noted = clock, noted
        self._waiting = Waiting()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(GIVEN_UP_PATH, self.note),
            web.get(GIVEN_UP_PATH, self.get, allow_head=False),
        ]

    async def note(self, request: web.Request) -> web.Response:
        # Before a byte is read: who sends it has proved nothing.
        if request.content_length is None or request.content_length > NOTICE_BYTES_MAX:
            raise RefusalError(
                413, f"POST {GIVEN_UP_PATH}: a body has a length, {NOTICE_BYTES_MAX} bytes at most"
            )
        notice = await read_body(request, _NOTICE)
        try:
            self._rooms.note(notice, self._clock())
        except ValueError as error:
            raise RefusalError(400, f"POST {GIVEN_UP_PATH}: {error}") from error
        self._noted(request, notice)
        self._waiting.wake(_ALL)
        return web.Response(text="OK")

    async def get(self, request: web.Request) -> web.Response:
        after, wait_s = revision_of(request), wait_s_of(request)
        heard = after or self._rooms.first_revision  # 0: he has heard nothing yet
        if heard == self._rooms.revision and wait_s > 0:
            try:
                await self._waiting.until(_ALL, lambda: self._rooms.revision != heard, wait_s)
            except RegistryFull as error:
                raise RefusalError(429, str(error)) from error
        return json_response(self._rooms.after(after, self._clock()))

    async def let_waiters_go(self, _: web.Application) -> None:
        self._waiting.close()
