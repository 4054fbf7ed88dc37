# SPDX-License-Identifier: Apache-2.0
"""Optimistic prefill (--optimistic-prefill-attempts): prompts are computed before a decode rank has
asked for their rooms, and wait with their pages until one does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import make_model
from cpu_serving.servers import ServerOptions
from cpu_serving.traffic import Answer, Request, compare, make_requests, run, send
from direct import computed_tokens, in_a_room

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

# Far beyond what is needed, far below forever.
BOUND_S = 180.0
CHUNK = 64
#: SGLang throws the first attempt of every second request away: which, follows from its id.
RETRIES = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}


@pytest.fixture(scope="module")
def layout() -> Layout:
    both = ServerOptions(make_model("llama"), page_size=16, chunked_prefill_size=CHUNK)
    optimistic = replace(both, extra_args=("--optimistic-prefill-attempts", "2"), extra_env=RETRIES)
    return Layout("optimistic", "llama", optimistic, both)


def test_prompts_that_are_computed_before_a_decode_rank_asks(serving: Serving) -> None:
    prefill, decode = serving.pair.prefill, serving.pair.decode
    plain = make_requests(6, 400, seed=81)
    requests = [in_a_room(prefill, request, rid=f"early-{at}") for at, request in enumerate(plain)]

    async def one(session: aiohttp.ClientSession, request: Request) -> Answer:
        before = computed_tokens(prefill)
        first = asyncio.create_task(send(session, prefill.url, request))
        while computed_tokens(prefill) < before + len(request.input_ids):
            assert not first.done(), first.result()
            await asyncio.sleep(0.01)
        answer = await send(session, decode.url, request)
        assert (await first).error is None
        return answer

    async def one_by_one(session: aiohttp.ClientSession) -> list[Answer]:
        return [await one(session, request) for request in requests]

    got = run(one_by_one, BOUND_S)
    assert [answer.error for answer in got] == [None] * len(got)
    assert not compare(serving.expected(plain), got)
    assert "optimistic prefill yielded" in prefill.process.log_text(), "no attempt was repeated"


def test_tokens_are_equal(serving: Serving) -> None:
    serving.assert_equal(make_requests(24, 500, seed=82), concurrency=12)
