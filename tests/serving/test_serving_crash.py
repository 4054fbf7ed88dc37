# SPDX-License-Identifier: Apache-2.0
"""A prefill server freezes or dies; the decode server fails its requests and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import aiohttp
import pytest
from cpu_serving.expectations import Reference, Serving
from cpu_serving.nursery import Nursery
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import Fleet, Pair, Server
from cpu_serving.traffic import Answer, make_requests, run, send
from cpu_serving.waiting import all_wait
from direct import in_a_room
from interrupting import assert_failed_in_time, interrupted

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

BOUND_S = 180.0
LONG_PROMPT = (7,) * 3_000


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("crash"), nursery) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def pair(fleet: Fleet, decode: Server) -> Pair:
    prefill = fleet.server("prefill", decode.options)
    pair = Pair(prefill, decode, fleet.router(prefill, decode))
    pair.wait_ready()
    return pair


async def left_alone(pair: Pair, seed: int, session: aiohttp.ClientSession) -> list[Answer]:
    """More requests than the decode server has memory for wait there, so that most of them have
    named no pages; then the prefill server dies."""
    long = (replace(one, input_ids=LONG_PROMPT) for one in make_requests(50, 300, seed=seed))
    sent = await all_wait(
        session, pair.decode, [in_a_room(pair.prefill, request) for request in long], BOUND_S
    )
    await asyncio.to_thread(pair.prefill.process.kill)
    return await asyncio.gather(*sent)


def test_prefill_frozen_and_thawed(pair: Pair, reference: Reference) -> None:
    """The decode server does not wait for a frozen peer, and serves again once it is back."""
    serving = Serving(pair, "llama", reference)
    serving.assert_equal(make_requests(8, 300, seed=41))

    async def job(session: aiohttp.ClientSession) -> list[Answer]:
        waiting = [in_a_room(pair.prefill, request) for request in make_requests(6, 300, seed=42)]
        pair.prefill.process.freeze()
        return await asyncio.gather(*(send(session, pair.decode.url, r) for r in waiting))

    try:
        answers = run(job, BOUND_S)
    finally:
        pair.prefill.process.thaw()
    assert_failed_in_time(answers)
    assert leaked_pages(pair.decode, timeout_s=BOUND_S) == 0
    serving.assert_equal(make_requests(8, 300, seed=43))


def test_prefill_killed_under_load(fleet: Fleet, pair: Pair, reference: Reference) -> None:
    Serving(pair, "llama", reference).assert_equal(make_requests(8, 300, seed=31))
    kill = pair.prefill.process.kill
    assert_failed_in_time(run(lambda session: interrupted(pair, kill, 32, session), BOUND_S))
    assert leaked_pages(pair.decode, timeout_s=BOUND_S) == 0
    again = Serving(replace(pair, prefill=fleet.again(pair.prefill)), "llama", reference)
    again.pair.wait_ready()
    again.assert_equal(make_requests(16, 600, seed=33))
    again.assert_whole()
    # Once more, now that it is there again.
    answers = run(lambda session: left_alone(again.pair, 34, session), BOUND_S)
    assert all(answer.error and "TimeoutError" not in answer.error for answer in answers)
    assert leaked_pages(pair.decode, timeout_s=BOUND_S) == 0, "the decode server goes on"
