# SPDX-License-Identifier: Apache-2.0
"""Has prefill servers compute the KV of retracted requests again, in threads of its own: such a
request takes as long as its prefill, up to minutes, and must not stand in the way of look-ups."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from bootstrap_server import BootstrapError, HttpClient
from sglang_mooncake.workers import Workers

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
        timeout_s: how long a retracted request may take until its prefill server has answered,
            with the time for which it waits behind others.
        timeout_name: the setting, for sentences.
    """

    def __init__(self, timeout_s: float, timeout_name: str) -> None:
        self._timeout_s, self._timeout_name = timeout_s, timeout_name
        self._workers = Workers("kv-recompute", WORKERS, REQUESTS_MAX)

    def __len__(self) -> int:
        """Requests that wait or are under way."""
        return len(self._workers)

    def ask(
        self,
        address: str,
        payload: dict[str, Any],
        wanted: Callable[[], bool],
        failed: Callable[[str], None],
    ) -> None:
        """POSTs to `/generate` of the prefill server at `address` ("host:port"), unless it is not
        `wanted` any more when its turn comes; `failed` hears why that did not work, in a worker or
        at once."""

        def run(waited_s: float) -> None:
            if wanted():
                problem = self._problem(address, payload, waited_s)
                if problem is not None:
                    failed(f"cannot recompute: {problem}")

        if not self._workers.submit(run):
            failed(
                f"cannot recompute: {REQUESTS_MAX} retracted requests wait for their prefill "
                "servers already"
            )

    def close(self) -> None:
        self._workers.close()

    def _problem(self, address: str, payload: dict[str, Any], waited_s: float) -> str | None:
        """Asks; returns what went wrong."""
        left_s = self._timeout_s - waited_s
        if left_s <= 0:
            return (
                f"the request waited {waited_s:.0f} s behind {WORKERS} other retracted requests "
                f"({self._timeout_name} is {self._timeout_s:g} s)"
            )
        try:
            client = HttpClient(address, left_s, "the prefill server")
            try:
                body = json.dumps(payload).encode()
                status, answer = client.request("POST", "/generate", body)
            finally:
                client.close()
        except BootstrapError as error:
            return str(error)
        except Exception as error:  # the room must end, whatever it was
            logger.exception("a request to compute KV again failed")
            return f"internal error: {error!r}"
        if status < 400:
            return None
        excerpt = answer[:ANSWER_EXCERPT_CHARS].decode(errors="replace")
        return f"POST http://{address}/generate answered {status}: {excerpt}"
