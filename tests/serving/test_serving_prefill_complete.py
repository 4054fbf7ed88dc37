# SPDX-License-Identifier: Apache-2.0
"""The allocation policy prefill_complete: the decode server makes room for a request once its
prompt is computed, so that none of it is held for prompts in the queue of the prefill server."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.traffic import Answer, compare, make_requests, run, send
from direct import computed_tokens, in_a_room, open_rooms

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

# Far beyond what is needed, far below forever.
BOUND_S = 180.0
POLICY = ("--disaggregation-decode-allocation-policy", "prefill_complete")


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout.equal(
        "prefill-complete", page_size=16, chunked_prefill_size=64, extra_args=POLICY
    )


def test_tokens_are_equal(serving: Serving) -> None:
    serving.assert_equal(make_requests(24, 500, seed=91), concurrency=12)


def test_a_prompt_waits_for_the_decode_server(serving: Serving) -> None:
    prefill, decode = serving.pair.prefill, serving.pair.decode
    before = computed_tokens(prefill)
    plain = make_requests(2, 300, seed=92)[1]
    request = in_a_room(prefill, plain)

    async def ask(session: aiohttp.ClientSession) -> Answer:
        ahead = asyncio.create_task(send(session, prefill.url, request))
        while computed_tokens(prefill) < before + len(request.input_ids):
            assert not ahead.done(), ahead.result()
            await asyncio.sleep(0.01)
        answer = await send(session, decode.url, request)
        assert (await ahead).error is None
        return answer

    assert not compare(serving.expected([plain]), [run(ask, BOUND_S)])


def test_the_decode_server_waits_for_a_prompt(serving: Serving) -> None:
    prefill, decode = serving.pair.prefill, serving.pair.decode
    plain = make_requests(2, 300, seed=95)[1]
    request = in_a_room(prefill, plain)

    async def ask(session: aiohttp.ClientSession) -> Answer:
        ahead = asyncio.create_task(send(session, decode.url, request))
        while not open_rooms(decode):
            assert not ahead.done(), ahead.result()
            await asyncio.sleep(0.05)
        assert (await send(session, prefill.url, request)).error is None
        return await ahead

    assert not compare(serving.expected([plain]), [run(ask, BOUND_S)])


def test_aborts_while_the_prompt_is_computed(serving: Serving) -> None:
    requests = make_requests(16, 900, seed=93)

    async def abort_all(session: aiohttp.ClientSession) -> list[Answer]:
        sent = [asyncio.create_task(send(session, serving.url, request)) for request in requests]
        await asyncio.wait(sent, return_when=asyncio.FIRST_COMPLETED)
        for server in (serving.pair.decode, serving.pair.prefill):
            async with session.post(f"{server.url}/abort_request", json={"abort_all": True}) as got:
                assert got.status == 200
        return await asyncio.gather(*sent)

    got = run(abort_all, BOUND_S)
    failed = [at for at, answer in enumerate(got) if answer.error]
    assert failed, "nothing was aborted"
    assert set(compare(serving.expected(requests), got)) == set(failed)
    serving.assert_equal(make_requests(8, 300, seed=94), concurrency=8)
