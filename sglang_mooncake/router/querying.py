# SPDX-License-Identifier: Apache-2.0
"""What the router knows of caches, for other routers: `POST /query`, `/query_by_hash`, `/register`
and `/unregister` in the form of Mooncake's RFC 1403, which other indexers of KV caches answer as
well.

The answer has the caches whose KV events are followed: the router's servers, and what is registered
beside them. What a router itself has sent where, it knows best.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.kv_events import EXTERNAL
from sglang_mooncake.router.pages import LONG_NAMES, names_of, seed_of, token_digests
from sglang_mooncake.router.placement import Pool, PrefillView
from sglang_mooncake.router.registered import (
    REGISTER,
    TENANT,
    UNREGISTER,
    Registered,
    Registration,
    Unregistration,
)
from sglang_mooncake.router.routing import whole
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import RequestError

__all__ = ["Asked", "HashQuery", "Querying", "TokenQuery", "matches"]

#: Media that are there in every answer, and how SGLang's events call one of them.
_MEDIA: Final = ("GPU", "CPU", "DISK")
_RENAMED: Final = {"CPU_PINNED": "CPU"}

_Body = TypeVar("_Body", bound=msgspec.Struct)


class _Query(msgspec.Struct, kw_only=True):
    """``block_size``: servers with other pages are left out; None leaves none out."""

    model: str | None = None
    lora_name: str | None = None
    tenant_id: str = TENANT
    instance_id: str | None = None
    block_size: int | None = None


class TokenQuery(_Query):
    token_ids: list[int]
    cache_salt: str | None = None


class HashQuery(_Query):
    """The names are those of SGLang's events."""

    seq_hashes: list[int] = msgspec.field(default_factory=list)
    block_hash: list[int] = msgspec.field(default_factory=list)


class Asked:
    """What a query asks for. Its pages are named once for each of their sizes: all servers of a
    model have the same."""

    def __init__(self, query: TokenQuery | HashQuery) -> None:
        self.query: Final = query
        self._digests: dict[int, Sequence[bytes]] = {}
        self._names: dict[int, Sequence[int]] = {}

    def name(self, pages: Iterable[int]) -> None:
        """Names pages of these sizes, which takes time where there are many."""
        for page in pages:
            self.names(page)

    def digests(self, page: int) -> Sequence[bytes] | None:
        """By which the store knows the pages; None where that cannot be told: the keys there are
        longer than the names that events have, and what an adapter has computed is named by secrets
        of the server's."""
        query = self.query
        if not isinstance(query, TokenQuery) or query.lora_name:
            return None
        if page not in self._digests:
            seed = seed_of(query.cache_salt)
            self._digests[page] = token_digests(query.token_ids, page, seed)
        return self._digests[page]

    def names(self, page: int) -> Sequence[int]:
        """Of its pages, as events have them; none with an adapter."""
        query = self.query
        if query.lora_name:
            return ()
        if isinstance(query, HashQuery):
            return query.seq_hashes or query.block_hash
        if page not in self._names:
            self._names[page] = names_of(self.digests(page) or ())
        return self._names[page]


def matches(
    there: Mapping[str, Mapping[int, CacheView]],
    asked: Asked,
    now_s: float,
    pool: Pool | None = None,
) -> dict[str, dict[str, Any]]:
    """By instance, how many tokens of the prompt's beginning its cache has, on any medium and on
    each. ``there``: instances, and caches of their DP ranks. ``pool``: what all of them can load
    from is a medium, too, and does not count for ``longest_matched``: it tells none of them from
    the others."""
    wanted, in_pool = asked.query.instance_id, _InPool(asked, pool)
    told = {
        instance: _told(ranks, in_pool, now_s)
        for instance, ranks in there.items()
        if wanted in (None, instance)
    }
    return {instance: one for instance, one in told.items() if one is not None}


class _InPool:
    """How much of a prompt the store has. It is asked once for each size of pages."""

    def __init__(self, asked: Asked, pool: Pool | None) -> None:
        self.asked: Final = asked
        self._pool = pool
        self._found: dict[int, int] = {}

    def pages(self, page: int) -> int | None:
        """Those of its beginning; None where that cannot be told."""
        digests = None if self._pool is None else self.asked.digests(page)
        if self._pool is None or digests is None:
            return None
        if page not in self._found:
            self._found[page] = self._pool.first_of(digests)
        return self._found[page]


def _told(views: Mapping[int, CacheView], pool: _InPool, now_s: float) -> dict[str, Any] | None:
    """Of one instance: the most that one of its DP ranks has. None where it is left out."""
    wanted = pool.asked.query.block_size
    ranks: dict[str, int] = {}
    on = dict.fromkeys(_MEDIA, 0)
    for rank, view in views.items():
        stream, page = view.events, view.event_page
        if stream is None or stream.state(now_s) != "live":
            continue
        if wanted not in (None, page):
            continue
        names = pool.asked.names(page)
        ranks[str(rank)] = stream.first_of(names) * page
        for medium, count in sorted(stream.by_medium(names).items()):
            medium = _RENAMED.get(medium, medium)
            on[medium] = max(on.get(medium, 0), count * page)
        in_pool = pool.pages(page)
        if in_pool is not None:
            on[EXTERNAL] = max(on.get(EXTERNAL, 0), in_pool * page)
    return {"longest_matched": max(ranks.values()), "DP": ranks, **on} if ranks else None


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
            web.post(REGISTER, self.register),
            web.post(UNREGISTER, self.unregister),
        ]

    async def by_tokens(self, request: web.Request) -> web.Response:
        query = await _decoded(request, TokenQuery)
        asked = Asked(query)
        if len(query.token_ids) > LONG_NAMES:
            caches = (*self._own(query).values(), *self._others(query).values())
            pages = {view.event_page for ranks in caches for view in ranks.values()}
            await asyncio.to_thread(asked.name, pages - {0})  # 0: of one that has not told.
        return self._answer(asked)

    async def by_names(self, request: web.Request) -> web.Response:
        return self._answer(Asked(await _decoded(request, HashQuery)))

    async def register(self, request: web.Request) -> web.Response:
        one = await _decoded(request, Registration)
        self._registered.add(one)
        told = {"status": "registered successfully", "instance_id": one.instance_id}
        return web.json_response(told)

    async def unregister(self, request: web.Request) -> web.Response:
        gone = self._registered.remove(await _decoded(request, Unregistration))
        told = {"status": "unregistered successfully", "removed_instances": gone}
        return web.json_response(told)

    def _answer(self, asked: Asked) -> web.Response:
        query, now_s = asked.query, self._clock()
        found = matches(self._others(query), asked, now_s)
        found |= matches(self._own(query), asked, now_s, self._pool)
        return web.json_response({query.tenant_id: found})

    def _own(self, query: TokenQuery | HashQuery) -> Mapping[str, Mapping[int, CacheView]]:
        """Caches of the router's servers."""
        if query.tenant_id != TENANT:
            return {}
        return {
            server.url: {view.rank: view for view in views} for server, views in self._views.items()
        }

    def _others(self, query: TokenQuery | HashQuery) -> Mapping[str, Mapping[int, CacheView]]:
        return self._registered.asked(query.tenant_id, query.model)


async def _decoded(request: web.Request, kind: type[_Body]) -> _Body:
    raw = await whole(request)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"{request.path}: {error}") from error
