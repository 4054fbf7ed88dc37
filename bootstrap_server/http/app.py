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
| `PUT /v1/instances/NAME/leases` | `Renewal` | `{"lease_s": …}`, or 410: no such lease |
| `DELETE /v1/instances/NAME/leases` | `RankLife` | `OK`, or 410 |
| the same under `/v1/decode-servers` | | the same for decode servers; routers alone ask for them |
| `POST /v1/given-up-rooms` | `Notice` | `OK` (`given_up.py`) |
| `GET /v1/given-up-rooms` | | `GivenUp`; waits like the instances |
| `PUT /v1/routers` | `RouterReport` | `OK`; for the status page |
| `PUT /v1/store-owners` | `EntryOf` | `StoreEntries`: where the owners of a store are |
| `DELETE /v1/store-owners` | `EntryOf` | `OK`: this one has ended |
| `GET /` | | the status page (`status.py`) |
| `GET /v1/status` | | what it shows |

`GET /v1/instances/NAME?wait_s=…&after=…` waits until the instance is ready with a revision above
`after`. A 409 has `left_s` where a live rank holds the place: how long, unless it renews.

With keys a `Gate` stands before all of them but `GET /health`, `GET /metrics` and notices.

Handlers run on one event loop and never await between reading and writing the registry, so
there are no locks. A registration that finds its place taken may wait (`succession.py`), and begins
again after that.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec.json import Decoder

from bootstrap_server.admission.access import StatusPage
from bootstrap_server.admission.connections import ConnectionWatch
from bootstrap_server.admission.refusals import Refusals
from bootstrap_server.http.body import (
    BODY_BYTES_MAX,
    RefusalError,
    Snapshot,
    hear_body,
    json_response,
    read_body,
    sentences,
)
from bootstrap_server.http.gate import PROVED, Gate, guard
from bootstrap_server.http.given_up import GivenUpHandlers
from bootstrap_server.http.metrics_route import MetricsHandlers
from bootstrap_server.http.query import rank_number, revision_of, wait_s_of
from bootstrap_server.http.rank_lines import RankLines
from bootstrap_server.http.routers import RouterHandlers
from bootstrap_server.http.status import StatusHandlers
from bootstrap_server.http.store_owners import StoreOwnerHandlers
from bootstrap_server.http.succession import Succession
from bootstrap_server.http.waiting import Waiting
from bootstrap_server.page.board import Board, Report
from bootstrap_server.page.status_report import read_report
from bootstrap_server.ranks.errors import (
    LeaseLost,
    PlaceTaken,
    RegistrationRefused,
    RegistryFull,
)
from bootstrap_server.ranks.given_up import Notice
from bootstrap_server.ranks.instance import InstanceTable
from bootstrap_server.ranks.records import (
    RANKS_MAX,
    Rank,
    RankCoords,
    RankLife,
    RankRecord,
    Renewal,
    Role,
)
from bootstrap_server.ranks.registry import Registry, plain_name
from bootstrap_server.ranks.rooms import RoomTable
from bootstrap_server.ranks.sglang_http import (
    QueryBody,
    RoomBody,
    RouteBody,
    rank_answer,
    topology_answer,
)

__all__ = ["forget_lapsed", "make_app"]

_RECORD = Decoder(RankRecord)
_LIFE = Decoder(RankLife)
_RENEWAL = Decoder(Renewal)
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
_PATHS: Final = (
    "/route, /register_dp_rank, /query_dp_ranks, /health (SGLang 0.5.23), /metrics, /v1/instances, "
    "/v1/instances/NAME, /v1/instances/NAME/ranks, /v1/instances/NAME/leases, "
    "the latter four under /v1/decode-servers, /v1/given-up-rooms, /v1/routers, "
    "/v1/store-owners, "
    "and for people / and /v1/status"
)

