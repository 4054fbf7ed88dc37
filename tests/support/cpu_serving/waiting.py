# SPDX-License-Identifier: Apache-2.0
"""Requests that wait at a decode server for a prefill that never gets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from cpu_serving.pools import waiting_requests
from cpu_serving.processes import ServingError
from cpu_serving.servers import Server
from cpu_serving.traffic import Answer, Request, send

__all__ = ["all_wait"]

POLL_S = 0.2


async def all_wait(
    session: aiohttp.ClientSession,
    decode: Server,
    requests: Sequence[Request],
    timeout_s: float,
    count_waiting: Callable[[Server], int] = waiting_requests,
) -> list[asyncio.Task[Answer]]:
    """Sends requests, which name the rooms that they are in, to the decode server alone. Returns
    when all of them wait there, by `count_waiting`; ServingError."""
    sent = [asyncio.create_task(send(session, decode.url, request)) for request in requests]
    deadline_s = time.monotonic() + timeout_s
    while (count := await asyncio.to_thread(count_waiting, decode)) < len(sent):
        if time.monotonic() > deadline_s:
            raise ServingError(
                f"after {timeout_s:.0f} s {count} of {len(sent)} requests wait at the "
                f"{decode.process.name}\n{decode.process.tail()}"
            )
        await asyncio.sleep(POLL_S)
    return sent
