# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of one prefill and one decode server of vLLM: what a request needs to pass both.
It has no streams and no balance; vLLM's own examples of proxies have."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from cpu_serving.ports import HOST

__all__ = ["Proxy", "ask_decode", "ask_prefill"]

TIMEOUT_S = 120.0
PATH = "/v1/completions"

Params = Mapping[str, Any]


def ask_prefill(url: str, body: Mapping[str, Any]) -> Params:
    """Has a prefill server compute a prompt: what its decode server must be told."""
    asked = dict(body) | {"max_tokens": 1, "n": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params: Params = _post(url, asked)["kv_transfer_params"]
    return params


def ask_decode(url: str, body: Mapping[str, Any], params: Params) -> Any:
    """The decode server's answer."""
    return _post(url, dict(body) | {"kv_transfer_params": params})


class Proxy:
    """``url`` takes completions. ``change`` may change what the decode server is told."""

    def __init__(
        self, prefill_url: str, decode_url: str, change: Callable[[Params], Params] = dict
    ) -> None:
        self._urls, self._change = (prefill_url, decode_url), change
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                proxy.answer(self)

            def log_message(self, *args: Any) -> None:
                """Requests are not logged."""

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://{HOST}:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(TIMEOUT_S)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """One request, in a thread of its own."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        prefill, decode = self._urls
        try:
            params = self._change(ask_prefill(prefill, body))
            status, answer = 200, ask_decode(decode, body, params)
        except (OSError, ValueError, KeyError) as error:
            said = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
            status, answer = 502, {"error": f"{error!r} {said}"}
        data = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def _post(url: str, body: Mapping[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + PATH, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.loads(response.read())
