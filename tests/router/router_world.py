# SPDX-License-Identifier: Apache-2.0
"""Servers that answer as a test says, and a router in front of them, in one event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from te_ports import held_port

from bootstrap_server.admission.secret import Keys
from sglang_mooncake.router.app import VIEWS, make_app, servers_of
from sglang_mooncake.router.looking import Tokens
from sglang_mooncake.router.options import Options
from sglang_mooncake.router.pages import names_of, token_digests
from sglang_mooncake.router.servers import Role, Server, Servers
from sglang_mooncake.router.store_source import StoreSource

T = TypeVar("T")
#: Far beyond what is needed, also on a busy machine.
BOUND_S = 60.0
_NO_KEYS = Keys()

Answer = Callable[["FakeServer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def run(job: Coroutine[Any, Any, T]) -> T:
    """Within ``BOUND_S``, on the event loop on which the router runs."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(job, BOUND_S))


async def until(holds: Callable[[], object]) -> None:
    """Returns when it does."""
    while not holds():
        await asyncio.sleep(0.005)


def stand_still(seconds: float) -> None:
    """As the event loop does on a busy machine: nothing that has come is seen meanwhile."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class FakeServer:
    """A prefill or decode server. ``answer`` makes its answers, ``script`` the next ones."""

    def __init__(self, role: Role, rooms: set[int], host: str = "127.0.0.1") -> None:
        """``rooms``: those that prefill servers have been asked for, for all servers of a world.
        ``host``: the address at which it listens."""
        self.role, self.rooms, self._host = role, rooms, host
        self.answer: Answer = answers_at_once
        self.script: list[Answer] = []
        self.health = 200
        #: As a process that was stopped: it takes connections, and does not answer.
        self.stands_still = False
        #: How often it was asked for that.
        self.probes = 0
        #: While it is, it answers nothing but requests and questions for its health.
        self.is_slow = False
        #: What it tells of itself.
        self.info: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        #: Requests to all other routes.
        self.others: list[tuple[str, Any]] = []
        #: Requests whose clients have left.
        self.left = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return url_of(self._host, self.port)

    async def start(self) -> None:
        """At the port that it had before, if it had one."""
        app = web.Application(client_max_size=16 << 20)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_route("*", "/{path:.*}", self._other)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        if self.role == "prefill":
            self.rooms.add(body["bootstrap_room"])
        answer = self.script.pop(0) if self.script else self.answer
        try:
            return await answer(self, request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise

    async def _other(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if request.path == "/health":
            self.probes += 1
            await until(lambda: not self.stands_still)
            return web.Response(status=self.health)
        self.others.append((request.path, json.loads(raw) if raw else None))
        await until(lambda: not self.is_slow)
        states = {"at": request.path, "internal_states": [{"port": self.port}]}
        return await in_two_pieces(request, {**states, **self.info})


async def in_two_pieces(
    request: web.Request, value: object, status: int = 200
) -> web.StreamResponse:
    """JSON whose second half comes a little later, as over a network."""
    raw = json.dumps(value).encode()
    response = web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
    response.content_length = len(raw)
    await response.prepare(request)
    await response.write(raw[: len(raw) // 2])
    await asyncio.sleep(0.01)
    await response.write(raw[len(raw) // 2 :])
    return response


def as_event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def begin_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def answers_at_once(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Three tokens, once a prefill server has been asked, too; a prefill server one."""
    await until(lambda: body["bootstrap_room"] in server.rooms)
    count = 1 if server.role == "prefill" else 3
    tokens = list(range(100, 100 + count))
    if not body.get("stream"):
        return web.json_response({"output_ids": tokens, "meta_info": {"of": server.role}})
    response = await begin_stream(request)
    for n in range(1, count + 1):
        await response.write(as_event({"output_ids": tokens[:n], "meta_info": {}}))
    await response.write(b"data: [DONE]\n\n")
    return response


