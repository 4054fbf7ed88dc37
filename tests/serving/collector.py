# SPDX-License-Identifier: Apache-2.0
"""An OpenTelemetry collector for tests: OTLP over HTTP, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collected", "Collector", "collecting"]


@dataclass(frozen=True)
class Collected:
    """One span; ids in hexadecimal, times in nanoseconds since the Unix epoch."""

    name: str
    span_id: str
    parent_id: str
    scope: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool
    events: tuple[str, ...]


class Collector:
    def __init__(self, url: str) -> None:
        #: What SGLang's --otlp-traces-endpoint takes.
        self.url = url
        self._lock = threading.Lock()
        self._spans: dict[str, list[Collected]] = {}

    def trace(self, trace_id: str) -> list[Collected]:
        """The spans of one trace so far."""
        with self._lock:
            return list(self._spans.get(trace_id, ()))

    def take(self, message: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(message)
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans = self._spans.setdefault(span.trace_id.hex(), [])
                        spans.append(_collected(span, scope.scope.name))


def _collected(span: Any, scope: str) -> Collected:
    return Collected(
        span.name,
        span.span_id.hex(),
        span.parent_span_id.hex(),
        scope,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {one.key: _value(one.value) for one in span.attributes},
        span.status.code == span.status.STATUS_CODE_ERROR,
        tuple(event.name for event in span.events),
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the same
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
