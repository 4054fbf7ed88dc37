# SPDX-License-Identifier: Apache-2.0
"""Prefill servers with several DP ranks, each of which has a cache of its own."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from router_world import World, answers, run, token_names, until
from test_router_events import PAGE, Publisher, heard, stored

from sglang_mooncake.router.sglang_http import ROOM_BITS, room_for

BY_ROOM = {"load_balance_method": "follow_bootstrap_room"}
TOLD = answers({"meta_info": {"prompt_tokens": 400, "cached_tokens": 0}})


@given(room=st.integers(0, 2**ROOM_BITS - 1), ranks=st.integers(1, 1024), number=st.integers(0))
def test_a_room_names_the_rank(room: int, ranks: int, number: int) -> None:
    rank = number % ranks
    found = room_for(room, rank, ranks)
    assert found % ranks == rank
    assert 0 <= found < 2**ROOM_BITS + 1024


def of_ranks(**info: Any) -> World:
    world = World(prefill_policy="cache_aware", health_interval_s=0.02)
    world.prefill[0].info, world.prefill[0].answer = info, TOLD
    return world


async def known(world: World, ranks: int) -> None:
    server = world.known(world.prefill[0])
    await until(lambda: len(world.views[server]) == ranks)


async def rank_of(world: World, ranks: int, **body: Any) -> int:
    """By which a request of a client goes, at both servers."""
    assert (await world.ask(**body))[0] == 200
    await world.idle()
    room = world.prefill[0].asked[-1]["bootstrap_room"]
    assert world.decode[0].asked[-1]["bootstrap_room"] == room
    return int(room % ranks)


def test_a_prompt_goes_to_the_rank_that_had_its_beginning_and_others_elsewhere() -> None:
    async def job() -> None:
        async with of_ranks(dp_size=3, **BY_ROOM) as world:
            await known(world, 3)
            prompts = [list(range(1000 * n, 1000 * n + 400)) for n in range(3)]
            first = await rank_of(world, 3, input_ids=prompts[0])
            assert await rank_of(world, 3, input_ids=[*prompts[0], 1]) == first
            # Those that come at the same time are computed by one rank each.
            asked = len(world.prefill[0].asked)
            gate = asyncio.Event()

            async def later(*of: Any) -> Any:
                await gate.wait()
                return await TOLD(*of)

            world.prefill[0].answer = later
            waiting = []
            for prompt in prompts:
                waiting.append(asyncio.create_task(world.ask(input_ids=prompt)))
                await until(lambda: len(world.prefill[0].asked) == asked + len(waiting))
            gate.set()
            await asyncio.gather(*waiting)
            await world.idle()
            rooms = [one["bootstrap_room"] for one in world.prefill[0].asked[asked:]]
            assert {room % 3 for room in rooms} == {0, 1, 2}
            assert rooms[0] % 3 == first
            told = json.loads((await world.get("/v1/router"))[1])["servers"]["prefill"][0]
            assert [one["queue_s"] for one in told["dp_ranks"]] == [0.0] * 3
            hits = sum(one["expected_cached_tokens"] for one in told["dp_ranks"])
            url = world.prefill[0].url
            of_server = f'expected_cached_tokens_total{{role="prefill",server="{url}"}} '
            (value,) = re.findall(of_server + "(.*)", (await world.get("/metrics"))[1])
            assert float(value) == hits > 0

    run(job())


@pytest.mark.parametrize(
    ("named", "rank"),
    [
        ({"routed_dp_rank": 2}, 2),
        ({"data_parallel_rank": 1}, 1),
        ({"disagg_prefill_dp_rank": 1, "routed_dp_rank": None}, 1),
        ({"disagg_prefill_dp_rank": 1, "routed_dp_rank": 0}, 0),
    ],
)
def test_a_rank_that_the_client_names_is_the_one_that_the_decode_server_asks(
    named: dict[str, Any], rank: int
) -> None:
    async def job() -> None:
        async with of_ranks(dp_size=3, **BY_ROOM) as world:
            await known(world, 3)
            for _ in range(4):
                assert await rank_of(world, 3, input_ids=[1], **named) == rank
            # What cannot be meant is for the server to refuse.
            for nonsense in (3, -1, "first"):
                await rank_of(world, 3, input_ids=[1], routed_dp_rank=nonsense)

    run(job())


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({"dp_size": 2, "attn_dp_size": 1, **BY_ROOM}, 2),
        ({"dp_size": 1, "attn_dp_size": 4, **BY_ROOM}, 4),
        ({"dp_size": None, **BY_ROOM}, 1),
    ],
)
def test_how_many_ranks_there_are(info: dict[str, Any], ranks: int) -> None:
    async def job() -> None:
        async with of_ranks(**info) as world:
            await until(lambda: world.prefill[0].others)
            await known(world, ranks)

    run(job())


@pytest.mark.parametrize(
    "info", [{"dp_size": 2, "load_balance_method": "round_robin"}, {"dp_size": 10**9, **BY_ROOM}]
)
def test_ranks_that_cannot_be_chosen_are_taken_for_one_cache(
    info: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        async with of_ranks(**info) as world:
            await until(lambda: f"has {info['dp_size']} DP ranks" in caplog.text)
            await known(world, 1)
            assert (await world.ask(input_ids=[1]))[0] == 200

    run(job())


def test_a_server_may_come_back_with_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_mooncake.router.event_source.ASK_AGAIN_S", 0.02)

    async def job() -> None:
        async with of_ranks(dp_size=3, **BY_ROOM) as world:
            await known(world, 3)
            await rank_of(world, 3, input_ids=list(range(400)))
            world.prefill[0].info = {}
            await known(world, 1)
            assert (await world.ask(input_ids=list(range(400))))[0] == 200

    run(job())


def two_publishers(context: zmq.asyncio.Context) -> tuple[Publisher, Publisher]:
    """At ports one behind the other, as those of two ranks."""
    for _ in range(100):
        first = Publisher(context)
        try:
            return first, Publisher(context, first.port + 1, first.replay_port + 1)
        except zmq.ZMQError:
            first.close()  # Somebody has one of these ports.
    raise AssertionError("no two ports in a row are free")


def test_each_rank_tells_of_its_own_cache() -> None:
    prompt = list(range(400))
    names = token_names(prompt, PAGE)

    async def job() -> None:
        context = zmq.asyncio.Context()
        publishers = two_publishers(context)
        repeating = [asyncio.create_task(one.repeat()) for one in publishers]
        await publishers[1].publish(stored(*names))
        try:
            described = publishers[0].described(dp_size=2)
            async with of_ranks(**described, **BY_ROOM) as world:
                await known(world, 2)
                views = world.views[world.known(world.prefill[0])]
                await until(lambda: all(view.events is not None for view in views))
                for publisher, view in zip(publishers, views, strict=True):
                    assert view.events is not None
                    await heard(publisher, view.events)
                await until(lambda: views[1].events is not None and len(views[1].events) > 90)
                live = 'sglang_mooncake_router_event_streams{state="live"} 2'
                while live not in (await world.get("/metrics"))[1].splitlines():
                    await asyncio.sleep(0.01)  # A batch may be held until a missed one has come.
                _, found = await world.ask("/query", token_ids=prompt)
                one = found["default"][world.prefill[0].url]
                assert (one["longest_matched"], one["DP"]) == (400, {"0": 0, "1": 400})
                assert await rank_of(world, 2, input_ids=prompt) == 1
        finally:
            for task in repeating:
                task.cancel()
            await asyncio.gather(*repeating, return_exceptions=True)
            context.destroy(linger=0)

    run(job())
