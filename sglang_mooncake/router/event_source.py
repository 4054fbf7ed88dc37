# SPDX-License-Identifier: Apache-2.0
"""Follows the KV events of servers: asks each server where it publishes them, subscribes, and asks
for those again that were missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from sglang_mooncake.router.addresses import host_of
from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.each import one_for_each
from sglang_mooncake.router.kv_events import NEVER, EventStream, Room, State
from sglang_mooncake.router.questions import SERVER_INFO, ask, decoded
from sglang_mooncake.router.registered import REGISTERED_MAX, Cache, Registered
from sglang_mooncake.router.servers import Role, Server

__all__ = ["EventSource", "StreamsMax", "streams_max"]

logger = logging.getLogger(__name__)

#: A server that did not tell where it publishes is asked again after so long.
ASK_AGAIN_S: Final = 10.0
#: A publisher that does not answer three of these, which libzmq sends, is gone.
HEARTBEAT_MS: Final = 1000
#: How often it is looked whether a stream has gone silent.
TICK_S: Final = 0.5
#: A server repeats its batches with its publisher's next turn, within 0.1 s.
REPLAY_S: Final = 5.0
#: What one that is asked may repeat in that time: some times what is kept of a cache. More would be
#: kept in memory only to be left out, and anybody may be registered as a cache.
REPLAY_BYTES_MAX: Final = 256 << 20
#: Of a batch beside its events.
BATCH_BYTES: Final = 100
#: Batches that wait in the socket; and the bytes of one.
WAITING_MAX: Final = 10_000
MESSAGE_BYTES_MAX: Final = 64 << 20
#: Behind the last batch that is repeated.
_END: Final = (-1).to_bytes(8, "big", signed=True)


#: One stream takes a socket that subscribes, two by which its end is noticed, and one while it
#: catches up; these are four open files, and six with the two connections.
SOCKETS_OF_STREAM: Final = 4
FILES_OF_STREAM: Final = 6
#: Libzmq has at most 65,535 sockets, and 1,023 unless it is told.
STREAMS_MAX: Final = 4096
#: Servers tell how many they have; with more of them each is too small to be of use.
RANKS_MAX: Final = 1024
#: By this method (`--load-balance-method`, prefill servers' own choice) the room names the rank.
_BY_ROOM: Final = "follow_bootstrap_room"


#: What the log says of streams that are not used.
_NO_USE: Final[Mapping[State, str]] = {
    "silent": "the KV events of {} have gone silent: it has computed a prompt and told of no page;"
    " the router uses what it has sent there instead",
    "never hits": "the KV events of {} are of no use: "
    f"it had the last {NEVER} prompts in its cache, and they have named none of these: they are of"
    " pages of another size, or most came before the router (replay_endpoint), or the server loads"
    " from a store that the router does not know (--store); the router uses what it has sent there"
    " instead",
}


class StreamsMax(NamedTuple):
    """How many streams can be followed: of servers, and of caches that others register."""

    servers: int
    registered: int


def streams_max(files: int) -> StreamsMax:
    """Of a process that may open so many files (-1: any number), of which clients and servers need
    half. Whoever registers caches leaves half of the streams to servers."""
    streams = STREAMS_MAX if files < 0 else min(STREAMS_MAX, files // 2 // FILES_OF_STREAM)
    registered = min(REGISTERED_MAX, streams // 2)
    return StreamsMax(streams - registered, registered)


class _Publisher(NamedTuple):
    """Where events are published, and repeated, if they are."""

    endpoint: str
    replay: str | None
    topic: str
    block_size: int


class _Described(msgspec.Struct):
    """What ``GET /server_info`` tells of the publisher: rank r uses the ports that are r above."""

    endpoint_port_base: int
    block_size: int
    dp_size: int = 1
    topic: str = ""
    replay_endpoint_port_base: int | None = None

    def of(self, host: str, rank: int) -> _Publisher:
        """That of one DP rank."""
        again = self.replay_endpoint_port_base
        return _Publisher(
            f"tcp://{host}:{self.endpoint_port_base + rank}",
            None if again is None else f"tcp://{host}:{again + rank}",
            self.topic,
            self.block_size,
        )


class _Info(msgspec.Struct):
    """``dp_size`` are replicas; DP attention has ranks within one, in SGLang 0.5.23 by another
    name."""

    kv_events: _Described | None = None
    page_size: int | None = None
    dp_size: int | None = None
    attn_dp_size: int | None = None
    load_balance_method: str | None = None
    disaggregation_decode_enable_radix_cache: bool | None = None

    @property
    def ranks(self) -> int:
        if self.kv_events is not None:
            return self.kv_events.dp_size
        return (self.dp_size or 1) * (self.attn_dp_size or 1)

    @property
    def may_be_chosen(self) -> bool:
        """Whether it takes the rank that a router has chosen, as prefill servers do."""
        return self.load_balance_method == _BY_ROOM and 1 <= self.ranks <= RANKS_MAX

    def events_of(self, role: Role) -> _Described | None:
        """Where it tells of its cache, if it has one: that of decode servers is off by default."""
        keeps = role == "prefill" or self.disaggregation_decode_enable_radix_cache is True
        return self.kv_events if keeps else None


class EventSource:
    """``run`` follows the events of all servers until it is cancelled."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Callable[[], Iterable[Server]],
        ranks_of: Callable[[Server, int], Sequence[CacheView]],
        registered: Registered,
        headers: dict[str, str],
        most: StreamsMax,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``servers``: those whose caches matter. ``ranks_of`` is told how many DP ranks one has
        that may be chosen, and gives what is known of each. ``registered``: caches of others;
        ``headers``: of questions to servers. ``most``: how many streams there may be; no more than
        that are ``registered``."""
        self._session, self._servers, self._ranks_of = session, servers, ranks_of
        self._registered = registered
        self._headers, self._most, self._clock = headers, most, clock
        #: Streams of servers that are followed.
        self._following = 0
        self._context: zmq.asyncio.Context

    async def run(self) -> None:
        """Never returns."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_OF_STREAM * sum(self._most))
        known, registered = self._servers, self._registered.all
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(one_for_each("following KV events of", known, self._follow))
                group.create_task(one_for_each("following", registered, self._follow_registered))
        finally:
            self._context.destroy(linger=0)

    async def _follow_registered(self, cache: Cache) -> None:
        one = cache.registration
        await self._subscribed(
            cache.view,
            _Publisher(one.endpoint, one.replay_endpoint, "", one.block_size),
            lambda: True,
            self._registered.room,
        )

    async def _follow(self, server: Server) -> None:
        said = False
        while True:
            ills = server.counts.ills
            info = await self._asked(server) if server.is_well else None
            if info is not None:
                views = self._ranks_of(server, info.ranks if info.may_be_chosen else 1)
                for view in views:
                    view.page_size = max(0, info.page_size or 0)
                described = info.events_of(server.role)
                if views and described is not None and len(views) == info.ranks:
                    if self._following + len(views) <= self._most.servers:
                        await self._follow_all(server, views, described, ills)
                        continue
                    if not said:
                        said = True
                        logger.warning(
                            "the KV events of %s are not followed: those of %d caches are, and no"
                            " more than %d can be with the files that this process may open"
                            " (ulimit -n)",
                            server,
                            self._following,
                            self._most.servers,
                        )
                matters = described is not None or server.role == "prefill"
                if views and matters and len(views) != info.ranks and not said:
                    said = True
                    logger.warning(
                        "%s has %d DP ranks, and the router cannot choose among them"
                        " (--load-balance-method %s): it is taken for one with one cache, and its"
                        " KV events are not used",
                        server,
                        info.ranks,
                        info.load_balance_method,
                    )
            await asyncio.sleep(ASK_AGAIN_S if server.is_well else TICK_S)

    async def _asked(self, server: Server) -> _Info | None:
        """None if the server does not answer."""
        return decoded(await ask(self._session, server, SERVER_INFO, self._headers), _Info)

    async def _follow_all(
        self, server: Server, views: Sequence[CacheView], described: _Described, ills: int
    ) -> None:
        """Follows the ranks of one process of the server: it may be another one after it has been
        ill."""

        def is_same() -> bool:
            return server.counts.ills == ills

        self._following += len(views)
        try:
            async with asyncio.TaskGroup() as group:
                for view in views:
                    publisher = described.of(host_of(server.url), view.rank)
                    group.create_task(self._subscribed(view, publisher, is_same))
        finally:
            self._following -= len(views)

    async def _subscribed(
        self,
        view: CacheView,
        publisher: _Publisher,
        is_same: Callable[[], bool],
        room: Room | None = None,
    ) -> None:
        """``room``: as for ``EventStream``."""
        while is_same():
            try:
                with contextlib.closing(EventStream(room)) as stream:
                    await self._followed(view, stream, publisher, is_same)
            except zmq.ZMQError as error:
                logger.warning("the KV events of %s cannot be followed: %s", view, error)
                await asyncio.sleep(ASK_AGAIN_S)

    async def _followed(
        self,
        view: CacheView,
        stream: EventStream,
        publisher: _Publisher,
        is_same: Callable[[], bool],
    ) -> None:
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        lost = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.subscribe(publisher.topic)
            socket.connect(publisher.endpoint)
            view.follow(stream, publisher.block_size)
            logger.info("%s tells which pages its cache has", view)
            await self._catch_up(stream, publisher.replay)  # What was published before.
            await self._receive(view, stream, socket, lost, publisher.replay, is_same)
        finally:
            view.follow(None, 0)
            socket.disable_monitor()
            lost.close(linger=0)
            socket.close(linger=0)

    async def _receive(
        self,
        view: CacheView,
        stream: EventStream,
        socket: zmq.asyncio.Socket,
        lost: zmq.asyncio.Socket,
        replay: str | None,
        is_same: Callable[[], bool],
    ) -> None:
        """Until the connection is lost, or ``is_same`` no more."""
        state: State = "waiting"
        has_told = False
        while is_same():
            if await lost.poll(0):
                logger.warning("the connection to the KV events of %s is lost", view)
                return
            if await socket.poll(TICK_S * 1e3):
                batch = _batch(await socket.recv_multipart())
                if batch is not None:
                    stream.take(*batch, self._clock())
                if stream.missing is not None:
                    await self._catch_up(stream, replay)
            if stream.left_out and not has_told:
                has_told = True
                logger.warning(
                    "%s tells of more than the %d pages that there is room for: further ones are"
                    " left out; larger pages (--page-size) would be fewer",
                    view,
                    len(stream),
                )
            state = _told(view, state, stream.state(self._clock()))

    async def _catch_up(self, stream: EventStream, replay: str | None) -> None:
        """Asks for batches that are missing."""
        first = 0 if stream.missing is None else stream.missing
        if replay is None:
            if stream.missing is not None:
                stream.lose()
            return
        batches: list[tuple[int, bytes]] = []
        left = REPLAY_BYTES_MAX
        socket = self._socket(zmq.DEALER)
        try:
            socket.connect(replay)
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while (batch := _batch(await socket.recv_multipart())) is not None:
                    left -= BATCH_BYTES + len(batch[1])
                    if left < 0:
                        logger.warning("%s repeats more than is read", replay)
                        batches.clear()  # Not whole.
                        break
                    batches.append(batch)
        except TimeoutError:
            batches.clear()  # Not whole.
        finally:
            socket.close(linger=0)
        stream.replayed(batches)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, 1)
        return socket


def _batch(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Its number and its events; None behind the last one that is repeated, and of what is none."""
    if len(frames) < 2 or len(frames[-2]) != len(_END) or frames[-2] == _END:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]


def _told(view: CacheView, before: State, now: State) -> State:
    """Logs a change."""
    if now in _NO_USE and now != before:
        logger.warning("%s", _NO_USE[now].format(view))
    elif before in _NO_USE and now not in _NO_USE:
        logger.info("the KV events of %s are back", view)
    return now