async def never_answers(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def begins_and_hangs(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """A head and no token, as a decode server that waits for a hand-over."""
    response = await begin_stream(request)
    await asyncio.Event().wait()
    return response


async def hangs_up(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """As a process that is killed."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hangs_up_in_the_middle(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    if body.get("stream"):
        response = await begin_stream(request)
        await response.write(as_event({"output_ids": [100]}))
    else:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"output_ids": [')
    assert request.transport is not None
    await asyncio.sleep(0)
    request.transport.close()
    return response


def answers(value: object, status: int = 200) -> Answer:
    """With this JSON, or with these events where the client asked for a stream."""

    async def answer(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if not body.get("stream") or status != 200:
            return await in_two_pieces(request, value, status)
        response = await begin_stream(request)
        assert isinstance(value, list)
        for event in value:
            await response.write(as_event(event))
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def options(**more: Any) -> Options:
    """Options of a router. Probes are rare, so that they do not disturb what a test counts."""
    usual: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "prefill": (),
        "decode": (),
        "registries": (),
        "secret_file": None,
        "store": None,
        "tokenizer": None,
        "prefill_policy": "round_robin",
        "decode_policy": "round_robin",
        "request_timeout_s": BOUND_S,
        "health_interval_s": 100.0,
        "health_timeout_s": 5.0,
        "health_failures": 3,
        "max_requests": None,
        "queue_size": 0,
        "queue_timeout_s": BOUND_S,
        "tenant_header": None,
        "default_priority": 0,
        "is_low_first": False,
        "ttft_max_s": None,
        "tbt_max_s": None,
        "max_body_bytes": 1 << 18,
        "retries": 1,
        "api_key": None,
        "log_level": "info",
    }
    return Options(**{**usual, **more})


class World:
    """Prefill servers, decode servers, a router and a client. Use it as a context manager."""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        are_named: bool = True,
        host: str = "127.0.0.1",
        keys: Keys = _NO_KEYS,
        pool: StoreSource | None = None,
        tokens: Tokens | None = None,
        **more: Any,
    ) -> None:
        """``are_named``: the router knows the servers from the beginning. ``host``: of the servers
        and the router. ``more``: of the router's options."""
        self._are_named, self._host, self._keys = are_named, host, keys
        self._pool, self._tokens = pool, tokens
        rooms: set[int] = set()
        self.prefill = [FakeServer("prefill", rooms, host) for _ in range(prefill)]
        self.decode = [FakeServer("decode", rooms, host) for _ in range(decode)]
        self.url = ""
        self.servers = Servers(())
        self._more = more
        self._undo = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for server in (*self.prefill, *self.decode):
            server.port = self._undo.enter_context(held_port(self._host))
            await server.start()
            self._undo.push_async_callback(server.stop)
        told = options(**self._more)
        if self._are_named:
            told = msgspec.structs.replace(
                told,
                prefill=tuple((one.url, 8998) for one in self.prefill),
                decode=tuple(one.url for one in self.decode),
            )
        self.servers = servers_of(told)
        app = await make_app(
            told, self.servers, Random(7), keys=self._keys, pool=self._pool, tokens=self._tokens
        )
        self.views = app[VIEWS]
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self._undo.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, self._host, 0).start()
        self.url = url_of(self._host, runner.addresses[0][1])
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self.client = await self._undo.enter_async_context(
            aiohttp.ClientSession(connector=connector)
        )
        if self._are_named:
            await until(lambda: all(one.probes for one in (*self.prefill, *self.decode)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._undo.aclose()

    async def idle(self) -> None:
        """Returns when nothing is under way: prefill servers may answer after decode servers."""
        await until(lambda: not any(server.under_way for server in self.servers.all()))

    def known(self, fake: FakeServer) -> Server:
        """What the router has of it."""
        return next(one for one in self.servers.all() if one.url == fake.url)

    async def ask(
        self, path: str = "/generate", headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, Any]:
        """Status and JSON of an answer; the events of a stream."""
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            text = await response.text()
        if response.content_type != "text/event-stream":
            return response.status, json.loads(text)
        events = [one.removeprefix("data: ") for one in text.split("\n\n") if one]
        return response.status, [one if one == "[DONE]" else json.loads(one) for one in events]

    async def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        async with self.client.request(method, self.url + path) as response:
            return response.status, await response.text()


def token_names(tokens: Sequence[int], page_size: int, seed: bytes = b"") -> list[int]:
    """The names of its pages, as KV events have them."""
    return names_of(token_digests(tokens, page_size, seed))
