# SPDX-License-Identifier: Apache-2.0
"""Many streams at once."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from router_world import FakeServer, World, as_event, begin_stream, run, until


def test_many_streams_at_once_go_on_side_by_side_and_come_to_their_ends() -> None:
    """500 of them were measured by hand; so many that none fits into one turn of the loop."""
    number = 100
    begun = 0

    async def waits_for_all(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(as_event({"output_ids": [100]}))
        await until(lambda: begun == number)  # The clients have it, all of them.
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
                async with world.client.post(f"{world.url}/generate", json=asked) as response:
                    first = await response.content.readany()
                    begun += 1
                    return first + await response.content.read()

            answers = await asyncio.gather(*(one(at) for at in range(number)))
            whole = [as_event({"output_ids": [100, 101][:n]}) for n in (1, 2)]
            assert set(answers) == {b"".join([*whole, b"data: [DONE]\n\n"])}
            await world.idle()
            assert sum(len(server.asked) for server in world.prefill) == number

    run(job())
