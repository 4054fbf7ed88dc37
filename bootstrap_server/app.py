# SPDX-License-Identifier: Apache-2.0
"""HTTP on top of the registry: decode a body, call the pure core, encode the answer.

Two families of routes. SGLang 0.5.23's own (`/route`, `/register_dp_rank`, `/query_dp_ranks`,
`/health`) answer with the status codes and shapes that its `CommonKVManager` and
`CommonKVReceiver` expect, errors as plain text. Ours carry a version in the path (`/v1/…`),
errors as `{"error": sentence}`. Handlers run on one event loop and never await between
reading and writing the registry, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from bootstrap_server.errors import NotReady, RegistrationRefused
from bootstrap_server.records import RANKS_MAX, Rank, RankCoords, RankRecord
from bootstrap_server.registry import Registry, RoomTable
from bootstrap_server.sglang_http import (
    QueryBody,
    RoomBody,
    RouteBody,
    rank_answer,
    topology_answer,
)

__all__ = ["BODY_BYTES_MAX", "make_app"]

logger = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 1 << 20
#: A body of at most 1 MiB needs far less; a slow client must not hold a connection for ever.
BODY_DEADLINE_S: Final = 10.0

#: Query parameters of `GET /route`, in the order of `RankCoords`.
_ROUTE_PARAMETERS: Final = (
    "prefill_dp_rank",
    "prefill_cp_rank",
    "target_tp_rank",
    "target_pp_rank",
)
_RANK_PATTERN: Final = re.compile("-?[0-9]{1,9}")
_PATHS: Final = (
    "/route, /register_dp_rank, /query_dp_ranks, /health (SGLang 0.5.23) and "
    "/v1/ranks, /v1/instance"
)

_T = TypeVar("_T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _RefusalError(Exception):
    """A request that gets a 4xx: status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def make_app(registry: Registry, rooms: RoomTable, clock: Callable[[], float]) -> web.Application:
    """The application over `registry` and `rooms`; `clock` gives monotonic seconds."""
    handlers = _Handlers(registry, rooms, clock)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_sentences])
    app.add_routes(
        [
            web.put("/route", handlers.put_route),
            web.get("/route", handlers.get_route),
            web.post("/register_dp_rank", handlers.register_dp_rank),
            web.post("/query_dp_ranks", handlers.query_dp_ranks),
            web.get("/health", handlers.health),
            web.put("/v1/ranks", handlers.put_rank),
            web.get("/v1/instance", handlers.get_instance),
        ]
    )
    return app