_DECODE_SERVERS: Final = "/v1/decode-servers"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    registry: Registry,
    rooms: RoomTable,
    clock: Callable[[], float],
    watch: ConnectionWatch,
    board: Board,
    lines: RankLines,
    gate: Gate | None = None,
    page: StatusPage = StatusPage.OPEN,
) -> web.Application:
    """The application over `registry`, `rooms` and `board`; `clock` gives the seconds of leases and
    rooms, `watch` hears of every request that has begun, `lines` of ranks that come and go, `gate`
    says whose requests are served (None: everybody's), `page` who may see the status page without a
    proof."""
    handlers = _Handlers(registry, rooms, clock, watch, board, lines)
    status = StatusHandlers(registry, board, clock, page)
    refusals = Refusals()

    def refused(address: str, why: str) -> None:
        refusals.note(address, why)
        board.turn_away(address, why, clock())

    def given_up_by(request: web.Request, notice: Notice) -> None:
        # What strangers say is not passed on.
        is_known = gate is None or PROVED in request
        why = notice.reason if is_known else "it gave requests up, and does not prove our secret"
        board.turn_away(_address(request), why, clock(), len(notice.rooms))

    given_up = GivenUpHandlers(clock, given_up_by, board.first_revision)
    metrics = MetricsHandlers(registry, board, watch, clock)
    guarding = None
    if gate is not None:
        guarding = guard(
            gate,
            refused,
            lambda request: watch.proved(request.transport),
            page.is_for_browsers,
            page.told_to,
        )
    middlewares = _middlewares(metrics.count, watch, guarding)
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
            web.get(_DECODE_SERVERS, handlers.get_instances),
            web.get(f"{_DECODE_SERVERS}/{{name}}", handlers.get_instance),
            *handlers.leases("/v1/instances/"),
            *handlers.leases(f"{_DECODE_SERVERS}/"),
            *given_up.routes(),
            *RouterHandlers(board, clock).routes(),
            *StoreOwnerHandlers(clock, board.first_revision).routes(),
            *status.routes(),
            *metrics.routes(),
        ]
    )
    app.on_response_prepare.append(_without_versions)
    app.on_shutdown.append(handlers.let_waiters_go)
    app.on_shutdown.append(given_up.let_waiters_go)
    return app


def _middlewares(
    count: Middleware, watch: ConnectionWatch, guarding: Middleware | None
) -> list[Middleware]:
    """What each request goes through, the first one outermost. `guarding` lets in who proves that
    he has the secret; without it a request counts as proved once the whole of it has come."""

    @web.middleware
    async def hear(request: web.Request, handler: _Handler) -> web.StreamResponse:
        watch.heard(request.transport)
        response = await handler(request)
        if watch.closes(request.transport):
            response.force_close()
        return response

    @web.middleware
    async def hear_out(request: web.Request, handler: _Handler) -> web.StreamResponse:
        await hear_body(request)
        watch.proved(request.transport)
        return await handler(request)

    if guarding is None:
        return [count, hear, sentences(_PATHS), hear_out]
    return [count, hear, guarding, sentences(_PATHS)]


async def _without_versions(_: web.Request, response: web.StreamResponse) -> None:
    """Strangers need not know which releases of Python and aiohttp answer them."""
    response.headers.pop("Server", None)


def forget_lapsed(
    lapsed: Iterable[tuple[str, Rank]], board: Board, lines: RankLines, now_s: float
) -> None:
    """Say, in the log and on the board, which ranks the registry has forgotten; each comes with the
    name of its instance."""
    for name, rank in lapsed:
        board.lapsed(name, rank, now_s)
        lines.lapsed(name, rank)


