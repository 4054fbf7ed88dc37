# SPDX-License-Identifier: Apache-2.0
"""HTTP on top of the registry: decode a body, call the pure core, encode the answer.

Two families of routes. SGLang 0.5.23's own (`/route`, `/register_dp_rank`, `/query_dp_ranks`,
`/health`) answer with the status codes and shapes that its `CommonKVManager` and
`CommonKVReceiver` expect, errors as plain text; they serve the instance `default`. Ours carry a
version and the name of an instance in the path, errors as `{"error": sentence}`:

| route | body | answer |
|---|---|---|
| `GET /v1/instances` | | how many ranks each instance has |
| `GET /v1/instances/NAME` | | `Instance`, or 503 and who is missing |
| `PUT /v1/instances/NAME/ranks` | `RankRecord` | `{"lease_s": …}`, or 409 |
| `PUT /v1/instances/NAME/leases` | `RankLife` | `{"lease_s": …}`, or 410: no such lease |
| `DELETE /v1/instances/NAME/leases` | `RankLife` | `OK`, or 410 |

`GET /v1/instances/NAME?wait_s=…&after=…` waits until the instance is ready with a revision above
`after`. A 409 has `left_s` where a live rank holds the place: how long, unless it renews.

With keys a `Gate` stands before all of them but `GET /health`.

Handlers run on one event loop and never await between reading and writing the registry, so
there are no locks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec.json import Decoder

from bootstrap_server.connections import ConnectionWatch
from bootstrap_server.errors import (
    LeaseLost,
    NotReady,
    PlaceTaken,
    RegistrationRefused,
    RegistryFull,
)
from bootstrap_server.gate import Gate, guard
from bootstrap_server.http_body import (
    BODY_BYTES_MAX,
    RefusalError,
    Snapshot,
    error_response,
    hear_body,
    json_response,
    read_body,
)
from bootstrap_server.instance import InstanceTable
from bootstrap_server.records import RANKS_MAX, Rank, RankCoords, RankLife, RankRecord
from bootstrap_server.refusals import Refusals
from bootstrap_server.registry import Registry
from bootstrap_server.rooms import RoomTable
from bootstrap_server.sglang_http import (
    QueryBody,
    RoomBody,
    RouteBody,
    rank_answer,
    topology_answer,
)
from bootstrap_server.waiting import WAIT_MAX_S, Waiting

__all__ = ["log_lapsed", "make_app"]

logger = logging.getLogger(__name__)

_RECORD = Decoder(RankRecord)
_LIFE = Decoder(RankLife)
_ROUTE = Decoder(RouteBody)
_ROOM = Decoder(RoomBody)
_QUERY = Decoder(QueryBody)

#: Query parameters of `GET /route`, in the order of `RankCoords`.
_ROUTE_PARAMETERS: Final = (
    "prefill_dp_rank",
    "prefill_cp_rank",
    "target_tp_rank",
    "target_pp_rank",
)
_RANK_PATTERN: Final = re.compile("-?[0-9]{1,9}")
_REVISION_PATTERN: Final = re.compile("[0-9]{1,19}")
_SECONDS_PATTERN: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?")
_PATHS: Final = (
    "/route, /register_dp_rank, /query_dp_ranks, /health (SGLang 0.5.23) and /v1/instances, "
    "/v1/instances/NAME, /v1/instances/NAME/ranks, /v1/instances/NAME/leases"
)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    registry: Registry,
    rooms: RoomTable,
    clock: Callable[[], float],
    watch: ConnectionWatch,
    gate: Gate | None = None,
) -> web.Application:
    """The application over `registry` and `rooms`; `clock` gives the seconds of leases and
    rooms, `watch` hears of every request that has begun, `gate` says whose requests are served
    (None: everybody's)."""
    handlers = _Handlers(registry, rooms, clock)

    @web.middleware
    async def hear(request: web.Request, handler: _Handler) -> web.StreamResponse:
        watch.heard(request.transport)
        response = await handler(request)
        if watch.crowded:
            response.force_close()
        return response

    @web.middleware
    async def hear_out(request: web.Request, handler: _Handler) -> web.StreamResponse:
        await hear_body(request)
        watch.proved(request.transport)
        return await handler(request)

    middlewares: list[Middleware] = [hear, _sentences]
    if gate is None:
        middlewares.append(hear_out)
    else:
        middlewares.insert(
            1, guard(gate, Refusals(), lambda request: watch.proved(request.transport))
        )
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=middlewares)
    app.add_routes(
        [
            web.put("/route", handlers.put_route),
            web.get("/route", handlers.get_route),
            web.post("/register_dp_rank", handlers.register_dp_rank),
            web.post("/query_dp_ranks", handlers.query_dp_ranks),
            web.get("/health", handlers.health),
            web.get("/v1/instances", handlers.get_instances),
            web.get("/v1/instances/{name}", handlers.get_instance),
            web.put("/v1/instances/{name}/ranks", handlers.put_rank),
            web.put("/v1/instances/{name}/leases", handlers.renew),
            web.delete("/v1/instances/{name}/leases", handlers.release),
        ]
    )
    app.on_response_prepare.append(_without_versions)
    app.on_shutdown.append(handlers.let_waiters_go)
    return app


