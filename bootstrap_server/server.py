# SPDX-License-Identifier: Apache-2.0
"""The bootstrap server as a thread: what SGLang constructs in its main process."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Final, Self

import uvloop
from aiohttp import web

from bootstrap_server.admission.access import StatusPage
from bootstrap_server.admission.connections import HTTP_BOUNDS, ConnectionWatch
from bootstrap_server.admission.refusals import http_logger
from bootstrap_server.http.app import forget_lapsed, make_app
from bootstrap_server.http.gate import Gate
from bootstrap_server.http.rank_lines import RankLines
from bootstrap_server.page.board import Board
from bootstrap_server.ranks.errors import BootstrapError
from bootstrap_server.ranks.registry import LEASE_S, Registry
from bootstrap_server.ranks.rooms import RoomTable
from bootstrap_server.running import RunningClock

__all__ = ["BootstrapServer"]

logger = logging.getLogger(__name__)

START_DEADLINE_S: Final = 10.0
CLOSE_DEADLINE_S: Final = 5.0
#: How often lapsed leases and idle clients are looked for, though no request asks.
TICK_S: Final = 1.0
#: A tick that comes later than this found the server held, not ranks silent (`RunningClock`).
TICK_MAX_S: Final = 2.0
#: A connection that has been idle for so long is closed; ranks renew much more often.
KEEPALIVE_TIMEOUT_S: Final = 75.0
#: Requests take microseconds, so what is still open on close is idle keep-alive connections.
SHUTDOWN_TIMEOUT_S: Final = 0.5
#: A thousand decode ranks may ask at the same moment.
BACKLOG: Final = 1024
#: SGLang gives a room up after 300 s (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT).
ROOM_EXPIRY_S: Final = 360.0
#: About 40 MB when full; above 700 new rooms a second for the whole expiry.
ROOMS_MAX: Final = 1 << 18


class BootstrapServer:
    """A bootstrap server that listens when the constructor returns.

    `host` is a name, an IPv4 or IPv6 address or a wildcard (`0.0.0.0`, `::`); a name that
    resolves to several addresses is served on all of them. `port` 0 takes any free one.
    A rank's lease lasts `lease_s`. With `keys` (`secret.Keys.registry`) only who proves that he has
    one of them is served, and gets the answers proved. `page` says who may see the status page
    without a proof (default: everybody without keys, else programs on this host). Raises
    `BootstrapError` when it cannot listen. Usable as a context manager.

    The face that SGLang uses (`managers/disagg_service.py`): constructed with `host=` and
    `port=`, kept until the process ends, and never called again.
    """

    def __init__(
        self,
        host: str,
        port: int,
        lease_s: float = LEASE_S,
        *,
        keys: Sequence[bytes] = (),
        page: StatusPage | None = None,
    ) -> None:
        self.host = host
        self._gate = Gate(keys) if keys else None
        self._page = StatusPage.default(has_secret=bool(keys)) if page is None else page
        # Revisions count changes: never as many as nanoseconds.
        first_revision = time.time_ns()
        self._registry = Registry(lease_s, first_revision)
        self._board = Board(first_revision)
        self._lines = RankLines(has_secret=bool(keys))
        sockets = _listen(host, port)
        #: The port in use, also when 0 was asked for.
        self.port: int = sockets[0].getsockname()[1]
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(sockets, started), name="bootstrap-server", daemon=True
        )
        self._thread.start()
        try:
            started.result(timeout=START_DEADLINE_S)
        except TimeoutError as error:
            self.close()
            raise BootstrapError(
                f"the bootstrap server on {host} port {self.port} did not start "
                f"within {START_DEADLINE_S:g} s"
            ) from error
        # A daemon thread must be out of its event loop before the interpreter is taken down.
        atexit.register(self.close)
        logger.info("bootstrap server listens on %s port %d", host, self.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and join the thread; waits `CLOSE_DEADLINE_S` at most. Idempotent."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            # The loop may close between the question and the call; then nothing is left to do.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            logger.error(
                "bootstrap server on port %d did not stop within %g s", self.port, CLOSE_DEADLINE_S
            )

    def _run(self, sockets: list[socket.socket], started: concurrent.futures.Future[None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve(sockets, started))
            except BaseException as error:
                if started.done():
                    raise
                # The constructor is waiting: it raises this in the caller's thread.
                started.set_exception(error)

    async def _serve(
        self, sockets: list[socket.socket], started: concurrent.futures.Future[None]
    ) -> None:
        clock = RunningClock(time.monotonic, TICK_MAX_S)
        board = self._board
        watch = ConnectionWatch(lambda closed: board.disconnected(closed, clock.now_s()))
        rooms = RoomTable(ROOMS_MAX, ROOM_EXPIRY_S)
        app = make_app(
            self._registry, rooms, clock.now_s, watch, board, self._lines, self._gate, self._page
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=http_logger("bootstrap_server.http"),
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            keepalive_timeout=max(KEEPALIVE_TIMEOUT_S, self._registry.lease_s),
            handler_cancellation=True,
            **HTTP_BOUNDS,
        )
        await runner.setup()
        assert runner.server is not None
        async with AsyncExitStack() as undo:
            undo.push_async_callback(runner.cleanup)
            for sock in sockets:
                listener = await self._loop.create_server(
                    watch.factory(runner.server), sock=sock, backlog=BACKLOG
                )
                undo.callback(listener.close)
            started.set_result(None)
            await self._watch_until_stopped(clock, watch)

    async def _watch_until_stopped(self, clock: RunningClock, watch: ConnectionWatch) -> None:
        while not self._stop.is_set():
            now_s = clock.now_s()
            forget_lapsed(self._registry.expire(now_s), self._board, self._lines, now_s)
            self._board.sweep(self._registry, now_s)
            watch.sweep()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_S)


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`, all on the same port."""
    if not 0 <= port <= 65_535:
        raise BootstrapError(f"bootstrap port {port} is outside 0..65535")
    name = host.removeprefix("[").removesuffix("]")
    if not name:
        raise BootstrapError("the bootstrap server's host is empty; 0.0.0.0 listens everywhere")
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise BootstrapError(f"cannot resolve the bootstrap host {host!r}: {error}") from error
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as undo:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                sock = _listen_on(family, (address[0], port, *address[2:]))
            except OSError as error:
                # Names such as localhost resolve to IPv6 on hosts that have none.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _cannot_listen(host, port, error) from error
                absent = error
                continue
            undo.callback(sock.close)
            sockets.append(sock)
            port = sock.getsockname()[1]
        if not sockets:
            assert absent is not None  # getaddrinfo never returns an empty list
            raise _cannot_listen(host, port, absent) from absent
        undo.pop_all()
    return sockets


def _listen_on(family: int, address: tuple[object, ...]) -> socket.socket:
    with ExitStack() as undo:
        sock = socket.socket(family, socket.SOCK_STREAM)
        undo.callback(sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # As asyncio and SGLang do: `::` and `0.0.0.0` are separate listeners.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        # With SO_REUSEADDR a taken port may show only here, so this belongs to the bind.
        sock.listen(BACKLOG)
        undo.pop_all()
    return sock


def _cannot_listen(host: str, port: int, error: OSError) -> BootstrapError:
    code = error.errno or 0
    return BootstrapError(
        f"the bootstrap server cannot listen on {host} port {port}: {os.strerror(code)} "
        f"(errno {code}); choose another port or host (SGLang: --disaggregation-bootstrap-port, "
        "--host)"
    )
