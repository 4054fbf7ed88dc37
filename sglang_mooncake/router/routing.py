# SPDX-License-Identifier: Apache-2.0
"""A client's request from its arrival to its answer: a pair is chosen, and another one if the first
fails before the client was told anything."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from random import Random
from typing import Final, NamedTuple

from aiohttp import web

from bootstrap_server.admission.refusals import Pace
from bootstrap_server.decoding import excerpt
from sglang_mooncake.router.addresses import place_of
from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.choice import Chooser
from sglang_mooncake.router.decode_servers import DecodeChoice, DecodeServers
from sglang_mooncake.router.failing import Failed, without_frames
from sglang_mooncake.router.fit import Kin
from sglang_mooncake.router.forwarding import Ask, Course, Forwarder, Pair
from sglang_mooncake.router.gate import Gate, TurnedAway
from sglang_mooncake.router.headers import request_headers
from sglang_mooncake.router.kv_events import NEVER
from sglang_mooncake.router.looking import Looker, Tokens
from sglang_mooncake.router.metrics import Counts
from sglang_mooncake.router.options import CACHE_AWARE, Options
from sglang_mooncake.router.pages import LONG_NAMES
from sglang_mooncake.router.placement import Look, Placed, Pool, PrefillView, place
from sglang_mooncake.router.servers import ROLES, Server, Servers
from sglang_mooncake.router.sglang_http import (
    ROOM_BITS,
    Body,
    RequestError,
    Told,
    body_of,
    priority_of,
    room_for,
)
from sglang_mooncake.router.sharing import Host

__all__ = ["Routing", "error_response", "note_answer", "note_failure", "whole"]

logger = logging.getLogger(__name__)

#: What a client that is refused shall wait for, in seconds.
RETRY_AFTER_S: Final = 1
#: A client may take so long to send a request.
BODY_S: Final = 120.0
#: A server that has just started is known to be well after the next probe of one that is ill.
WELL_SOON_S: Final = 2.0
LOOK_AGAIN_S: Final = 0.1
#: Tokens of a longer request, which take a millisecond or more, are made beside the loop; and names
#: of pages of one that has its tokens.
LONG_TEXT_BYTES: Final = 8 << 10
LONG_IDS_BYTES: Final = 128 << 10
#: Failed requests that are logged one by one before their rate is bounded.
LINES_AT_ONCE: Final = 16
_VAIN: Final = (
    "%s had nothing in its cache of the last %d prompts whose beginning it had been sent before: it"
    " keeps none (--disable-radix-cache), or one that is too small; it counts as empty until it has"
    " something"
)
#: The content of an error answer that the router gives by itself.
_KIND: Final = "router_error"


class Routing:
    """Answers requests. ``random`` chooses servers and rooms."""

    def __init__(
        self,
        options: Options,
        servers: Servers,
        forwarder: Forwarder,
        counts: Counts,
        random: Random,
        clock: Callable[[], float] = time.monotonic,
        pool: Pool | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """``pool``: a store that all prefill servers load from; ``tokens``: the tokenizer of the
        model, for prompts that are text."""
        self._pool = pool
        self._options, self._servers, self._forwarder = options, servers, forwarder
        self._counts, self._random, self._clock = counts, random, clock
        self._kin = Kin()
        #: By host, what its servers have to do with each other.
        self._hosts: dict[str, Host] = {}
        #: Of each prefill server's DP ranks.
        self._views: dict[Server, tuple[PrefillView, ...]] = {}
        self.decode = DecodeServers(options.decode_policy, options.tbt_max_s, random)
        self.servers_changed()
        self._looker = Looker(tokens)
        self._chooser = Chooser(options.prefill_policy, random)
        #: Where requests wait for their turn, if there may not be any number of them.
        self.gate: Gate | None = None
        if options.max_requests is not None:
            self.gate = Gate(
                options.max_requests, options.queue_size, options.queue_timeout_s, clock
            )
        self._pace = Pace(burst=LINES_AT_ONCE)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """To a request that a prefill and a decode server answer together."""
        if self.gate is not None and self._counts.under_way >= self.gate.all_max:
            self._counts.ended["refused"] += 1
            return error_response(
                HTTPStatus.TOO_MANY_REQUESTS, self.gate.no_room, self.gate.retry_after_s
            )
        self._counts.under_way += 1
        end = "failed"
        try:
            response, end = await self._answered(request)
            return response
        except (asyncio.CancelledError, ConnectionError):
            end = "client left"
            raise
        except web.HTTPException:
            end = "bad request"
            raise
        finally:
            self._counts.under_way -= 1
            self._counts.ended[end] += 1

    async def _answered(self, request: web.Request) -> tuple[web.StreamResponse, str]:
        """The answer, and how the request has ended (``metrics.ENDS``)."""
        try:
            raw = await whole(request)
            body = body_of(raw)
            ask = Ask(request.path, body, request_headers(request.headers, self._options.api_key))
            if len(raw) > (LONG_TEXT_BYTES if self._looker.takes_time else LONG_IDS_BYTES):
                look = await asyncio.to_thread(self._look, ask)
            else:
                look = self._look(ask)
            if look is not None and look.tokens > LONG_NAMES:
                await self._named(look)
        except RequestError as error:
            return error_response(HTTPStatus.BAD_REQUEST, str(error)), "bad request"
        if self.gate is None:
            return await self._served(request, ask, look)
        try:
            await self.gate.enter(*self._standing(request, body), len(raw))
        except TurnedAway as error:
            status = HTTPStatus.TOO_MANY_REQUESTS
            return error_response(status, str(error), error.retry_after_s), "refused"
        try:
            return await self._served(request, ask, look)
        finally:
            self.gate.leave()

    def _standing(self, request: web.Request, body: Body) -> tuple[str, int]:
        """The request's tenant, and its priority: the highest is served first."""
        named, header = priority_of(body), self._options.tenant_header
        priority = self._options.default_priority if named is None else named
        tenant = "" if header is None else request.headers.get(header, "")
        return tenant, -priority if self._options.is_low_first else priority

    async def _served(
        self, request: web.Request, ask: Ask, look: Look | None
    ) -> tuple[web.StreamResponse, str]:
        """As ``_answered``, by as many attempts as it takes."""
        failed: Failed | None = None
        avoided: tuple[Server, ...] = ()
        left = 1 + self._options.retries
        while left > 0:
            chosen = await self._choose_soon(look, avoided)
            if isinstance(chosen, str):
                break
            if isinstance(chosen, _Late):
                status = HTTPStatus.TOO_MANY_REQUESTS
                return error_response(status, chosen.sentence, chosen.retry_after_s), "refused"
            self._counts.retries += failed is not None
            course = Course(partial(self._prefilled, chosen))
            try:
                response = await self._attempt(ask, chosen, request, course)
            except Failed as error:
                failed = without_frames(error)
                self._note(error)
                if not error.may_retry:
                    break
                # Neither may know yet which of the two is to blame for a failed hand-over.
                avoided = (*avoided, *chosen.pair)
                left -= self._counts_as_attempt(error, avoided)
                ask = ask._replace(on_new=True)
            else:
                self._learn(chosen, course)
                return response, "answered" if course.stopped is None else "stopped"
        if failed is None:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(chosen)), "failed"
        return _failure(failed), "failed"

    async def _attempt(
        self, ask: Ask, chosen: _Chosen, request: web.Request, course: Course
    ) -> web.StreamResponse:
        pair, placed, _ = chosen
        for server in pair:
            server.under_way += 1
            server.counts.chosen += 1
        try:
            room = self._random.getrandbits(ROOM_BITS)
            if placed is not None:
                room = room_for(room, placed.view.rank, placed.view.ranks)
            return await self._forwarder.attempt(ask, pair, room, request, course)
        finally:
            pair.decode.under_way -= 1  # The prefill server's part is over earlier.

    def _learn(self, chosen: _Chosen, course: Course) -> None:
        """From an attempt that was answered."""
        server = chosen.pair.decode
        if course.stopped is None:
            server.served()
            self.decode.learn(server, course, chosen.placed, chosen.handed_over, self._clock())
        else:
            self._say(course.stopped)
            if course.is_broken:
                most = self._options.health_failures
                note_failure(server, course.stopped, self._clock(), most)
        if course.first_s is not None:
            self._counts.firsts += 1
            self._counts.first_s += course.first_s

    def _note(self, failed: Failed) -> None:
        """An attempt has failed."""
        server = failed.server
        self._counts.failed[server.role, failed.kind] += 1
        self._say(str(failed))
        if failed.kind == "answered":
            server.served()
            return
        if failed.kind == "exhausted":
            return
        if failed.kind == "stale":
            server.doubted()
            return
        most = 1 if failed.kind == "unreachable" else self._options.health_failures
        note_failure(server, failed.sentence, self._clock(), most)

    def _say(self, sentence: str) -> None:
        """To the log, at a bounded rate: what servers answer clients can bring about."""
        left_out = self._pace.left_out()
        if left_out is not None:
            more = f" ({left_out} earlier failures were not logged)" if left_out else ""
            logger.warning("a request has failed: %s%s", excerpt(sentence), more)

    def _look(self, ask: Ask) -> Look | None:
        """The prompt's pages, where the choice is by caches."""
        if self._options.prefill_policy != CACHE_AWARE:
            return None
        try:
            return self._looker.look(ask.body, ask.path)
        except RecursionError as error:
            raise RequestError("the request's JSON is nested too deeply") from error

    async def _named(self, look: Look) -> None:
        """Makes the names by which servers and the store know a long prompt."""
        views = [view for ranks in self._views.values() for view in ranks]
        sizes = {view.event_page for view in (*views, *self.decode.views.values())}
        if self._pool is not None:
            sizes.update(view.page_size for view in views)
        for size in sizes - {0}:  # Who has not told.
            if look.unnamed(size) > LONG_NAMES:
                await asyncio.to_thread(look.event_names, size)

    async def _choose_soon(
        self, look: Look | None, avoided: Collection[Server]
    ) -> _Chosen | _Late | str:
        """As ``_choose``; where no server is well it waits for one that is about to be."""
        until_s = self._clock() + WELL_SOON_S
        while isinstance(chosen := self._choose(look, avoided), str) and self._clock() < until_s:
            await asyncio.sleep(LOOK_AGAIN_S)
        return chosen

    def _counts_as_attempt(self, failed: Failed, avoided: Sequence[Server]) -> bool:
        """A server that could not be reached has not had the request, and is ill now; so where
        requests are tried again, that does not count, as often as there are servers."""
        is_unreachable = failed.kind == "unreachable" and self._options.retries > 0
        return not is_unreachable or len(avoided) > 2 * len(self._servers.all())

    def _choose(self, look: Look | None, avoided: Collection[Server]) -> _Chosen | _Late | str:
        """A pair without servers that have just failed, ``avoided``, where there are others; or
        why there is none. A request that has failed once is not refused for being late."""
        usable = {role: self._servers.usable(role, avoided) for role in ROLES}
        for role in ROLES:
            if not usable[role]:
                return self._servers.nobody(role)
        in_time = self.decode.in_time(usable["decode"])
        if not in_time and not avoided:
            return _Late(
                "tokens of every decode server are expected further apart than the limit of"
                f" {self._options.tbt_max_s:g} s (--max-tbt-secs)"
            )
        now_s = self._clock()
        decode = self.decode.choose(look, in_time or usable["decode"], now_s)
        if look is None:
            self._sent(decode)
            return _Chosen(Pair(self._chooser.choose(usable["prefill"]), decode.server))
        views = [
            view for server in usable["prefill"] for view in self._ranks(server, look.ranks.prefill)
        ]
        choice = place(look, views, now_s, self._random, self._options.ttft_max_s)
        if choice.late_s > 0.0 and not avoided:
            return _Late(
                f"the first token is expected {choice.late_s:.2g} s after the limit of"
                f" {self._options.ttft_max_s:g} s (--max-ttft-secs), because of those before it",
                math.ceil(choice.late_s),
            )
        self._counts.choices[choice.reason] += 1
        self._sent(decode)
        placed = choice.view.send(look, choice.figures, now_s)
        return _Chosen(Pair(choice.view.server, decode.server), placed, decode.handed_over)

    def _sent(self, choice: DecodeChoice) -> None:
        if choice.reason is not None:
            self._counts.decode_choices[choice.reason] += 1
            self.decode.send(choice)

    def _prefilled(self, chosen: _Chosen, told: Told | None) -> None:
        """A prefill has ended, with what the server told of it, or has failed."""
        server, placed = chosen.pair.prefill, chosen.placed
        server.under_way -= 1
        if placed is not None:
            was_vain = placed.view.is_vain
            placed.view.ended(placed, self._clock(), told)
            if placed.view.is_vain and not was_vain:
                logger.warning(_VAIN, placed.view, NEVER)
        if told is not None:
            server.served()
        if told is None or told.prompt_tokens is None:
            return
        if placed is not None:
            self._looker.learn(placed.look, told.prompt_tokens)
        if told.cached_tokens is not None:
            server.counts.prompt_tokens += told.prompt_tokens
            server.counts.cached_tokens += told.cached_tokens

    def _ranks(self, server: Server, named: int | None) -> Sequence[PrefillView]:
        """Those of its DP ranks that may be chosen."""
        views = self._views[server]
        if named is None or not 0 <= named < len(views):
            return views
        return views[named : named + 1]

    def followed(self) -> Sequence[Server]:
        """Those whose caches matter."""
        if self._options.prefill_policy != CACHE_AWARE:
            return ()
        decode = self.decode.views if self._options.decode_policy == CACHE_AWARE else ()
        return (*self._views, *decode)

    def ranks_of(self, server: Server, ranks: int) -> Sequence[CacheView]:
        """A prefill server has so many DP ranks, which it takes by the room: what is known of each.
        A decode server chooses by itself. Nothing where it has left."""
        if server in self.decode.views:
            return (self.decode.views[server],)
        if server in self._views and len(self._views[server]) != ranks:
            self._views[server] = tuple(self._view(server, rank, ranks) for rank in range(ranks))
        return self._views.get(server, ())

    def _view(self, server: Server, rank: int = 0, ranks: int = 1) -> PrefillView:
        host = self._hosts.setdefault(place_of(server.url).host, Host())
        return PrefillView(server, self._pool, self._kin, host=host, rank=rank, ranks=ranks)

    def servers_changed(self) -> None:
        """Some have joined or left."""
        there = self._servers.of("prefill")
        for gone in self._views.keys() - set(there):
            del self._views[gone]
        self.decode.changed(self._servers.of("decode"))
        for host in self._hosts.keys() - {place_of(server.url).host for server in there}:
            del self._hosts[host]
        for server in there:
            if server not in self._views:
                self._views[server] = (self._view(server),)

    def forget_caches(self) -> None:
        """The servers' caches were flushed."""
        for views in self._views.values():
            for view in views:
                view.forget()

    @property
    def views(self) -> Mapping[Server, Sequence[PrefillView]]:
        """What is known of each prefill server, by its DP ranks."""
        return self._views


