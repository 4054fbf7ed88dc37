# SPDX-License-Identifier: Apache-2.0
"""Servers that stand still: they take connections and close none, and say nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from router_world import FakeServer, World, as_event, begin_stream, never_answers, run, until

from sglang_mooncake.router import probing

pytestmark = pytest.mark.slow

#: Two probes without an answer, one after the other.
TIMES: dict[str, Any] = {
    "health_interval_s": 0.1,
    "health_timeout_s": 0.5,
    "health_failures": 2,
}


#: By then a server has been ill for 2 s: two probes in vain last 1.2 s.
FAILED = 5


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_server_has_that_stands_still_is_served_elsewhere(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "GIVE_UP_S", 0.5)

    async def job() -> None:
        async with World(2, 2, **TIMES) as world:
            silent = getattr(world, role)[0]
            world.decode[0].script = [never_answers]  # It waits for the hand-over.
            if role == "prefill":
                silent.script = [never_answers]
            silent.stands_still = True
            status, answer = await world.ask(text="a")
            assert (status, answer["meta_info"]["of"]) == (200, "decode")
            assert [len(one.asked) for one in getattr(world, role)] == [1, 1]
            assert world.known(silent).counts.ills == 1
            silent.stands_still = False
            await until(lambda: world.known(silent).is_well)

    run(job())


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_stream_ends_where_nothing_at_all_comes_any_more(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is busy may leave one stream and its health's answer waiting, and go on with
    another stream."""
    # The servers are in this process, and write nothing while a busy machine lets it wait.
    monkeypatch.setattr(probing, "GIVE_UP_S", 2.0)
    stops, ends = asyncio.Event(), asyncio.Event()

    async def streams(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        while not ends.is_set():
            await response.write(as_event({"output_ids": [100]}))
            if body["text"] == "rests":
                await ends.wait()
            while stops.is_set() and not ends.is_set():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def job() -> None:
        async with World(**TIMES) as world:
            decode = world.decode[0]
            decode.answer = streams
            rests, other = (
                asyncio.create_task(world.ask(text=text, stream=True)) for text in ("rests", "b")
            )
            await until(lambda: len(decode.asked) == 2)
            decode.stands_still = True
            await until(lambda: world.known(decode).counts.failed > FAILED)
            assert not world.known(decode).is_well
            assert not rests.done()
            assert not other.done()
            if goes_on:
                ends.set()
            else:
                stops.set()
            for one in (rests, other):
                _, events = await one
                assert events[-1] == "[DONE]"
                said = [event["error"]["message"] for event in events[:-1] if "error" in event]
                assert len(said) == (not goes_on)
                assert all("gone silent, and does not answer" in message for message in said)

    run(job())
