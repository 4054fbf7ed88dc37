# SPDX-License-Identifier: Apache-2.0
"""``GET /metrics`` of a process that has no HTTP server of its own: ``kvstore serve --metrics``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from aiohttp import web

from bootstrap_server.admission.connections import HTTP_BOUNDS, ConnectionWatch
from bootstrap_server.admission.refusals import http_logger
from bootstrap_server.build import build_text
from bootstrap_server.prometheus_text import CONTENT_TYPE
from kvstore.client.status import StoreStatus
from kvstore.metrics.table import text
from te.version import version

__all__ = ["MetricsServer"]

logger = logging.getLogger(__name__)

BACKLOG: Final = 128
SWEEP_S: Final = 1.0
"""How often those are hung up on who have not sent their request in time."""
SHUTDOWN_S: Final = 1.0


class MetricsServer:
    """Answers in a thread of its own; clients wait for nobody but the figures. Use it as a context
    manager, or call ``close``."""

    def __init__(self, status: Callable[[], StoreStatus], host: str, port: int) -> None:
        """Starts to listen; ``port`` 0 is any free one. ``OSError`` names the address."""
        self._status = status
        self._build = build_text(version())
        try:
            listener = _listening(host, port)
        except OSError as exc:
            raise OSError(
                exc.errno,
                f"cannot answer GET /metrics at {_shown(host)}:{port}: {exc.strerror or exc}; give"
                " --metrics an address of this host and a port that is free",
            ) from exc
        bound, actual = listener.getsockname()[:2]
        self.url: Final = f"http://{_shown(str(bound))}:{actual}/metrics"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="kvstore-metrics", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answers nobody any more. Idempotent."""
        with contextlib.suppress(RuntimeError):  # The loop has ended already.
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        watch = ConnectionWatch()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            watch.heard(request.transport)
            watch.proved(request.transport)
            response = self._answer(request)
            response.force_close()  # One request for each connection.
            return response

        handler = web.Server(
            handle, access_log=None, logger=http_logger("kvstore.http"), **HTTP_BOUNDS
        )
        server = await self._loop.create_server(
            watch.factory(handler), sock=listener, backlog=BACKLOG
        )
        while not self._stop.is_set():
            watch.sweep()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), SWEEP_S)
        server.close()
        await handler.shutdown(SHUTDOWN_S)

    def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.path != "/metrics":
            return web.Response(status=404, text="only /metrics is here")
        if request.method != "GET":
            return web.Response(status=405, text="GET it", headers={"Allow": "GET"})
        try:
            body = f"{text(self._status())}{self._build}".encode()
        except Exception:
            logger.exception("a bug in the store: /metrics was not answered")
            return web.Response(status=500, text="the log of this process says why")
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _listening(host: str, port: int) -> socket.socket:
    """``OSError`` if it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
