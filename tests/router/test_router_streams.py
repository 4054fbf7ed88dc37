# SPDX-License-Identifier: Apache-2.0
"""Many streams at once, and how far apart their tokens come."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
import router_world
from aiohttp import web
from router_world import FakeServer, World, as_event, begin_stream, run, until

from sglang_mooncake.router import forwarding
from sglang_mooncake.router.serving import allow_open_files


@pytest.mark.slow
def test_500_streams_at_once_go_on_side_by_side_and_come_to_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one core, beside the servers and the clients."""
    monkeypatch.setattr(router_world, "BOUND_S", 80.0)
    number = 500
    begun, all_begun, few = 0, asyncio.Event(), asyncio.Semaphore(50)
    allow_open_files()

    async def waits_for_all(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(as_event({"output_ids": [100]}))
        await all_begun.wait()  # The clients have it, all of them.
        await response.write(as_event({"output_ids": [100, 101]}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def job() -> None:
        async with World(2, 2, prefill_policy="cache_aware") as world:
            for server in world.decode:
                server.answer = waits_for_all

            async def one(at: int) -> bytes:
                nonlocal begun
                asked = {"input_ids": list(range(at, at + 64)), "stream": True}
                async with AsyncExitStack() as undo:
                    async with few:  # A host may let few connections wait to be accepted.
                        asking = world.client.post(f"{world.url}/generate", json=asked)
                        response = await undo.enter_async_context(asking)
                        first = await response.content.readany()
                    begun += 1
                    if begun == number:
                        all_begun.set()
                    return first + await response.content.read()

            answers = await asyncio.gather(*(one(at) for at in range(number)))
            whole = [as_event({"output_ids": [100, 101][:n]}) for n in (1, 2)]
            assert set(answers) == {b"".join([*whole, b"data: [DONE]\n\n"])}
            await world.idle()
            assert sum(len(server.asked) for server in world.prefill) == number

    run(job())


async def slowly(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    """Four tokens that are 0.05 s apart."""
    response = await begin_stream(request)
    for count in range(1, 5):
        await asyncio.sleep(0.05 if count > 1 else 0.0)
        await response.write(as_event({"output_ids": list(range(count))}))
    await response.write(b"data: [DONE]\n\n")
    return response


def test_requests_are_refused_while_tokens_would_come_too_far_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine lets a write take long, too.
    monkeypatch.setattr(forwarding, "CLIENT_PART_MAX", 1.0)
    gate = asyncio.Event()

    async def later(*of: Any) -> web.StreamResponse:
        await gate.wait()
        return await slowly(*of)

    async def job() -> None:
        async with World(tbt_max_s=0.01) as world:
            decode = world.decode[0]
            decode.answer = slowly
            for batch in ([1], [[1], [2]]):  # Those of several answers come as they like.
                assert (await world.ask(input_ids=batch, stream=True))[0] == 200
            counts = world.known(decode).counts
            assert counts.gaps == 3
            assert counts.gaps_s > 3 * 0.01
            decode.answer = later
            first = asyncio.create_task(world.ask(text="a", stream=True))
            await until(lambda: len(decode.asked) == 3)
            async with world.client.post(f"{world.url}/generate", json={"text": "b"}) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "1"
                assert "--max-tbt-secs" in (await response.json())["error"]["message"]
            assert len(decode.asked) == 3
            gate.set()
            assert (await first)[0] == 200
            # One that has nothing to do is asked: it may be faster now.
            assert (await world.ask(text="c", stream=True))[0] == 200
            text = (await world.get("/metrics"))[1]
            assert f'stream_gaps_total{{role="decode",server="{decode.url}"}} 9' in text
            assert 'requests_total{end="refused"} 1' in text

    run(job())


@pytest.mark.parametrize(("part", "gaps"), [(0.0, 0), (1.0, 3)])
def test_a_client_that_is_waited_for_too_much_says_nothing_of_the_server(
    part: float, gaps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "CLIENT_PART_MAX", part)

    async def job() -> None:
        async with World() as world:
            world.decode[0].answer = slowly
            assert (await world.ask(text="a", stream=True))[0] == 200
            await world.idle()
            assert world.known(world.decode[0]).counts.gaps == gaps

    run(job())
