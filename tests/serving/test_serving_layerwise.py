# SPDX-License-Identifier: Apache-2.0
"""KV that leaves layer by layer while the prefill server computes: one rank on each side, without
and with overlap scheduling, aborts, and what must not go unnoticed.

In what the hand-over reads, a layer is garbage until the forward has written it, with overlap
scheduling until its event has happened (`tests/support/cpu_serving/shim/cpu_published.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from cpu_serving.expectations import UNVERIFIED, Layout, Serving
from cpu_serving.layerwise import Layerwise, layers_announced_early, layers_left_out
from cpu_serving.overlap import Overlap, events_ignored
from cpu_serving.traffic import (
    Answer,
    compare,
    make_requests,
    make_shared_requests,
    run,
    send,
    send_all,
)
from direct import computed_tokens, in_a_room
from layers import bytes_early

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

# A prompt has several chunks, and SGLang keeps the last, partial page of one for the next.
CHUNK, PAGE = 192, 16
PROMPT = 500
# Far beyond what is needed, far below forever.
BOUND_S = 180.0

OVERLAP = Overlap(delay_ms=20, layer_ms=4)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="plain scheduling", marks=pytest.mark.by_turns("plain")),
        pytest.param(OVERLAP, id="overlap scheduling"),
    ],
)
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout.equal(
        "layers",
        "llama-deep",
        page_size=PAGE,
        chunked_prefill_size=CHUNK,
        overlap=request.param,
        layerwise=Layerwise(always=True),
        extra_env=UNVERIFIED,
    )


def test_tokens_are_equal_and_most_bytes_leave_early(serving: Serving) -> None:
    with bytes_early(serving) as early:
        serving.assert_equal(make_requests(12, PROMPT, seed=51), concurrency=6)
    early.assert_share(0.5)


def test_prefixes_seen_before_and_prompts_that_continue_them(serving: Serving) -> None:
    asked = make_shared_requests(8, PROMPT, seed=52)
    tails = make_requests(8, 100, seed=53)
    longer = [
        replace(request, input_ids=request.input_ids + tail.input_ids)
        for request, tail in zip(asked, tails, strict=True)
    ]
    with bytes_early(serving) as early:
        for requests in (asked, asked, longer):
            serving.assert_equal(requests, concurrency=4)
    early.assert_share(0)


@pytest.mark.parametrize("way", ["abort_request", "disconnect"])
def test_aborts_in_the_middle_of_a_prompt(serving: Serving, way: str) -> None:
    servers = serving.pair.prefill, serving.pair.decode
    asked = [
        in_a_room(serving.pair.prefill, request)
        for request in make_requests(6, 6 * CHUNK, seed=54 + len(way))[-4:]
    ]

    async def abort_all(session: aiohttp.ClientSession) -> list[Answer | BaseException]:
        before = computed_tokens(serving.pair.prefill)
        sent = [
            asyncio.create_task(send(session, server.url, request))
            for request in asked
            for server in servers
        ]
        while computed_tokens(serving.pair.prefill) < before + CHUNK:
            assert not all(task.done() for task in sent), "all were answered before a chunk"
            await asyncio.sleep(0.002)
        if way == "disconnect":
            for task in sent:
                task.cancel()
        else:
            for server in servers:
                url = f"{server.url}/abort_request"
                async with session.post(url, json={"abort_all": True}) as got:
                    assert got.status == 200
        return await asyncio.gather(*sent, return_exceptions=True)

    outcomes = run(abort_all, BOUND_S)
    assert not all(isinstance(o, Answer) and o.error is None for o in outcomes), "none was aborted"
    serving.assert_equal(make_requests(6, PROMPT, seed=55), concurrency=6)


@pytest.mark.parametrize("left_out", [False, True], ids=["read too early", "left out"])
def test_a_layer_too_early_or_left_out_is_noticed(serving: Serving, left_out: bool) -> None:
    """The negative controls: what is asked for above can fail."""
    folder = serving.pair.prefill.stats_dir
    if left_out:
        control = layers_left_out(folder)
    elif serving.pair.prefill.options.overlap is not None:
        control = events_ignored(folder)
    else:
        control = layers_announced_early(folder)
    asked = make_requests(8, PROMPT, seed=56 + left_out)
    with control:
        got = send_all(serving.url, asked, concurrency=6)
    assert compare(serving.expected(asked), got), "the hand-over was broken and nobody noticed"
    serving.assert_equal(asked, concurrency=6)
