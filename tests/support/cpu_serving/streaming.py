# SPDX-License-Identifier: Apache-2.0
"""Requests whose tokens come one by one, and when they came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from cpu_serving.processes import ServingError
from cpu_serving.traffic import Request, run

__all__ = ["Streamed", "stream_all"]


@dataclass(frozen=True)
class Streamed:
    """One answer. Times are in seconds from the moment at which the first request was sent."""

    output_ids: tuple[int, ...]
    cached_tokens: int
    sent_s: float
    first_s: float
    last_s: float

    @property
    def first_token_s(self) -> float:
        """From the request to the first token."""
        return self.first_s - self.sent_s

    @property
    def per_token_s(self) -> float:
        """Mean time of a token after the first one; 0.0 if there is none."""
        following = len(self.output_ids) - 1
        return (self.last_s - self.first_s) / following if following else 0.0


def stream_all(url: str, requests: Sequence[Request]) -> list[Streamed]:
    """Sends all at once; answers in the order of the requests. ``ServingError`` if one fails."""

    async def all_of(session: aiohttp.ClientSession) -> list[Streamed]:
        begun_s = time.monotonic()
        return list(await asyncio.gather(*(_one(session, url, one, begun_s) for one in requests)))

    return run(all_of)


async def _one(
    session: aiohttp.ClientSession, url: str, request: Request, begun_s: float
) -> Streamed:
    sent_s = time.monotonic() - begun_s
    first_s: float | None = None
    last: dict[str, Any] = {}
    try:
        async with session.post(f"{url}/generate", json=request.body() | {"stream": True}) as got:
            if got.status != 200:
                raise ServingError(f"a request failed: HTTP {got.status}: {await got.text()}")
            async for line in got.content:
                word, _, rest = line.decode().strip().partition("data: ")
                if word or not rest or rest == "[DONE]":
                    continue
                last = json.loads(rest)
                if "error" in last:
                    raise ServingError(f"a request failed: {last['error']}")
                if first_s is None:
                    first_s = time.monotonic() - begun_s
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ServingError(f"a request failed: {type(error).__name__}: {error}") from error
    output_ids = tuple(last.get("output_ids", ()))
    if first_s is None or len(output_ids) != request.new_tokens:
        raise ServingError(
            f"a request ended after {len(output_ids)} of {request.new_tokens} tokens: {last}"
        )
    cached = int(last["meta_info"].get("cached_tokens") or 0)
    return Streamed(output_ids, cached, sent_s, first_s, time.monotonic() - begun_s)
