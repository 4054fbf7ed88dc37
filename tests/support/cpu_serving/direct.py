# SPDX-License-Identifier: Apache-2.0
"""Requests that a client sends to both servers of a pair itself, as a router would."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from cpu_serving.processes import ServingError
from cpu_serving.servers import Server
from cpu_serving.traffic import Request

__all__ = ["Streamed", "in_a_room", "stream"]

_rooms = itertools.count(1 << 40)
_DATA = b"data:"
_END = b"[DONE]"


@dataclass(frozen=True)
class Streamed:
    """An answer that came token by token.

    first_token_s: when the first of them was there, by `time.monotonic`.
    meta: SGLang's ``meta_info`` of the last message.
    """

    output_ids: tuple[int, ...]
    first_token_s: float
    meta: Mapping[str, Any]


def in_a_room(prefill: Server, request: Request, **fields: object) -> Request:
    """The request with what the router adds for both servers: a room of its own."""
    where = {
        "bootstrap_host": prefill.options.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    return replace(request, fields={**where, **fields})


async def stream(session: aiohttp.ClientSession, server: Server, request: Request) -> Streamed:
    """Send it to one server and read the answer as it comes. Raises ServingError when it fails."""
    name = server.process.name
    first_token_s = None
    last: dict[str, Any] = {}
    try:
        body = {**request.body(), "stream": True}
        async with session.post(f"{server.url}/generate", json=body) as response:
            if response.status != 200:
                raise ServingError(f"the {name} answers {response.status}: {await response.text()}")
            async for line in response.content:
                message = line.removeprefix(_DATA).strip()
                if not line.startswith(_DATA) or message == _END:
                    continue
                last = json.loads(message)
                if first_token_s is None and last.get("output_ids"):
                    first_token_s = time.monotonic()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        said = f"{type(error).__name__}: {error}\n{server.process.tail()}"
        raise ServingError(f"no whole answer of the {name}: {said}") from error
    meta = last.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    if first_token_s is None or finish.get("type") == "abort":
        raise ServingError(f"the {name} failed a request: {last}\n{server.process.tail()}")
    return Streamed(tuple(last["output_ids"]), first_token_s, meta)
