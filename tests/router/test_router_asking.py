# SPDX-License-Identifier: Apache-2.0
"""Questions that go to every server, or to any one."""

from __future__ import annotations

import asyncio
import json

import pytest
from router_world import World, run, until

from sglang_mooncake.router import questions
from sglang_mooncake.router.pages import own_names
from sglang_mooncake.router.placement import Look


def test_questions_for_all_servers_reach_them() -> None:
    async def job() -> None:
        async with World(prefill=2) as world:
            servers = (*world.prefill, *world.decode)
            assert (await world.get("/flush_cache", "POST"))[0] == 200
            assert [one.others for one in servers] == [[("/flush_cache", None)]] * 3
            assert (await world.get("/health_generate"))[0] == 200
            status, text = await world.get("/get_server_info")
            assert status == 200
            assert f'"internal_states": [{{"port": {world.decode[0].port}}}]' in text
            _, text = await world.get("/model_info")
            assert f'[{{"port": {world.prefill[0].port}}}]' in text
            assert (await world.get("/nowhere"))[0] == 404

    run(job())


def test_caches_are_forgotten_also_where_the_client_does_not_wait_for_it() -> None:
    prompt = list(range(320))

    async def job() -> None:
        async with World(prefill=2, prefill_policy="cache_aware") as world:
            await world.ask(input_ids=prompt)
            await world.idle()
            at = 0 if world.prefill[0].asked else 1
            (view,) = world.views[world.known(world.prefill[at])]
            look = Look(own_names(prompt, 16), 16, 320)
            assert view.figures(look, 0.0).hit_tokens > 0
            world.decode[0].is_slow = True
            flushing = asyncio.create_task(world.get("/flush_cache", "POST"))
            await until(lambda: ("/flush_cache", None) in world.prefill[at].others)
            flushing.cancel()
            await until(lambda: view.figures(look, 0.0).hit_tokens == 0)

    run(job())


@pytest.mark.parametrize("path", ["/flush_cache", "/abort_request"])
def test_a_server_that_hangs_has_done_nothing_also_when_it_is_ill_by_then(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, and goes on later: with its cache, and with its requests."""
    monkeypatch.setattr(questions, "ANSWER_S", 1.0)

    async def job() -> None:
        async with World(prefill=2) as world:
            hanging = world.prefill[1]
            hanging.is_slow = True
            asking = asyncio.create_task(world.get(path, "POST"))
            await until(lambda: (path, None) in hanging.others)
            world.known(hanging).failed("it does not answer", 0.0, 1)
            status, text = await asking
            assert (status, hanging.url in text) == (502, True)
            assert world.prefill[0].url not in text

    run(job())


def test_a_server_that_is_not_there_has_no_cache_to_be_flushed() -> None:
    async def job() -> None:
        async with World(prefill=2) as world:
            await world.prefill[1].stop()
            assert (await world.get("/flush_cache", "POST"))[0] == 200
            for server in (world.prefill[0], *world.decode):
                await server.stop()
            status, text = await world.get("/flush_cache", "POST")
            assert (status, "no server is there" in text) == (503, True)

    run(job())


def test_half_an_answer_is_passed_on_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        async with World(prefill=2) as world:
            world.prefill[0].info = {"long": "x" * 200}
            monkeypatch.setattr(questions, "ANSWER_BYTES_MAX", 150)
            status, text = await world.get("/model_info")
            assert (status, json.loads(text)["at"]) == (200, "/model_info")
            assert "long" not in text
            _, text = await world.get("/server_info")
            assert len(json.loads(text)["prefill"]) == 1
            world.prefill[1].info = world.decode[0].info = world.prefill[0].info
            status, text = await world.get("/model_info")
            assert (status, "longer than 150 bytes" in text) == (503, True)

    run(job())


@pytest.mark.parametrize("states", [None, 7, {}, []])
def test_benchmarks_find_what_they_look_for_whatever_servers_tell(states: object) -> None:
    async def job() -> None:
        async with World() as world:
            world.decode[0].info = {"internal_states": states}
            status, text = await world.get("/server_info")
            assert status == 200
            told = json.loads(text)
            assert told["internal_states"][0]["last_gen_throughput"] == 0.0
            assert told["decode"][0]["internal_states"] == states

    run(job())


def test_a_head_is_asked_of_no_server() -> None:
    async def job() -> None:
        async with World() as world:
            for path in ("/flush_cache", "/health_generate", "/v1/models"):
                assert (await world.get(path, "HEAD"))[0] == 405
            assert world.prefill[0].others == []
            assert (await world.get("/health", "HEAD"))[0] == 200

    run(job())


@pytest.mark.parametrize(("timeout", "status"), [("15", 200), ("0", 502), ("nan", 502), ("x", 502)])
def test_a_flush_lasts_as_long_as_the_client_lets_servers_wait(
    timeout: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.5)

    async def job() -> None:
        async with World() as world:
            waiting = world.decode[0]
            waiting.is_slow = True
            flushing = asyncio.create_task(world.get(f"/flush_cache?timeout={timeout}", "POST"))
            await until(lambda: waiting.others)
            await asyncio.sleep(0.6)
            waiting.is_slow = False
            assert (await flushing)[0] == status

    run(job())
