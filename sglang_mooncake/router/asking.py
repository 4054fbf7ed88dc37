# SPDX-License-Identifier: Apache-2.0
"""Questions that go to every server, or to any one, instead of to a pair."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import aiohttp
from aiohttp import web

from sglang_mooncake.router.headers import request_headers
from sglang_mooncake.router.options import Options
from sglang_mooncake.router.questions import SERVER_INFO, Said, ask, decoded
from sglang_mooncake.router.routing import error_response, whole
from sglang_mooncake.router.servers import ROLES, Server, Servers

__all__ = ["Asking"]

#: What benchmarks of SGLang look for where no server tells of it.
_NO_STATES: Final[list[dict[str, Any]]] = [
    {"last_gen_throughput": 0.0, "avg_spec_accept_length": None}
]


_Object: TypeAlias = dict[str, Any]


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
        asked = {
            "/health_generate": self.health_generate,
            "/flush_cache": self.flush,
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/get_model_info": self.of_one,
            "/model_info": self.of_one,
            "/v1/models": self.of_one,
        }
        return [
            # SGLang's servers know no HEAD: what was answered to it would be their refusal.
            *(web.get(path, answer, allow_head=False) for path, answer in asked.items()),
            web.post("/flush_cache", self.flush),
            web.post("/abort_request", self.of_all),
        ]

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 if a server of each role can generate."""
        said = await self._all(request, "/health_generate")
        for role in ROLES:
            if not any(one.is_ok for server, one in said.items() if server.role == role):
                return error_response(
                    HTTPStatus.SERVICE_UNAVAILABLE, f"no {role} server can generate"
                )
        return web.Response()

    async def flush(self, request: web.Request) -> web.Response:
        """As ``of_all``. Servers may be told to wait (``?timeout=``) until nothing is under way."""
        try:
            return await self._of_all(request, self._wait_s(request.query.get("timeout", "")))
        finally:  # A client that leaves has been taken at its word by some of them.
            self._on_flush()

    async def of_all(self, request: web.Request) -> web.Response:
        """200 if every server that is there answers so; else what the others say. Whether one
        counts as well says nothing here: one that hangs keeps its cache and its requests."""
        return await self._of_all(request, 0.0)

    async def _of_all(self, request: web.Request, wait_s: float) -> web.Response:
        said = await self._all(request, request.path, wait_s)
        bad = {
            server.url: one.raw.decode(errors="replace")[:1000] or f"status {one.status}"
            for server, one in said.items()
            if not one.is_ok and not one.is_gone
        }
        if bad:
            return error_response(HTTPStatus.BAD_GATEWAY, f"{request.path} failed: {bad}")
        if not any(one.is_ok for one in said.values()):
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "no server is there")
        return web.Response()

    async def of_one(self, request: web.Request) -> web.Response:
        """What the first server that answers says: they serve the same model."""
        last: Said | None = None
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
        said = await self._all(request, SERVER_INFO)
        told = {
            role: _objects(one for server, one in said.items() if server.role == role)
            for role in ROLES
        }
        states = [state for one in told["decode"] for state in _states(one)]
        return web.json_response({"internal_states": states or _NO_STATES, **told})

    def _wait_s(self, text: str) -> float:
        """A server says what is wrong with what is no time."""
        try:
            asked_s = float(text)
        except ValueError:
            return 0.0
        return min(asked_s, self._options.request_timeout_s) if asked_s > 0.0 else 0.0

    async def _all(
        self, request: web.Request, path: str, wait_s: float = 0.0
    ) -> Mapping[Server, Said]:
        servers = self._servers.all()
        raw = await whole(request)  # Here, since one alone can wait for it.
        asked = (self._ask(one, request, path, raw, wait_s) for one in servers)
        said = await asyncio.gather(*asked)
        return dict(zip(servers, said, strict=True))

    async def _ask(
        self, server: Server, request: web.Request, path: str, raw: bytes, wait_s: float = 0.0
    ) -> Said:
        headers = request_headers(request.headers, self._options.api_key)
        return await ask(
            self._session,
            server,
            path,
            headers,
            method=request.method,
            query=request.query,
            raw=raw,
            wait_s=wait_s,
        )


def _objects(said: Iterable[Said]) -> list[_Object]:
    """The answers that are JSON objects, in their order."""
    found = (decoded(one, _Object) for one in said)
    return [one for one in found if one is not None]


def _states(told: _Object) -> list[Any]:
    """What a server tells of its schedulers, as benchmarks read it; nothing where it does not."""
    found = told.get("internal_states")
    return found if isinstance(found, list) else []