async def _without_versions(_: web.Request, response: web.StreamResponse) -> None:
    """Strangers need not know which releases of Python and aiohttp answer them."""
    response.headers.pop("Server", None)


def log_lapsed(lapsed: Iterable[tuple[str, Rank]]) -> None:
    """Say which ranks are forgotten, each with the name of its instance."""
    for name, rank in lapsed:
        logger.warning(
            "rank %s of instance %s, at %s port %d, has not renewed its lease and was removed "
            "from the registry",
            rank.coords,
            name,
            rank.host,
            rank.port,
        )


class _Handlers:
    def __init__(self, registry: Registry, rooms: RoomTable, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._rooms = rooms
        self._clock = clock
        self._waiting = Waiting()
        #: By instance name: the revision that it shows, and the encoded instance.
        self._snapshots: dict[str, tuple[int, Snapshot]] = {}

    # --- ranks ---

    async def put_rank(self, request: web.Request) -> web.Response:
        record = await read_body(request, _RECORD)
        self._register(_name(request), record, refused_status=409, leased=True)
        return json_response({"lease_s": self._registry.lease_s})

    async def put_route(self, request: web.Request) -> web.Response:
        body = await read_body(request, _ROUTE)
        try:
            record = body.record()
        except ValueError as error:
            raise RefusalError(400, f"PUT /route: bad value: {error}") from error
        # SGLang's server answers 400 to a rank that contradicts the others.
        self._register(self._registry.default.name, record, refused_status=400, leased=False)
        return web.Response(text="OK")

    def _register(
        self, name: str, record: RankRecord, refused_status: int, *, leased: bool
    ) -> None:
        rank, generation = record.rank, self._table(name).generation
        try:
            table = self._registry.register(name, record, self._clock(), leased=leased)
        except PlaceTaken as error:
            raise RefusalError(refused_status, str(error), left_s=error.left_s) from error
        except RegistrationRefused as error:
            logger.warning("registration refused: %s", error)
            raise RefusalError(refused_status, str(error)) from error
        except RegistryFull as error:
            raise RefusalError(429, str(error)) from error
        if generation not in (0, table.generation):
            logger.warning(
                "generation %d of instance %s begins: rank %s has a configuration that differs "
                "from the former ranks'",
                table.generation,
                name,
                rank.coords,
            )
        logger.info(
            "rank %s of instance %s registered from %s port %d (%d of %d)",
            rank.coords,
            name,
            rank.host,
            rank.port,
            table.registered,
            table.expected,
        )
        if table.ready:
            self._waiting.wake(name)

    async def renew(self, request: web.Request) -> web.Response:
        life = await read_body(request, _LIFE)
        try:
            self._table(_name(request)).renew(life.coords, life.epoch, self._clock())
        except LeaseLost as error:
            raise RefusalError(410, str(error)) from error
        return json_response({"lease_s": self._registry.lease_s})

    async def release(self, request: web.Request) -> web.Response:
        life = await read_body(request, _LIFE)
        try:
            self._table(_name(request)).release(life.coords, life.epoch, self._clock())
        except LeaseLost as error:
            raise RefusalError(410, str(error)) from error
        logger.info("rank %s of instance %s was shut down", life.coords, _name(request))
        return web.Response(text="OK")

    # --- instances ---

    def _table(self, name: str) -> InstanceTable:
        """The instance of that name without ranks whose leases have lapsed."""
        try:
            table = self._registry.get(name)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error
        log_lapsed((name, rank) for rank in table.expire(self._clock()))
        return table

    async def get_instances(self, _: web.Request) -> web.Response:
        return json_response(
            {
                table.name: {
                    "registered": table.registered,
                    "expected": table.expected,
                    "generation": table.generation,
                    "revision": table.revision,
                }
                for table in self._registry.tables()
            }
        )

    async def get_instance(self, request: web.Request) -> web.Response:
        name, wait_s = _name(request), _wait_s(request)
        after = _revision(request)

        def is_there() -> bool:
            table = self._table(name)
            return table.ready and table.revision > after

        if not is_there() and wait_s > 0:
            try:
                await self._waiting.until(name, is_there, wait_s)
            except RegistryFull as error:
                raise RefusalError(429, str(error)) from error
        return self._snapshot(self._table(name)).response(request)

    def _snapshot(self, table: InstanceTable) -> Snapshot:
        revision, snapshot = self._snapshots.get(table.name, (-1, None))
        if snapshot is None or revision != table.revision:
            snapshot = Snapshot(table.snapshot())
            known = {known.name for known in self._registry.tables()}
            self._snapshots = {n: kept for n, kept in self._snapshots.items() if n in known}
            self._snapshots[table.name] = (table.revision, snapshot)
        return snapshot

    async def let_waiters_go(self, _: web.Application) -> None:
        self._waiting.close()

    # --- SGLang's routes ---

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def get_route(self, request: web.Request) -> web.Response:
        numbers = tuple(_query_number(request, name) for name in _ROUTE_PARAMETERS)
        table = self._table(self._registry.default.name)
        if all(number == -1 for number in numbers):
            return json_response(topology_answer(table.snapshot()))
        try:
            coords = RankCoords(*numbers)
        except ValueError as error:
            raise RefusalError(400, f"GET /route: {error}") from error
        if not table.ready:
            raise table.not_ready()
        return json_response(rank_answer(_stock_rank(table, coords)))

    async def register_dp_rank(self, request: web.Request) -> web.Response:
        body = await read_body(request, _ROOM)
        config = self._table(body.instance).config
        dp_size = RANKS_MAX if config is None else config.topology.dp_size
        if not 0 <= body.dp_rank < dp_size:
            raise RefusalError(400, f"dp_rank {body.dp_rank} does not exist: dp_size is {dp_size}")
        self._rooms.register(body.bootstrap_room, body.dp_rank, self._clock())
        return web.Response(text="OK")

    async def query_dp_ranks(self, request: web.Request) -> web.Response:
        body = await read_body(request, _QUERY)
        found = self._rooms.query(body.bootstrap_rooms, self._clock())
        return json_response({str(room): dp_rank for room, dp_rank in found.items()})


def _stock_rank(table: InstanceTable, coords: RankCoords) -> Rank:
    rank, config = table.find(coords), table.config
    if rank is None or config is None:
        raise RefusalError(404, f"rank {coords} does not exist in this prefill instance")
    if config.protocol != 0:
        # A stock decode rank would talk SGLang's wire format to this endpoint and wait for
        # its time-out; refused here, its request fails at once and its log says why.
        raise RefusalError(
            409,
            f"prefill rank {coords} speaks hand-over protocol {config.protocol} of "
            "sglang-mooncake, not stock SGLang's; install sglang-mooncake on the decode server",
        )
    return rank


@web.middleware
async def _sentences(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn everything that is refused into a status and one sentence."""
    try:
        return await handler(request)
    except RefusalError as refusal:
        return error_response(request, refusal)
    except NotReady as error:
        fields = ("registered", "expected", "missing", "note", "instance")
        details = {name: getattr(error, name) for name in fields}
        return error_response(request, RefusalError(503, str(error), **details))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        sentence = f"{request.method} is not allowed on {request.path}, only {allowed}"
        response = error_response(request, RefusalError(405, sentence))
        response.headers["Allow"] = allowed
        return response
    except web.HTTPNotFound:
        sentence = f"{request.path} does not exist; this bootstrap server answers {_PATHS}"
        return error_response(request, RefusalError(404, sentence))


def _name(request: web.Request) -> str:
    return request.match_info["name"]


def _query_number(request: web.Request, name: str) -> int:
    text = request.query.get(name)
    if not text:
        raise RefusalError(400, f"GET /route: query parameter {name} is missing")
    # int() alone would also take "1_0", " 1" and digits of other scripts.
    if not _RANK_PATTERN.fullmatch(text):
        raise RefusalError(400, f"GET /route: query parameter {name} is not a rank: {text[:40]!r}")
    return int(text)


def _wait_s(request: web.Request) -> float:
    text = request.query.get("wait_s", "0")
    if not _SECONDS_PATTERN.fullmatch(text) or float(text) > WAIT_MAX_S:
        raise RefusalError(
            400,
            f"query parameter wait_s must be a number of seconds up to {WAIT_MAX_S:g}: "
            f"{text[:40]!r}",
        )
    return float(text)


def _revision(request: web.Request) -> int:
    text = request.query.get("after", "0")
    if not _REVISION_PATTERN.fullmatch(text):
        raise RefusalError(
            400, f"query parameter after must be a revision number, not {text[:40]!r}"
        )
    return int(text)
