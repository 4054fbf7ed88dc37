# SPDX-License-Identifier: Apache-2.0
"""One server that is bad, or one job that fails, beside others that work."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from router_world import FakeServer, World, never_answers, run, until

from sglang_mooncake.router import each, forwarding
from sglang_mooncake.router.each import one_for_each
from sglang_mooncake.router.servers import Server

#: What Python's look-up of a host raises ``UnicodeError`` for.
NO_NAMES = ["a..b", "a" * 64]


@pytest.mark.parametrize("host", NO_NAMES)
def test_a_server_whose_host_is_no_name_fails_alone(host: str) -> None:
    async def job() -> None:
        async with World(health_interval_s=0.05) as world:
            good = world.decode[0]
            bad = Server("decode", f"http://{host}:1", joined_s=0.0)
            world.servers.join(bad)
            await until(lambda: "label" in bad.why_ill)
            probes = good.probes
            await until(lambda: good.probes > probes + 1)
            status, text = await world.get("/flush_cache", "POST")
            assert (status, f"{bad}: " in text, good.url in text) == (502, True, False)
            for _ in range(2):  # They are chosen in turn.
                bad.answered()
                assert (await world.ask(text="a"))[0] == 200
            assert not bad.is_well
            assert len(good.asked) == 2

    run(job())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_sends_the_router_nowhere_else(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "DECODE_SAYS_S", 0.02)

    async def elsewhere(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{other.url}/elsewhere")

    world = World(retries=0)
    one, other = world.prefill[0], world.decode[0]
    if role == "decode":
        one, other = other, one

    async def job() -> None:
        async with world:
            one.answer, other.answer = elsewhere, never_answers
            status, answer = await world.ask(text="a")
            assert status == 502
            assert f"{role} server {one.url}: answered with status 307" in str(answer)
            assert "/elsewhere" not in [path for path, _ in other.others]

    run(job())


def test_a_job_that_fails_begins_again_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(each, "BEGIN_AGAIN_S", 0.001)
    monkeypatch.setattr(each, "TICK_S", 0.001)
    there, begun, ended = {"good", "bad"}, Counter[str](), Counter[str]()

    async def job(one: str) -> None:
        begun[one] += 1
        if one == "bad":
            raise ZeroDivisionError
        try:
            await asyncio.Event().wait()
        finally:
            ended[one] += 1

    async def look() -> None:
        task = asyncio.create_task(one_for_each("looking at", lambda: there, job))
        await until(lambda: begun["bad"] > 2)
        assert (begun["good"], ended["good"]) == (1, 0)
        assert "looking at bad has failed and begins again" in caplog.text
        there.remove("bad")
        there.add("late")
        await until(lambda: begun["late"])
        before = begun["bad"]
        await asyncio.sleep(0.01)
        assert begun["bad"] == before
        task.cancel()
        await asyncio.wait([task])
        assert ended == {"good": 1, "late": 1}

    run(look())
