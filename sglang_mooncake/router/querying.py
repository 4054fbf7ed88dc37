# SPDX-License-Identifier: Apache-2.0
"""What the router knows of caches, for other routers: `POST /query`, `/query_by_hash`, `/register`
and `/unregister` in the form of Mooncake's RFC 1403, which other indexers of KV caches answer as
well.

The answer has the caches whose KV events are followed: the router's servers, and what is registered
beside them. What a router itself has sent where, it knows best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.pages import seed_of, token_digests, token_names
from sglang_mooncake.router.placement import Pool, PrefillView
from sglang_mooncake.router.registered import TENANT, Registered, Registration, Unregistration
from sglang_mooncake.router.routing import whole
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import RequestError

__all__ = ["EXTERNAL", "HashQuery", "Querying", "TokenQuery", "matches"]

#: Media that are there in every answer, and how SGLang's events call one of them.
_MEDIA: Final = ("GPU", "CPU", "DISK")
_RENAMED: Final = {"CPU_PINNED": "CPU"}
EXTERNAL: Final = "EXTERNAL"
"""What SGLang's events call a store beside its servers."""

_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Asked(msgspec.Struct, kw_only=True):
    """``block_size``: servers with other pages are left out; None leaves none out."""

    model: str | None = None
    lora_name: str | None = None
    tenant_id: str = TENANT
    instance_id: str | None = None
    block_size: int | None = None


class TokenQuery(_Asked):
    token_ids: list[int]
    cache_salt: str | None = None


class HashQuery(_Asked):
    """The names are those of SGLang's events."""

    seq_hashes: list[int] = msgspec.field(default_factory=list)
    block_hash: list[int] = msgspec.field(default_factory=list)


def matches(
    there: Mapping[str, Mapping[int, CacheView]],
    query: TokenQuery | HashQuery,
    now_s: float,
    pool: Pool | None = None,
) -> dict[str, dict[str, Any]]:
    """By instance, how many tokens of the prompt's beginning its cache has, on any medium and on
    each. ``there``: instances, and caches of their DP ranks. ``pool``: what all of them can load
    from is a medium, too, and does not count for ``longest_matched``: it tells none of them from
    the others."""
    wanted, prompt = query.instance_id, _Prompt(query, pool)
    told = {
        instance: _told(ranks, prompt, now_s)
        for instance, ranks in there.items()
        if wanted in (None, instance)
    }
    return {instance: one for instance, one in told.items() if one is not None}


class _Prompt:
    """What a query asks for. Its names are computed once for each size of pages: all servers of a
    model have the same."""

    def __init__(self, query: TokenQuery | HashQuery, pool: Pool | None) -> None:
        self.page_wanted: Final = query.block_size
        self._query, self._pool = query, pool
        self._names: dict[int, Sequence[int]] = {}
        self._in_pool: dict[int, int] = {}

    def names(self, page: int) -> Sequence[int]:
        """Of its pages, as events have them."""
        if page not in self._names:
            # What an adapter has computed is named by secrets of the server's.
            self._names[page] = () if self._query.lora_name else _names(self._query, page)
        return self._names[page]

    def in_pool(self, page: int) -> int | None:
        """How many pages of its beginning the store has; None where that cannot be told: the keys
        there are longer than the names that events have."""
        query = self._query
        if self._pool is None or not isinstance(query, TokenQuery) or query.lora_name:
            return None
        if page not in self._in_pool:
            digests = token_digests(query.token_ids, page, seed_of(query.cache_salt))
            self._in_pool[page] = self._pool.first_of(digests)
        return self._in_pool[page]


def _told(views: Mapping[int, CacheView], prompt: _Prompt, now_s: float) -> dict[str, Any] | None:
    """Of one instance: the most that one of its DP ranks has. None where it is left out."""
    ranks: dict[str, int] = {}
    on = dict.fromkeys(_MEDIA, 0)
    for rank, view in views.items():
        stream, page = view.events, view.event_page
        if stream is None or stream.state(now_s) != "live":
            continue
        if prompt.page_wanted not in (None, page):
            continue
        names = prompt.names(page)
        ranks[str(rank)] = stream.first_of(names) * page
        for medium, count in sorted(stream.by_medium(names).items()):
            medium = _RENAMED.get(medium, medium)
            on[medium] = max(on.get(medium, 0), count * page)
        in_pool = prompt.in_pool(page)
        if in_pool is not None:
            on[EXTERNAL] = max(on.get(EXTERNAL, 0), in_pool * page)
    return {"longest_matched": max(ranks.values()), "DP": ranks, **on} if ranks else None


def _names(query: TokenQuery | HashQuery, page: int) -> Sequence[int]:
    if isinstance(query, HashQuery):
        return query.seq_hashes or query.block_hash
    return token_names(query.token_ids, page, seed_of(query.cache_salt))


class Querying:
    """The routes."""

    def __init__(
        self,
        views: Mapping[Server, Sequence[PrefillView]],
        registered: Registered,
        pool: Pool | None,
        clock: Callable[[], float],
    ) -> None:
        """``pool``: the store that the servers of ``views`` load from."""
        self._views, self._registered, self._pool, self._clock = views, registered, pool, clock

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/query", self.by_tokens),
            web.post("/query_by_hash", self.by_names),
            web.post("/register", self.register),
            web.post("/unregister", self.unregister),
        ]

    async def by_tokens(self, request: web.Request) -> web.Response:
        return self._answer(await _decoded(request, TokenQuery))

    async def by_names(self, request: web.Request) -> web.Response:
        return self._answer(await _decoded(request, HashQuery))

    async def register(self, request: web.Request) -> web.Response:
        one = await _decoded(request, Registration)
        self._registered.add(one)
        told = {"status": "registered successfully", "instance_id": one.instance_id}
        return web.json_response(told)

    async def unregister(self, request: web.Request) -> web.Response:
        gone = self._registered.remove(await _decoded(request, Unregistration))
        told = {"status": "unregistered successfully", "removed_instances": gone}
        return web.json_response(told)

    def _answer(self, query: TokenQuery | HashQuery) -> web.Response:
        now_s = self._clock()
        own: dict[str, Mapping[int, CacheView]] = {}
        if query.tenant_id == TENANT:
            own = {
                server.url: {view.rank: view for view in views}
                for server, views in self._views.items()
            }
        registered = self._registered.asked(query.tenant_id, query.model)
        found = matches(registered, query, now_s) | matches(own, query, now_s, self._pool)
        return web.json_response({query.tenant_id: found})


async def _decoded(request: web.Request, kind: type[_Body]) -> _Body:
    raw = await whole(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{request.path}: {error}") from error
