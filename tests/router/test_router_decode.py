# SPDX-License-Identifier: Apache-2.0
"""Which decode server a request goes to: requests, memory, cache."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from math import inf
from random import Random
from typing import Any

import pytest
from router_world import World, run

from sglang_mooncake.router import load_source
from sglang_mooncake.router.decode_view import (
    LOAD_AGE_MAX_S,
    DecodeFigures,
    DecodeView,
    Load,
    best_decode,
    decode_reason,
)
from sglang_mooncake.router.servers import Server


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also servers whose first answer came before the test has said what they answer."""
    monkeypatch.setattr(load_source, "ASK_S", 0.05)
    monkeypatch.setattr(load_source, "ASK_AGAIN_S", 0.05)


@pytest.mark.parametrize(
    ("candidates", "at", "reason"),
    [
        ([DecodeFigures(9)], 0, "only"),
        ([DecodeFigures(2), DecodeFigures(1)], 1, "load"),
        # Of as many requests the one with more memory.
        ([DecodeFigures(1, 500.0), DecodeFigures(1, 600.0)], 1, "load"),
        # No memory for 100 tokens, unless its cache has some of them.
        ([DecodeFigures(0, 99.0), DecodeFigures(5, 100.0)], 1, "memory"),
        ([DecodeFigures(0, 99.0, 1.0), DecodeFigures(5, 100.0)], 0, "cache"),
        # What the cache has counts as much as one request at most.
        ([DecodeFigures(1, inf, 90.0), DecodeFigures(1)], 0, "cache"),
        ([DecodeFigures(2, inf, 90.0), DecodeFigures(1)], 1, "load"),
        ([DecodeFigures(1, inf, 10.0), DecodeFigures(1, inf, 80.0)], 1, "cache"),
        # Nobody has memory: the least is lacking where the most is free or cached.
        ([DecodeFigures(0, 10.0), DecodeFigures(3, 20.0)], 1, "memory"),
        ([DecodeFigures(0, 10.0, 60.0), DecodeFigures(3, 20.0)], 0, "cache"),
    ],
    ids=str,
)
def test_a_prompt_of_100_tokens_goes_where_there_is_room(
    candidates: list[DecodeFigures], at: int, reason: str
) -> None:
    assert best_decode(100.0, candidates, Random(1)) == at
    assert decode_reason(100.0, candidates, at) == reason


@pytest.mark.parametrize("tokens", [0.0, 100.0])
def test_of_equal_servers_any_is_chosen(tokens: float) -> None:
    random, equal = Random(1), [DecodeFigures(1)] * 3
    counts = Counter(best_decode(tokens, equal, random) for _ in range(3000))
    assert all(900 < counts[at] < 1100 for at in range(3))


def test_memory_is_what_a_server_told_less_what_it_was_sent_since() -> None:
    server = Server("decode", "http://a:1")
    view = DecodeView(server)
    assert view.figures(None, 0.0) == DecodeFigures(0)
    before = view.sent
    view.send(30.0)  # While it is asked.
    server.under_way = 1
    view.told({0: Load(requests=3, used_tokens=400, all_tokens=1000)}, before, 10.0)
    assert view.figures(None, 10.0) == DecodeFigures(3, 570.0)
    server.under_way = 2
    view.send(600.0)
    assert view.figures(None, 10.0 + LOAD_AGE_MAX_S) == DecodeFigures(4, 0.0)
    assert view.figures(None, 10.1 + LOAD_AGE_MAX_S) == DecodeFigures(2), "it is not known any more"


def test_requests_that_have_not_reached_their_server_are_nobody_elses() -> None:
    server = Server("decode", "http://a:1")
    view = DecodeView(server)
    server.under_way = 5
    view.told({0: Load(requests=3, used_tokens=0, all_tokens=0)}, {}, 0.0)
    assert view.figures(None, 0.0) == DecodeFigures(5), "memory of 0 tokens is none that was told"


def test_memory_is_that_of_the_dp_rank_which_the_client_has_named() -> None:
    """Of prompts that the server places itself each rank is taken to get as many."""
    view = DecodeView(Server("decode", "http://a:1"))
    view.send(9.0, 1)  # Ranks are not known yet.
    view.told({0: Load(1, 900, 1000), 1: Load(1, 200, 1000)}, view.sent, 0.0)
    free = [view.figures(None, 0.0, rank).free_tokens for rank in (0, 1, None, 2, -1)]
    assert free == [100.0, 800.0, 900.0, 900.0, 900.0]
    view.send(50.0, 1)
    view.send(20.0)
    view.send(10.0, 7)
    free = [view.figures(None, 0.0, rank).free_tokens for rank in (0, 1, None)]
    assert free == [85.0, 735.0, 820.0]


def test_a_prompt_goes_where_its_dp_rank_has_memory() -> None:
    async def job() -> None:
        async with World(
            decode=2, prefill_policy="cache_aware", decode_policy="cache_aware"
        ) as world:
            one, two = world.decode
            one.info = {"loads": [rank(0, 0, 10), rank(0, 0, 950, at=1)]}
            two.info = {"loads": [rank(1, 0, 500), rank(1, 0, 500, at=1)]}
            while [server["free_tokens"] for server in await told(world)] != [1040, 1000]:
                await asyncio.sleep(0.005)
            prompt = list(range(320))
            await world.ask(input_ids=prompt)
            assert [len(server.asked) for server in world.decode] == [1, 0]
            await world.ask(input_ids=prompt, routed_dp_rank=1)
            assert [len(server.asked) for server in world.decode] == [1, 1]
            await world.ask(input_ids=prompt, disagg_prefill_dp_rank=1)
            assert [len(server.asked) for server in world.decode] == [2, 1]

    run(job())


def rank(running: int, waiting: int, used: int, size: int = 1000, at: int = 0) -> dict[str, Any]:
    return {
        "dp_rank": at,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_tokens": used,
        "max_total_num_tokens": size,
    }


def test_servers_are_asked_for_their_load() -> None:
    async def job() -> None:
        async with World(
            decode=3, prefill_policy="cache_aware", decode_policy="cache_aware"
        ) as world:
            one, two, three = world.decode
            one.info = {"loads": [rank(0, 0, 950), rank(0, 0, 980, at=1)]}
            two.info = {"loads": [rank(2, 1, 100)]}
            three.info = {"loads": "none"}
            free = [70, 900, None]
            while [server["free_tokens"] for server in await told(world)] != free:
                await asyncio.sleep(0.005)
            assert [server["told_requests"] for server in await told(world)] == [0, 3, None]
            await three.stop()
            await world.ask(input_ids=list(range(320)))
            assert [len(server.asked) for server in world.decode] == [0, 1, 0]
            _, text = await world.get("/metrics")
            assert 'sglang_mooncake_router_decode_choices_total{reason="memory"} 1' in text
            assert f'decode_free_tokens{{role="decode",server="{two.url}"}}' in text
            assert f'decode_free_tokens{{role="decode",server="{three.url}"}}' not in text

    run(job())


async def told(world: World) -> list[dict[str, Any]]:
    """What the router knows of its decode servers."""
    _, text = await world.get("/v1/router")
    return list(json.loads(text)["servers"]["decode"])
