# SPDX-License-Identifier: Apache-2.0
"""``GET /metrics`` of a process that has no HTTP server of its own: ``kvstore serve --metrics``."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any, Final, Self

from kvstore.metrics import CONTENT_TYPE, text
from kvstore.status import StoreStatus

__all__ = ["MetricsServer"]

logger = logging.getLogger(__name__)

CLIENT_S: Final = 5.0
"""A client that has not sent its request and read its answer after so long is hung up on. Clients
are answered one at a time, so that no number of them costs more than one thread and the kernel's
queue."""
_STOP_LOOK_S: Final = 0.1


class MetricsServer:
    """Answers in a thread of its own. Use it as a context manager, or call ``close``."""

    def __init__(
        self, status: Callable[[], StoreStatus], host: str, port: int, client_s: float = CLIENT_S
    ) -> None:
        """Starts to listen; ``port`` 0 is any free one. ``OSError`` names the address."""

        class Handler(_Handler):
            read = staticmethod(lambda: text(status()))

        try:
            self._server = _Server(host, port, Handler, client_s)
        except OSError as exc:
            raise OSError(
                exc.errno,
                f"cannot answer GET /metrics at {_shown(host)}:{port}: {exc.strerror or exc}; give"
                " --metrics an address of this host and a port that is free",
            ) from exc
        bound, actual = self._server.server_address[:2]
        self.url: Final = f"http://{_shown(str(bound))}:{actual}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_STOP_LOOK_S,),
            name="kvstore-metrics",
            daemon=True,
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
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(HTTPServer):
    request_queue_size = 16

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], client_s: float
    ) -> None:
        self._client_s = client_s
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which looks the host's name up and may wait for a name server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """With a deadline for all of it: a client may send a byte now and then."""
        deadline = threading.Timer(self._client_s, _hang_up, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request(request, client_address)
        finally:
            deadline.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        error = sys.exception()
        if isinstance(error, OSError):
            logger.debug("a client of /metrics at %s went away: %s", client_address, error)
        else:
            logger.error("a bug in the store: /metrics was not answered", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    """One request for each connection."""

    read: Callable[[], str]
    server_version = "kvstore"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, explain="only /metrics is here")
            return
        body = self.read().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - as the class has it
        logger.debug("/metrics: %s: " + format, self.client_address, *arguments)


def _hang_up(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # It is closed already.
        request.shutdown(socket.SHUT_RDWR)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