class _Chosen(NamedTuple):
    """A pair for an attempt, the prompt in the prefill server's queue, if that is kept, and how
    many of its tokens are handed over."""

    pair: Pair
    placed: Placed | None = None
    handed_over: float = 0.0


class _Late(NamedTuple):
    """The request is not to be served, since it would not be in time."""

    sentence: str
    retry_after_s: int = RETRY_AFTER_S


async def whole(request: web.Request) -> bytes:
    """The body of a client's request. ``HTTPRequestTimeout`` if it does not come, and
    ``HTTPRequestEntityTooLarge``."""
    if request.content.is_eof():
        return await request.read()  # All of it has come, as that of most requests has.
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout from error


def note_answer(server: Server) -> None:
    """A server says that it is well."""
    if server.answered():
        logger.info("%s is well again", server)


def note_failure(server: Server, why: str, now_s: float, failures_max: int) -> None:
    """A server has not answered."""
    if server.failed(why, now_s, failures_max):
        logger.warning("%s is ill and gets no requests until it answers: %s", server, why)


def error_response(status: int, sentence: str, retry_after_s: int = RETRY_AFTER_S) -> web.Response:
    """An error that the router itself tells, in SGLang's form."""
    error = {"message": sentence, "type": _KIND, "code": int(status)}
    response = web.json_response({"error": error, "object": "error"}, status=status)
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        response.headers["Retry-After"] = str(retry_after_s)
    return response


def _failure(failed: Failed) -> web.Response:
    """What the client is told of the last attempt: a server's own words, where it has said any."""
    if failed.body is None:
        return error_response(failed.status, str(failed))
    return web.Response(body=failed.body, status=failed.status, content_type="application/json")
