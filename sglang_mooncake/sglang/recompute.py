# SPDX-License-Identifier: Apache-2.0
"""Has prefill servers compute the KV of retracted requests again, in threads of its own: such a
request takes as long as its prefill, up to minutes, and must not stand in the way of look-ups."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from bootstrap_server import BootstrapError, HttpClient

__all__ = ["Recompute"]

logger = logging.getLogger(__name__)

#: As many as SGLang's own backend asks for at a time.
WORKERS = 16
#: With those under way. A decode rank holds fewer requests than that.
REQUESTS_MAX = 16_384
ANSWER_EXCERPT_CHARS = 200


class Recompute:
    """Any thread may call; `ask` does not wait.

    Args:
        timeout_s: how long a prefill server may take over one request.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        #: Requests that wait or are under way.
        self.open = 0
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="kv-recompute")

    def ask(self, address: str, payload: dict[str, Any], failed: Callable[[str], None]) -> None:
        """POSTs to `/generate` of the prefill server at `address` ("host:port"); `failed` hears why
        that did not work, in a worker or at once."""
        with self._lock:
            if self.open >= REQUESTS_MAX:
                failed(
                    f"cannot recompute: {REQUESTS_MAX} retracted requests wait for their prefill "
                    "servers already"
                )
                return
            self.open += 1
        self._workers.submit(self._ask, address, payload, failed)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _ask(self, address: str, payload: dict[str, Any], failed: Callable[[str], None]) -> None:
        problem = None
        try:
            client = HttpClient(address, self._timeout_s, "the prefill server")
            try:
                body = json.dumps(payload).encode()
                status, answer = client.request("POST", "/generate", body)
            finally:
                client.close()
            if status >= 400:
                excerpt = answer[:ANSWER_EXCERPT_CHARS].decode(errors="replace")
                problem = f"POST http://{address}/generate answered {status}: {excerpt}"
        except BootstrapError as error:
            problem = str(error)
        except Exception as error:  # the room must end, whatever it was
            logger.exception("a request to compute KV again failed")
            problem = f"internal error: {error!r}"
        finally:
            with self._lock:
                self.open -= 1
        if problem is not None:
            failed(f"cannot recompute: {problem}")
