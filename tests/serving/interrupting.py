# SPDX-License-Identifier: Apache-2.0
"""Something happens to a prefill server while requests wait for it and others are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from cpu_serving.pools import waiting_requests
from cpu_serving.servers import Pair, Server
from cpu_serving.traffic import Answer, make_requests, send
from cpu_serving.waiting import all_wait
from direct import in_a_room

__all__ = ["BOUND_S", "WAITING", "assert_failed_in_time", "interrupted"]

#: How many requests wait at the decode server.
WAITING = 6
# Far beyond what is needed, far below forever.
BOUND_S = 180.0


async def interrupted(
    pair: Pair,
    interrupt: Callable[[], None],
    seed: int,
    session: aiohttp.ClientSession,
    count_waiting: Callable[[Server], int] = waiting_requests,
) -> list[Answer]:
    """Requests of which some wait at the decode server for a prefill that never gets them, while
    others are on their way through the router; then `interrupt` happens to the prefill server."""
    waiting = [in_a_room(pair.prefill, one) for one in make_requests(WAITING, 300, seed=seed)]
    sent = await all_wait(session, pair.decode, waiting, BOUND_S, count_waiting)
    moving = make_requests(24, 1500, seed=seed + 1)
    sent += [asyncio.create_task(send(session, pair.router.url, request)) for request in moving]
    await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.to_thread(interrupt)
    return await asyncio.gather(*sent)


def assert_failed_in_time(answers: list[Answer]) -> None:
    """Each waiting request failed, and no client had to give up on any."""
    assert all(answer.error for answer in answers[:WAITING])
    late = [answer.error for answer in answers if answer.error and "TimeoutError" in answer.error]
    assert not late
