# SPDX-License-Identifier: Apache-2.0
"""The route at which the owners of a store meet (`store_owners.py`)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from msgspec.json import Decoder

from bootstrap_server.http.body import RefusalError, json_response, read_body
from bootstrap_server.ranks.errors import RegistryFull
from bootstrap_server.ranks.store_owners import STORE_OWNERS_PATH, EntryOf, StoreOwners

__all__ = ["StoreOwnerHandlers"]

_ENTRY_OF = Decoder(EntryOf)


class StoreOwnerHandlers:
    """`PUT` of an owner, again and again; `DELETE` by one that ends."""

    def __init__(self, clock: Callable[[], float], first_revision: int) -> None:
        """``first_revision``: see `StoreOwners`."""
        self._owners = StoreOwners(first_revision)
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        return [
            web.put(STORE_OWNERS_PATH, self.put),
            web.delete(STORE_OWNERS_PATH, self.delete),
        ]

    async def put(self, request: web.Request) -> web.Response:
        said = await read_body(request, _ENTRY_OF)
        try:
            return json_response(self._owners.exchange(said, self._clock()))
        except RegistryFull as error:
            raise RefusalError(429, str(error)) from error

    async def delete(self, request: web.Request) -> web.Response:
        said = await read_body(request, _ENTRY_OF)
        if said.name is not None:
            self._owners.leave(said.name)
        return web.Response(text="OK")