class _Handlers:
    def __init__(
        self,
        registry: Registry,
        rooms: RoomTable,
        clock: Callable[[], float],
        watch: ConnectionWatch,
        board: Board,
        lines: RankLines,
    ) -> None:
        self._registry = registry
        self._rooms = rooms
        self._clock = clock
        self._watch = watch
        self._board = board
        self._lines = lines
        self._bad_reports = Refusals("status report")
        self._refused = Refusals("registration")
        self._waiting = Waiting()
        self._succession = Succession(board, lines, clock)
        #: By instance name: the revision that it shows, and the encoded instance.
        self._snapshots: dict[str, tuple[int, Snapshot]] = {}

    # --- ranks ---

    def leases(self, prefix: str) -> list[web.RouteDef]:
        """The routes of a rank's lease, for ranks of one role."""
        return [
            web.put(f"{prefix}{{name}}/ranks", self.put_rank),
            web.put(f"{prefix}{{name}}/leases", self.renew),
            web.delete(f"{prefix}{{name}}/leases", self.release),
        ]

    async def put_rank(self, request: web.Request) -> web.Response:
        record = await read_body(request, _RECORD)
        place = _name(request), _role(request)
        table = await self._register(request, place, record, refused_status=409, leased=True)
        self._board.registered(table.name, record, self._kept(request), self._clock())
        return json_response({"lease_s": self._registry.lease_s})

    async def put_route(self, request: web.Request) -> web.Response:
        body = await read_body(request, _ROUTE)
        try:
            record = body.record()
        except ValueError as error:
            raise RefusalError(400, f"PUT /route: bad value: {error}") from error
        # SGLang's server answers 400 to a rank that contradicts the others.
        place = self._registry.default.name, self._registry.default.role
        table = await self._register(request, place, record, refused_status=400, leased=False)
        self._board.registered(table.name, record, None, self._clock())
        return web.Response(text="OK")

    async def _register(
        self,
        request: web.Request,
        place: tuple[str, Role],
        record: RankRecord,
        refused_status: int,
        *,
        leased: bool,
    ) -> InstanceTable:
        address = _address(request)
        try:
            try:
                return self._take_in(place, record, leased=leased)
            except PlaceTaken:
                find = functools.partial(self._table, *place)
                if not await self._succession.end_former(find, record.rank, address):
                    raise
                return self._take_in(place, record, leased=leased)
        except PlaceTaken as error:
            raise RefusalError(refused_status, str(error), left_s=error.left_s) from error
        except RegistrationRefused as error:
            self._refused.note(address, str(error))
            raise RefusalError(refused_status, str(error)) from error
        except RegistryFull as error:
            raise RefusalError(429, str(error)) from error

    def _take_in(
        self, place: tuple[str, Role], record: RankRecord, *, leased: bool
    ) -> InstanceTable:
        (name, role), rank = place, record.rank
        generation = self._table(name, role).generation
        table = self._registry.register(name, record, self._clock(), leased=leased, role=role)
        if generation not in (0, table.generation):
            self._lines.began_anew(rank, table)
        self._lines.registered(rank, table)
        if table.ready:
            self._waiting.wake(table.name)
        return table

    async def renew(self, request: web.Request) -> web.Response:
        life = await read_body(request, _RENEWAL)
        table, now_s = self._table(_name(request), _role(request)), self._clock()
        try:
            table.renew(life.coords, life.epoch, now_s)
        except LeaseLost as error:
            raise RefusalError(410, str(error)) from error
        report = self._report(life.status, _address(request))
        self._board.renewed(table.name, life.coords, self._kept(request), report, now_s)
        return json_response({"lease_s": self._registry.lease_s})

    def _report(self, encoded: msgspec.Raw, address: str) -> Report | None:
        """A report that is no good costs the rank its line on the status page, not its lease."""
        try:
            return read_report(encoded)
        except ValueError as error:
            self._bad_reports.note(address, str(error))
            return None

    def _kept(self, request: web.Request) -> Hashable | None:
        """The connection, when its end will tell that the rank at its other end is gone."""
        if request.keep_alive and self._watch.keep(request.transport):
            return request.transport
        return None

    async def release(self, request: web.Request) -> web.Response:
        life = await read_body(request, _LIFE)
        table, now_s = self._table(_name(request), _role(request)), self._clock()
        rank = table.find(life.coords)
        try:
            table.release(life.coords, life.epoch, now_s)
        except LeaseLost as error:
            raise RefusalError(410, str(error)) from error
        assert rank is not None  # it was released
        self._board.ended(table.name, rank, "shut down", now_s)
        self._lines.shut_down(table.name, life.coords)
        return web.Response(text="OK")

    # --- instances ---

    def _table(self, name: str, role: Role = "prefill") -> InstanceTable:
        """The instance of that name without ranks whose leases have lapsed."""
        try:
            table = self._registry.get(name, role)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error
        now_s = self._clock()
        lapsed = ((table.name, rank) for rank in table.expire(now_s))
        forget_lapsed(lapsed, self._board, self._lines, now_s)
        return table

    async def get_instances(self, request: web.Request) -> web.Response:
        return json_response(
            {
                plain_name(table.name): {
                    "registered": table.registered,
                    "expected": table.expected,
                    "generation": table.generation,
                    "revision": table.revision,
                }
                for table in self._registry.of(_role(request))
            }
        )

    async def get_instance(self, request: web.Request) -> web.Response:
        place, wait_s = (_name(request), _role(request)), wait_s_of(request)
        after = revision_of(request)

        def is_there() -> bool:
            table = self._table(*place)
            return table.ready and table.revision > after

        if not is_there() and wait_s > 0:
            try:
                await self._waiting.until(self._table(*place).name, is_there, wait_s)
            except RegistryFull as error:
                raise RefusalError(429, str(error)) from error
        return self._snapshot(self._table(*place)).response(request)

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
        numbers = tuple(rank_number(request, name) for name in _ROUTE_PARAMETERS)
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


def _role(request: web.Request) -> Role:
    return "decode" if request.path.startswith(_DECODE_SERVERS) else "prefill"


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


def _address(request: web.Request) -> str:
    return request.remote or "an unknown address"


def _name(request: web.Request) -> str:
    return request.match_info["name"]
