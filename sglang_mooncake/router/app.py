# SPDX-License-Identifier: Apache-2.0
"""The router's routes: those of SGLang's mini-lb, and what operators look at.

| route | answer |
|---|---|
| `POST /generate`, `/v1/completions`, `/v1/chat/completions` | of a pair (`routing.py`) |
| `GET /health`, `/liveness` | 200 while the router runs |
| `GET /readiness` | 200 while a server of each role is well |
| `GET /health_generate`, `/flush_cache`, `/server_info`, … | of the servers (`asking.py`) |
| `GET /metrics` | Prometheus' text (`metrics.py`) |
| `POST /query`, `/query_by_hash` | which caches have a prompt (`querying.py`) |
| `POST /register`, `/unregister` | caches that are asked about beside those of servers |
| `GET /v1/router` | the servers as the router knows them, as JSON |
| `GET /` | the same for people, as text |
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from random import Random
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from bootstrap_server.admission.secret import Keys
from bootstrap_server.build import build_text
from bootstrap_server.decoding import excerpt
from bootstrap_server.http.metrics import process_lines
from bootstrap_server.prometheus_text import CONTENT_TYPE
from sglang_mooncake.router.asking import Asking
from sglang_mooncake.router.each import kept_up
from sglang_mooncake.router.event_source import EventSource, streams_max
from sglang_mooncake.router.failing import KINDS
from sglang_mooncake.router.forwarding import Forwarder
from sglang_mooncake.router.headers import request_headers
from sglang_mooncake.router.load_source import LoadSource
from sglang_mooncake.router.looking import Tokens
from sglang_mooncake.router.membership import Membership
from sglang_mooncake.router.metrics import Counts, Known, text
from sglang_mooncake.router.options import CACHE_AWARE, Options
from sglang_mooncake.router.placement import PrefillView
from sglang_mooncake.router.probing import Prober
from sglang_mooncake.router.proving import only_proved
from sglang_mooncake.router.querying import Querying
from sglang_mooncake.router.registered import Registered
from sglang_mooncake.router.registry_source import RegistrySource
from sglang_mooncake.router.routing import BODY_S, Routing, error_response
from sglang_mooncake.router.servers import ROLES, Server, Servers
from sglang_mooncake.router.sglang_http import CHAT, COMPLETIONS, GENERATE, RequestError
from sglang_mooncake.router.status import as_json, as_text, report_of
from sglang_mooncake.router.upstream import KEEPALIVE_S
from te.version import version

if TYPE_CHECKING:
    from sglang_mooncake.router.store_source import StoreSource

__all__ = ["VIEWS", "make_app", "servers_of"]

VIEWS: Final = web.AppKey("views", Mapping[Server, Sequence[PrefillView]])
"""What is known of each prefill server, by its DP ranks."""

_NO_KEYS: Final = Keys()


def servers_of(options: Options) -> Servers:
    """The servers that the command line names."""
    prefill = [Server("prefill", url, port) for url, port in options.prefill]
    return Servers([*prefill, *(Server("decode", url) for url in options.decode)])


async def make_app(
    options: Options,
    servers: Servers,
    random: Random,
    clock: Callable[[], float] = time.monotonic,
    keys: Keys = _NO_KEYS,
    pool: StoreSource | None = None,
    tokens: Tokens | None = None,
) -> web.Application:
    """The application in front of ``servers``, for the running loop. What it opens it closes when
    it is cleaned up. ``keys``: of the deployment's secret, for registries, and for those who
    register caches. ``pool``: the store that prefill servers load from. ``tokens``: the model's
    tokenizer."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )
    counts = Counts()
    forwarder = Forwarder(options.request_timeout_s, options.max_body_bytes, clock)
    routing = Routing(options, servers, forwarder, counts, random, clock, pool, tokens)
    most = streams_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    registered = Registered(most.registered)
    prober = Prober(session, servers, options, forwarder.upstream, clock)
    watching = [asyncio.create_task(kept_up("asking servers for their health", prober.run))]
    if options.prefill_policy == CACHE_AWARE:
        headers = request_headers({}, options.api_key)
        source = EventSource(
            session, routing.followed, routing.ranks_of, registered, headers, most, clock
        )
        watching.append(asyncio.create_task(kept_up("following KV events", source.run)))
    if options.decode_policy == CACHE_AWARE:
        headers = request_headers({}, options.api_key)
        loads = LoadSource(session, lambda: routing.decode.views, headers, clock)
        watching.append(asyncio.create_task(kept_up("asking for loads", loads.run)))
    if pool is not None:
        watching.append(asyncio.create_task(kept_up("looking after the store", pool.run)))
    membership = Membership(servers)
    registries = RegistrySource(
        options.registries,
        keys,
        membership,
        lambda _: routing.servers_changed(),
        lambda: report_of(counts, known, options.port, version()),
        clock,
    )
    known = Known(servers, routing.views, routing.decode, routing.gate, registries.registries, pool)
    if options.registries:
        watching.append(asyncio.create_task(kept_up("asking registries", registries.run)))

    async def close(_: web.Application) -> None:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await forwarder.close()
        await session.close()

    guards = [only_proved(keys.registry)] if keys else []
    app = web.Application(client_max_size=options.max_body_bytes, middlewares=[*guards, _sentences])
    app[VIEWS] = routing.views
    app.on_cleanup.append(close)
    app.add_routes([web.post(path, routing.answer) for path in (GENERATE, COMPLETIONS, CHAT)])
    app.add_routes(Asking(session, servers, options, routing.forget_caches).routes())
    app.add_routes(Querying(routing.views, registered, pool, clock).routes())
    app.add_routes(_Own(known, counts, clock).routes())
    return app


class _Own:
    """What the router tells of itself."""

    def __init__(
        self,
        known: Known,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._known, self._counts, self._clock = known, counts, clock
        self._build = build_text(version())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.alive),
            web.get("/liveness", self.alive),
            web.get("/readiness", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/v1/router", self.status),
            web.get("/", self.page),
        ]

    async def alive(self, _: web.Request) -> web.Response:
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        for role in ROLES:
            if not self._known.servers.usable(role):
                why = self._known.servers.nobody(role)
                return error_response(HTTPStatus.SERVICE_UNAVAILABLE, why)
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        lines = text(self._counts, self._known, KINDS, self._clock())
        body = "\n".join([*lines, *process_lines(), ""]) + self._build
        return web.Response(body=body.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def status(self, _: web.Request) -> web.Response:
        return web.json_response(self._status())

    async def page(self, _: web.Request) -> web.Response:
        return web.Response(text=as_text(self._status()))

    def _status(self) -> dict[str, Any]:
        return as_json(self._counts, self._known, self._clock())


@web.middleware
async def _sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of aiohttp's own in the form of all others."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return error_response(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            "the request is longer than the router takes (--max-payload-size)",
        )
    except web.HTTPRequestTimeout:
        return error_response(
            HTTPStatus.REQUEST_TIMEOUT, f"the request did not come within {BODY_S:g} s"
        )
    except RequestError as error:
        return error_response(HTTPStatus.BAD_REQUEST, str(error))
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return error_response(
            error.status, f"the router does not serve {request.method} {excerpt(request.path)}"
        )
