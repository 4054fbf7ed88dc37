# SPDX-License-Identifier: Apache-2.0
"""Questions that go to every server, or to any one, instead of to a pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from sglang_mooncake.router.failing import begin_of
from sglang_mooncake.router.forwarding import request_headers
from sglang_mooncake.router.options import Options
from sglang_mooncake.router.routing import error_response, whole
from sglang_mooncake.router.servers import ROLES, Server, Servers

__all__ = ["Asking"]

#: Some of these wait for the scheduler (GET /health_generate: up to 20 s).
ANSWER_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 16 << 20
#: What benchmarks of SGLang look for where no server tells of it.
_NO_STATES: Final[list[dict[str, Any]]] = [
    {"last_gen_throughput": 0.0, "avg_spec_accept_length": None}
]


class _Said(NamedTuple):
    """What a server has answered; status 0 and why, if it has not."""

    status: int
    raw: bytes

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK


class Asking:
    """The routes of such questions."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Servers,
        options: Options,
        on_flush: Callable[[], None],
    ) -> None:
        """``on_flush`` is called when the servers' caches have been flushed."""
        self._session, self._servers, self._options = session, servers, options
        self._on_flush = on_flush

    def routes(self) -> list[web.RouteDef]:
        """As mini-lb has them, and some more of SGLang's."""
        return [
            web.get("/health_generate", self.health_generate),
            web.get("/flush_cache", self.flush),
            web.post("/flush_cache", self.flush),
            web.post("/abort_request", self.of_all),
            web.get("/get_server_info", self.server_info),
            web.get("/server_info", self.server_info),
            web.get("/get_model_info", self.of_one),
            web.get("/model_info", self.of_one),
            web.get("/v1/models", self.of_one),
        ]

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 if a server of each role can generate."""
        said = await self._all(request, "/health_generate")
        for role in ROLES:
            if not any(said[server].is_ok for server in self._servers.of(role)):
                return error_response(
                    HTTPStatus.SERVICE_UNAVAILABLE, f"no {role} server can generate"
                )
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        """As ``of_all``."""
        try:
            return await self.of_all(request)
        finally:  # A client that leaves has been taken at its word by some of them.
            self._on_flush()

    async def of_all(self, request: web.Request) -> web.Response:
        """200 if every server that is well answers so; else what the others say."""
        said = await self._all(request, request.path)
        bad = {
            server.url: one.raw.decode(errors="replace")[:1000] or f"status {one.status}"
            for server, one in said.items()
            if not one.is_ok and server.is_well
        }
        if bad:
            return error_response(HTTPStatus.BAD_GATEWAY, f"{request.path} failed: {bad}")
        return web.Response()

    async def of_one(self, request: web.Request) -> web.Response:
        """What the first server that answers says: they serve the same model."""
        last: _Said | None = None
        raw = await whole(request)
        for server in self._servers.usable("prefill") + self._servers.usable("decode"):
            last = await self._ask(server, request, request.path, raw)
            if last.status:
                return web.Response(
                    body=last.raw, status=last.status, content_type="application/json"
                )
        why = "no server is well" if last is None else last.raw.decode(errors="replace")
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, why)

    async def server_info(self, request: web.Request) -> web.Response:
        """In the form of mini-lb: what each server says, by role."""
        said = await self._all(request, "/server_info")
        told = {
            role: _decoded([said[server] for server in self._servers.of(role)]) for role in ROLES
        }
        states = [state for one in told["decode"] for state in one.get("internal_states", ())]
        return web.json_response({"internal_states": states or _NO_STATES, **told})

    async def _all(self, request: web.Request, path: str) -> Mapping[Server, _Said]:
        servers = self._servers.all()
        raw = await whole(request)  # Here, since one alone can wait for it.
        said = await asyncio.gather(*(self._ask(one, request, path, raw) for one in servers))
        return dict(zip(servers, said, strict=True))

    async def _ask(self, server: Server, request: web.Request, path: str, raw: bytes) -> _Said:
        try:
            async with self._session.request(
                request.method,
                server.url + path,
                params=request.query,
                data=raw or None,
                headers=request_headers(request.headers, self._options.api_key),
                timeout=aiohttp.ClientTimeout(total=ANSWER_S),
            ) as response:
                return _Said(response.status, await begin_of(response.content, ANSWER_BYTES_MAX))
        except (aiohttp.ClientError, TimeoutError) as error:
            return _Said(0, f"{server}: {error or type(error).__name__}".encode())


def _decoded(said: Sequence[_Said]) -> list[dict[str, Any]]:
    found = []
    for one in said:
        if not one.is_ok:
            continue
        try:
            found.append(msgspec.json.decode(one.raw, type=dict[str, Any]))
        except msgspec.DecodeError:
            continue
    return found