class _Handlers:
    def __init__(self, registry: Registry, rooms: RoomTable, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._rooms = rooms
        self._clock = clock

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def put_rank(self, request: web.Request) -> web.Response:
        self._register(await _body(request, RankRecord), refused_status=409)
        return web.Response(text="OK")

    async def put_route(self, request: web.Request) -> web.Response:
        body = await _body(request, RouteBody)
        try:
            record = body.record()
        except ValueError as error:
            raise _RefusalError(400, f"PUT /route: bad value: {error}") from error
        # SGLang's server answers 400 to a rank that contradicts the others.
        self._register(record, refused_status=400)
        return web.Response(text="OK")

    def _register(self, record: RankRecord, refused_status: int) -> None:
        generation = self._registry.generation
        try:
            self._registry.register(record)
        except RegistrationRefused as error:
            logger.warning("registration refused: %s", error)
            raise _RefusalError(refused_status, str(error)) from error
        if generation not in (0, self._registry.generation):
            logger.warning(
                "generation %d of the instance begins: rank %s started with other flags",
                self._registry.generation,
                record.rank.coords,
            )
        logger.info(
            "rank %s registered from %s port %d (%d of %d)",
            record.rank.coords,
            record.rank.host,
            record.rank.port,
            self._registry.registered,
            self._registry.expected,
        )

    async def get_instance(self, _: web.Request) -> web.Response:
        return _json(msgspec.json.encode(self._registry.snapshot()))

    async def get_route(self, request: web.Request) -> web.Response:
        numbers = tuple(_query_number(request, name) for name in _ROUTE_PARAMETERS)
        if all(number == -1 for number in numbers):
            return _json(msgspec.json.encode(topology_answer(self._registry.snapshot())))
        try:
            coords = RankCoords(*numbers)
        except ValueError as error:
            raise _RefusalError(400, f"GET /route: {error}") from error
        if not self._registry.ready:
            raise self._registry.not_ready()
        return _json(msgspec.json.encode(rank_answer(self._stock_rank(coords))))

    def _stock_rank(self, coords: RankCoords) -> Rank:
        rank, config = self._registry.find(coords), self._registry.config
        if rank is None or config is None:
            raise _RefusalError(404, f"rank {coords} does not exist in this prefill instance")
        if config.protocol != 0:
            # A stock decode rank would talk SGLang's wire format to this endpoint and wait for
            # its time-out; refused here, its request fails at once and its log says why.
            raise _RefusalError(
                409,
                f"prefill rank {coords} speaks hand-over protocol {config.protocol} of "
                "sglang-mooncake, not stock SGLang's; install sglang-mooncake on the decode server",
            )
        return rank

    async def register_dp_rank(self, request: web.Request) -> web.Response:
        body = await _body(request, RoomBody)
        config = self._registry.config
        dp_size = RANKS_MAX if config is None else config.topology.dp_size
        if not 0 <= body.dp_rank < dp_size:
            raise _RefusalError(400, f"dp_rank {body.dp_rank} does not exist: dp_size is {dp_size}")
        self._rooms.register(body.bootstrap_room, body.dp_rank, self._clock())
        return web.Response(text="OK")

    async def query_dp_ranks(self, request: web.Request) -> web.Response:
        body = await _body(request, QueryBody)
        found = self._rooms.query(body.bootstrap_rooms, self._clock())
        return _json(msgspec.json.encode({str(room): dp_rank for room, dp_rank in found.items()}))


@web.middleware
async def _sentences(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn everything that is refused into a status and one sentence."""
    try:
        return await handler(request)
    except _RefusalError as refusal:
        return _error(request, refusal.status, str(refusal))
    except NotReady as error:
        details: dict[str, object] = {
            "registered": error.registered,
            "expected": error.expected,
            "missing": error.missing,
            "note": error.note,
        }
        return _error(request, 503, str(error), details)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        sentence = f"{request.method} is not allowed on {request.path}, only {allowed}"
        return _error(request, 405, sentence, headers={"Allow": allowed})
    except web.HTTPNotFound:
        sentence = f"{request.path} does not exist; this bootstrap server answers {_PATHS}"
        return _error(request, 404, sentence)


def _error(
    request: web.Request,
    status: int,
    sentence: str,
    details: dict[str, object] | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    if request.path.startswith("/v"):
        response = _json(msgspec.json.encode({"error": sentence, **(details or {})}), status)
    else:
        response = web.Response(text=sentence, status=status)
    response.headers.update(headers or {})
    return response


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


async def _body(request: web.Request, kind: type[_T]) -> _T:
    """The request's body as a `kind`; `_RefusalError` when it is too large, too slow or not one."""
    what = f"{request.method} {request.path}"
    too_large = _RefusalError(413, f"{what}: the body is larger than {BODY_BYTES_MAX} bytes")
    # Asked before reading, so that a client that says so is not listened to at all.
    if request.content_length is not None and request.content_length > BODY_BYTES_MAX:
        raise too_large
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            data = await request.read()
    except TimeoutError as error:
        sentence = f"{what}: the body did not arrive within {BODY_DEADLINE_S:g} s"
        raise _RefusalError(408, sentence) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _RefusalError(400, f"{what}: bad body: {error}") from error


def _query_number(request: web.Request, name: str) -> int:
    text = request.query.get(name)
    if not text:
        raise _RefusalError(400, f"GET /route: query parameter {name} is missing")
    # int() alone would also take "1_0", " 1" and digits of other scripts.
    if not _RANK_PATTERN.fullmatch(text):
        raise _RefusalError(400, f"GET /route: query parameter {name} is not a rank: {text[:40]!r}")
    return int(text)
