# SPDX-License-Identifier: Apache-2.0
"""Requests through a router to servers that answer as a test says."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import os
import tracemalloc
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from router_world import (
    BOUND_S,
    FakeServer,
    World,
    answers,
    answers_at_once,
    as_event,
    begin_stream,
    begins_and_hangs,
    hangs_up,
    hangs_up_in_the_middle,
    never_answers,
    run,
    until,
)

from sglang_mooncake.router import dialing, each, forwarding, gate, placement, probing, routing


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long wait for what a decode server says of a hand-over that has failed, nor for a server
    that may be well soon."""
    monkeypatch.setattr(forwarding, "DECODE_SAYS_S", 0.02)
    monkeypatch.setattr(routing, "WELL_SOON_S", 0.02)


def test_both_servers_get_the_request_and_the_client_what_decode_answers() -> None:
    async def job() -> None:
        async with World() as world:
            status, answer = await world.ask(input_ids=[1, 2], sampling_params={"temperature": 0})
            assert (status, answer["meta_info"]) == (200, {"of": "decode"})
            (sent,), (also,) = world.prefill[0].asked, world.decode[0].asked
            assert sent == also
            assert sent["input_ids"] == [1, 2]
            assert sent["sampling_params"] == {"temperature": 0}
            assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 8998)
            assert 0 <= sent["bootstrap_room"] < 2**62

    run(job())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_routes_of_openai_are_served(path: str) -> None:
    async def job() -> None:
        async with World() as world:
            status, answer = await world.ask(path, prompt="hello", messages=[])
            assert (status, answer["output_ids"]) == (200, [100, 101, 102])
            assert world.prefill[0].asked == world.decode[0].asked

    run(job())


def test_every_request_has_a_room_of_its_own_whatever_the_client_says() -> None:
    async def job() -> None:
        async with World() as world:
            for _ in range(3):
                await world.ask(text="a", bootstrap_room=7, bootstrap_host="evil")
            rooms = {sent["bootstrap_room"] for sent in world.decode[0].asked}
            assert len(rooms) == 3
            assert 7 not in rooms
            assert {sent["bootstrap_host"] for sent in world.decode[0].asked} == {"127.0.0.1"}

    run(job())


def test_events_are_passed_on_as_they_come() -> None:
    """The server makes each event only after the client has the one before."""

    async def job() -> None:
        got = asyncio.Semaphore(0)

        async def one_by_one(
            server: FakeServer, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            response = await begin_stream(request)
            for n in range(3):
                await response.write(as_event({"output_ids": [n]}))
                await got.acquire()
            return response

        async with World() as world:
            world.decode[0].answer = one_by_one
            body = {"text": "a", "stream": True}
            async with world.client.post(f"{world.url}/generate", json=body) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                for n in range(3):
                    assert await response.content.readuntil(b"\n\n") == as_event(
                        {"output_ids": [n]}
                    )
                    got.release()
                assert await response.content.read() == b""

    run(job())


LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}


def with_logprobs(*numbers: int, **more: object) -> dict[str, object]:
    return {"meta_info": {"input_token_logprobs": list(numbers)}, **more}


@pytest.mark.parametrize(
    ("prefill", "decode", "merged"),
    [
        (with_logprobs(1, 2), with_logprobs(3), with_logprobs(1, 2, 3)),
        (
            [with_logprobs(1), with_logprobs(2)],
            [with_logprobs(), with_logprobs(8)],
            [with_logprobs(1), with_logprobs(2, 8)],
        ),
        ([with_logprobs(1)], [with_logprobs(2), with_logprobs(3)], None),
        ({"meta_info": {}}, with_logprobs(3), with_logprobs(3)),
        ({"meta_info": None}, with_logprobs(3), None),
        (with_logprobs(3), {"meta_info": [7]}, None),
        ({"meta_info": {"input_token_logprobs": "none"}}, with_logprobs(3), None),
    ],
)
def test_the_prompts_logprobs_are_the_prefill_servers(
    prefill: object, decode: object, merged: object
) -> None:
    """None: those of the decode server, since it cannot be told which belong together."""

    async def job() -> None:
        async with World() as world:
            world.prefill[0].answer = answers(prefill)
            world.decode[0].answer = answers(decode)
            assert await world.ask(text="a", **LOGPROBS) == (200, merged or decode)

    run(job())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_anything_in_it_costs_a_second_attempt(stream: bool) -> None:
    """The client was told nothing, and would take it for an answer."""

    async def empty(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        return await begin_stream(request) if body.get("stream") else web.Response()

    async def job() -> None:
        async with World() as world:
            world.decode[0].script = [empty]
            status, told = await world.ask(text="a", stream=stream)
            assert status == 200
            assert told
            assert len(world.decode[0].asked) == 2
            world.decode[0].answer = empty
            status, told = await world.ask(text="a", stream=stream)
            assert status == 502
            assert "its answer is empty" in told["error"]["message"]

    run(job())


def test_each_event_has_the_logprobs_of_its_prompt() -> None:
    async def job() -> None:
        async with World() as world:
            world.prefill[0].answer = answers(
                [with_logprobs(1, index=0), with_logprobs(2, index=1)]
            )
            world.decode[0].answer = answers(
                [with_logprobs(index=1), with_logprobs(9, index=0), {"meta_info": {}}]
            )
            status, events = await world.ask(text=["a", "b"], stream=True, **LOGPROBS)
            assert status == 200
            expected = [with_logprobs(2, index=1), with_logprobs(1, 9, index=0), {"meta_info": {}}]
            assert events == [*expected, "[DONE]"]

    run(job())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_on_both_servers(stream: bool) -> None:
    async def job() -> None:
        async with World() as world:
            world.prefill[0].answer = never_answers
            world.decode[0].answer = begins_and_hangs if stream else never_answers
            asking = asyncio.create_task(world.ask(text="a", stream=stream))
            servers = (world.prefill[0], world.decode[0])
            await until(lambda: all(server.asked for server in servers))
            asking.cancel()
            await until(lambda: all(server.left for server in servers))
            await until(lambda: all(server.others for server in servers))
            (sent,) = world.decode[0].asked
            for server in servers:
                assert server.others == [("/abort_request", {"rid": sent["rid"]})]
            await until(lambda: all(server.under_way == 0 for server in world.servers.all()))

    run(job())


@pytest.mark.parametrize(
    "body", [{"text": "a", "rid": "1"}, {"text": ["a", "b"]}, {"text": "a", "n": 2}]
)
def test_nobody_is_asked_to_abort_by_a_name_that_others_may_have(body: dict[str, Any]) -> None:
    """SGLang ends every request whose name begins like that."""

    async def job() -> None:
        async with World() as world:
            world.decode[0].script = [never_answers]
            asking = asyncio.create_task(world.ask(**body))
            await until(lambda: world.decode[0].asked)
            asking.cancel()
            await until(lambda: world.decode[0].left)
            await world.ask(text="b")  # What is asked later would be there by now.
            assert world.decode[0].others == world.prefill[0].others == []
            assert world.decode[0].asked[0].get("rid") == body.get("rid")

    run(job())


@pytest.mark.usefixtures("impatient")
def test_another_prefill_server_is_tried_when_the_first_is_not_there() -> None:
    async def job() -> None:
        async with World(prefill=2) as world:
            await world.prefill[0].stop()
            for _ in range(4):
                assert (await world.ask(text="a"))[0] == 200
            assert len(world.prefill[1].asked) == 4
            gone = world.known(world.prefill[0])
            assert not gone.is_well
            assert gone.counts.chosen == 1, "it is left alone while it is ill"

    run(job())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_dies_before_the_first_token_costs_a_second_attempt(
    role: str, stream: bool
) -> None:
    async def job() -> None:
        async with World(prefill=2, decode=2) as world:

            async def hangs_up_once_both_were_asked(*asked: Any) -> web.StreamResponse:
                for servers in (world.prefill, world.decode):
                    await until(lambda of=servers: any(server.asked for server in of))
                return await hangs_up(*asked)

            if role == "prefill":
                world.prefill[0].script = [hangs_up_once_both_were_asked]
                world.decode[0].script = [begins_and_hangs if stream else never_answers]
            else:
                world.decode[0].script = [hangs_up_once_both_were_asked]
            status, _ = await world.ask(text="a", stream=stream)
            assert status == 200
            servers = (*world.prefill, *world.decode)
            rooms = [sent["bootstrap_room"] for server in servers for sent in server.asked]
            assert len(rooms) == 4
            assert len(set(rooms)) == 2
            if role == "prefill":
                await until(lambda: world.decode[0].others)  # It waits for a hand-over in vain.

    run(job())


@pytest.mark.usefixtures("impatient")
def test_a_request_is_tried_twice_and_no_more() -> None:
    async def job() -> None:
        async with World(prefill=3) as world:
            for server in world.prefill:
                server.answer = hangs_up
            world.decode[0].answer = never_answers
            status, answer = await world.ask(text="a")
            assert status == 502
            assert "prefill server http://127.0.0.1:" in answer["error"]["message"]
            assert sum(len(server.asked) for server in world.prefill) == 2

    run(job())


def test_connections_that_servers_close_as_they_are_used_again_cost_no_request() -> None:
    """Servers end what has been idle for some seconds; the router may not have seen that yet."""
    used = set[Any]()

    async def on_new_ones(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if request.protocol in used:
            return await hangs_up(server, request, body)
        used.add(request.protocol)
        return await answers_at_once(server, request, body)

    async def job() -> None:
        async with World() as world:
            for server in (world.prefill[0], world.decode[0]):
                server.answer = on_new_ones
            for number in (4, 3):  # On connections of their own, and on those again.
                answers = await asyncio.gather(*(world.ask() for _ in range(number)))
                assert {status for status, _ in answers} == {200}
                await world.idle()
            servers = world.prefill[0], world.decode[0]
            assert [world.known(server).counts.ills for server in servers] == [0, 0]
            # Such a server may have gone, too.
            await until(lambda: any(server.probes > 1 for server in servers))
            assert (
                'attempts_failed_total{role="decode",kind="stale"} 0'
                not in (await world.get("/metrics"))[1]
            )

    run(job())


def test_a_request_that_failed_is_kept_from_both_servers_of_the_pair() -> None:
    """A decode server may be the first to tell that the prefill server is gone."""

    async def job() -> None:
        async with World(prefill=2, decode=2, prefill_policy="cache_aware") as world:
            prompt = list(range(64))
            await world.ask(input_ids=prompt)
            await world.idle()
            at = 0 if world.prefill[0].asked else 1
            for server in world.decode:
                server.script = [answers({"error": "the hand-over has failed"}, 500)]
            asked = [len(server.asked) for server in world.decode]
            await world.ask(input_ids=prompt)
            chosen = [world.known(server).counts.chosen for server in world.prefill]
            assert (chosen[at], chosen[1 - at]) == (2, 1), "the first one's cache has the prompt"
            assert [len(server.asked) for server in world.decode] == [n + 1 for n in asked]

    run(job())


def test_servers_that_cannot_be_reached_do_not_count_as_attempts() -> None:
    async def job() -> None:
        async with World(prefill=4) as world:
            for server in world.prefill[:3]:
                await server.stop()
            assert (await world.ask(text="a"))[0] == 200
            assert len(world.prefill[3].asked) == 1
            assert not any(world.known(server).is_well for server in world.prefill[:3])

    run(job())


def test_without_retries_the_first_failure_is_told() -> None:
    async def job() -> None:
        async with World(retries=0) as world:
            world.decode[0].answer = answers({"error": {"message": "no room"}}, 503)
            assert await world.ask(text="a") == (503, {"error": {"message": "no room"}})
            assert len(world.decode[0].asked) == 1

    run(job())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_is_wrong_is_told_so_and_not_tried_again(role: str) -> None:
    async def job() -> None:
        async with World() as world:
            said = {"error": {"message": "too long", "code": 400}}
            world.prefill[0].answer = world.decode[0].answer = never_answers
            one = world.prefill[0] if role == "prefill" else world.decode[0]
            one.answer = answers(said, 400)
            assert await world.ask(text="a") == (400, said)
            assert len(one.asked) == 1
            assert world.known(one).is_well

    run(job())


def test_what_the_decode_server_says_of_a_failed_hand_over_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "DECODE_SAYS_S", BOUND_S)

    async def job() -> None:
        async with World(retries=0) as world:
            said = {"error": {"message": "the models differ"}}

            async def a_little_later(
                server: FakeServer, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                await asyncio.sleep(0.05)
                return web.json_response(said, status=500)

            world.prefill[0].answer = answers({"error": {"message": "aborted"}}, 500)
            world.decode[0].answer = a_little_later
            assert await world.ask(text="a") == (500, said)

    run(job())


def test_an_answer_that_begins_although_the_prefill_server_failed_is_passed_on_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is not cut to what the decode server had to say why."""
    monkeypatch.setattr(forwarding, "DECODE_SAYS_S", 1.0)

    async def slowly(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        await until(lambda: not world.known(world.prefill[0]).under_way)
        response = await begin_stream(request)
        for token in (100, 101):
            await response.write(as_event({"output_ids": [token]}))
            await asyncio.sleep(0.6)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def has_failed(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        return web.json_response({"error": {"message": "aborted"}}, status=500)

    world = World(retries=0)

    async def job() -> None:
        async with world:
            world.prefill[0].answer, world.decode[0].answer = has_failed, slowly
            status, events = await world.ask(text="a", stream=True)
            assert (status, len(events), events[-1]) == (200, 3, "[DONE]")

    run(job())


def test_a_stream_whose_first_event_is_an_error_is_tried_again() -> None:
    async def job() -> None:
        async with World(decode=2) as world:
            broken = [{"error": {"message": "no hand-over", "code": 500}}]
            world.decode[0].script = [answers(broken)]
            status, events = await world.ask(text="a", stream=True)
            assert status == 200
            assert events[-1] == "[DONE]"
            assert len(events) == 4
            world.decode[0].script = [answers(broken)]
            world.decode[1].script = [answers(broken)]
            assert await world.ask(text="a", stream=True) == (500, broken[0])

    run(job())


def test_a_stream_that_stops_in_the_middle_says_so() -> None:
    async def job() -> None:
        async with World(decode=2) as world:
            world.decode[0].script = [hangs_up_in_the_middle]
            status, events = await world.ask(text="a", stream=True)
            assert status == 200
            first, error, end = events
            assert (first, end) == ({"output_ids": [100]}, "[DONE]")
            assert "stopped in the middle of its answer" in error["error"]["message"]
            assert not world.decode[1].asked, "the client has the first token already"

    run(job())


@pytest.mark.parametrize("half", [b'data: {"output_', b'data: {"output_ids": [100, 101]}\n'])
def test_the_error_stands_by_itself_where_an_event_was_cut(half: bytes) -> None:
    async def dies(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(as_event({"output_ids": [100]}) + half)
        assert request.transport is not None
        await asyncio.sleep(0)
        request.transport.close()
        return response

    async def job() -> None:
        async with World() as world:
            world.decode[0].script = [dies]
            _, events = await world.ask(text="a", stream=True)
            *tokens, error, end = events
            assert tokens[0] == {"output_ids": [100]}
            assert "stopped in the middle" in error["error"]["message"]
            assert end == "[DONE]"

    run(job())


async def streams_for_ever(
    server: FakeServer, request: web.Request, body: dict[str, Any]
) -> web.StreamResponse:
    response = await begin_stream(request)
    while True:
        await response.write(as_event({"text": "x" * 100_000}))


def test_a_client_that_does_not_read_holds_no_server() -> None:

    async def job() -> None:
        async with World(request_timeout_s=2.0) as world:
            world.decode[0].script = [streams_for_ever]
            port = int(world.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            try:
                body = b'{"text":"a","stream":true}'
                writer.write(b"POST /generate HTTP/1.1\r\nHost: a\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
                await until(lambda: world.decode[0].left)
                await until(lambda: not world.known(world.decode[0]).under_way)
                assert world.known(world.decode[0]).counts.failed == 0
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1 << 30)
            finally:
                writer.transport.abort()

    run(job())


def test_a_stream_that_is_late_says_so_and_ends_on_the_server() -> None:
    async def goes_on(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(as_event({"output_ids": [100]}))
        await asyncio.Event().wait()
        return response

    async def job() -> None:
        async with World(request_timeout_s=2.0) as world:
            world.decode[0].script = [goes_on]
            _, events = await world.ask(text="a", stream=True)
            assert "--request-timeout-secs" in events[1]["error"]["message"]
            assert events[1]["error"]["code"] == 504
            await until(lambda: world.decode[0].others)
            assert world.decode[0].others[0][0] == "/abort_request"
            assert world.known(world.decode[0]).counts.failed == 0

    run(job())


def test_an_answer_that_stops_in_the_middle_is_no_whole_answer() -> None:
    async def job() -> None:
        async with World(decode=2) as world:
            world.decode[0].script = [hangs_up_in_the_middle]
            with pytest.raises(aiohttp.ClientPayloadError):
                await world.ask(text="a")
            assert (await world.ask(text="a"))[0] == 200

    run(job())


@pytest.mark.usefixtures("impatient")
def test_when_no_server_is_well_the_client_is_told_to_come_again() -> None:
    async def job() -> None:
        async with World() as world:
            await world.decode[0].stop()
            await world.ask(text="a")
            body = {"text": "a"}
            async with world.client.post(f"{world.url}/generate", json=body) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                error = (await response.json())["error"]["message"]
            assert f"no decode server is well: {world.decode[0].url}" in error
            assert (await world.get("/readiness"))[0] == 503
            assert (await world.get("/health"))[0] == 200

    run(job())


def test_a_server_that_is_back_gets_requests_again() -> None:
    async def job() -> None:
        async with World(health_interval_s=0.05) as world:
            decode = world.decode[0]
            await decode.stop()
            await until(lambda: not world.known(decode).is_well)
            await decode.start()
            await until(lambda: world.known(decode).is_well)
            assert (await world.ask(text="a"))[0] == 200
            decode.health = 503
            await until(lambda: not world.known(decode).is_well)

    run(job())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_long_answer_makes_no_server_well_that_is_gone_since(role: str) -> None:
    async def job() -> None:
        async with World() as world:
            goes_on = asyncio.Event()

            async def in_two_parts(
                server: FakeServer, request: web.Request, body: dict[str, Any]
            ) -> web.StreamResponse:
                response = await begin_stream(request)
                await response.write(as_event({"output_ids": [100]}))
                await goes_on.wait()
                return response

            server = world.prefill[0] if role == "prefill" else world.decode[0]
            world.decode[0].script = [in_two_parts]
            asking = asyncio.create_task(world.ask(text="a", stream=True))
            known = world.known(server)
            await until(lambda: world.decode[0].asked)
            await until(lambda: not world.known(world.prefill[0]).under_way)
            server.health = 503
            known.failed("gone", 0.0, 1)
            goes_on.set()
            assert (await asking)[0] == 200
            assert not known.is_well

    run(job())


def test_a_request_waits_for_a_server_that_is_about_to_be_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "WELL_SOON_S", BOUND_S)

    async def job() -> None:
        async with World(health_interval_s=0.05) as world:
            decode = world.decode[0]
            await decode.stop()
            await until(lambda: not world.known(decode).is_well)
            asking = asyncio.create_task(world.ask(text="a"))
            await decode.start()
            assert (await asking)[0] == 200

    run(job())


def test_a_server_that_hangs_up_is_asked_for_its_health_at_once() -> None:
    """No other request has to find out that it is gone."""

    async def job() -> None:
        async with World(prefill=2) as world:
            world.prefill[0].script = [hangs_up]
            world.decode[0].script = [never_answers]
            world.prefill[0].health = 503
            assert (await world.ask(text="a"))[0] == 200
            await until(lambda: not world.known(world.prefill[0]).is_well)
            assert world.prefill[0].probes == 2

    run(job())


def test_servers_are_asked_for_their_health_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake in the router is told, and does not leave it without eyes."""
    monkeypatch.setattr(each, "BEGIN_AGAIN_S", 0.01)

    async def job() -> None:
        async with World(health_interval_s=0.05) as world:
            with monkeypatch.context() as changed:
                changed.setattr(probing, "note_answer", lambda _: 1 / 0)
                for server in world.servers.all():
                    said = f"asking for the health of {server} has failed and begins again"
                    await until(lambda said=said: said in caplog.text)
            probes = world.decode[0].probes
            await until(lambda: world.decode[0].probes > probes + 1)

    run(job())


def test_no_server_is_ill_because_the_router_has_no_descriptor_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by a request nor by a question for its health."""
    error, asked = OSError(errno.EMFILE, os.strerror(errno.EMFILE)), list[object]()

    async def cannot(self: object, *_: object) -> Any:
        asked.append(self)
        if isinstance(self, probing.Prober):
            key: Any = None
            raise aiohttp.ClientConnectorError(key, error)
        raise error

    async def job() -> None:
        async with World(health_interval_s=0.05) as world:
            with monkeypatch.context() as changed:
                changed.setattr(dialing.Dialer, "connect", cannot)
                status, answer = await world.ask(text="a")
                assert status == 503
                assert "the router cannot connect" in answer["error"]["message"]
                changed.setattr(probing.Prober, "_status", cannot)
                await until(lambda: sum(isinstance(one, probing.Prober) for one in asked) > 5)
                assert all(one.is_well for one in world.servers.all())
            assert (await world.ask(text="a"))[0] == 200

    run(job())


def test_no_more_requests_are_taken_than_may_be_under_way() -> None:
    async def job() -> None:
        async with World(max_requests=1) as world:
            world.decode[0].script = [never_answers]
            first = asyncio.create_task(world.ask(text="a"))
            await until(lambda: world.decode[0].asked)
            status, answer = await world.ask(text="b")
            assert status == 429
            assert "--max-concurrent-requests" in answer["error"]["message"]
            first.cancel()
            await until(lambda: world.decode[0].left)
            assert (await world.ask(text="c"))[0] == 200

    run(job())


def test_there_is_an_end_to_the_requests_whose_bodies_still_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "READING_MAX", 1)

    async def job() -> None:
        async with World(max_requests=1, queue_size=1) as world:
            goes_on = asyncio.Event()

            async def slow_body() -> AsyncIterator[bytes]:
                yield b"{"
                await goes_on.wait()

            async def begin() -> None:
                async with world.client.post(f"{world.url}/generate", data=slow_body()) as response:
                    assert response.status == 400

            slow = [asyncio.create_task(begin()) for _ in range(3)]
            under_way = "sglang_mooncake_router_requests 3"
            while under_way not in (await world.get("/metrics"))[1].splitlines():
                await asyncio.sleep(0.005)
            status, answer = await world.ask(text="b")
            assert status == 429
            assert (
                "3 requests are under way, wait, or are still being sent"
                in (answer["error"]["message"])
            )
            goes_on.set()
            await asyncio.gather(*slow)
            assert (await world.ask(text="c"))[0] == 200

    run(job())


def test_a_request_that_would_be_late_is_refused_before_a_server_hears_of_it() -> None:
    async def job() -> None:
        async with World(prefill_policy="cache_aware", ttft_max_s=0.01) as world:
            world.prefill[0].script = [never_answers]
            first = asyncio.create_task(world.ask(input_ids=[1] * 50_000))
            await until(lambda: world.prefill[0].asked)
            body = {"input_ids": [2] * 100}
            async with world.client.post(f"{world.url}/generate", json=body) as response:
                assert response.status == 429
                assert 1 <= int(response.headers["Retry-After"]) <= 6
                error = (await response.json())["error"]["message"]
            assert "after the limit of 0.01 s (--max-ttft-secs)" in error
            assert len(world.prefill[0].asked) == 1
            first.cancel()
            await until(lambda: world.prefill[0].left)
            assert (await world.ask(**body))[0] == 200

    run(job())


def test_what_a_client_says_of_itself_is_passed_on() -> None:
    async def job() -> None:
        async with World(api_key="ours") as world:
            await world.ask(text="a", headers={"Authorization": "Bearer mine", "X-Request-Id": "7"})
            await world.ask(text="a", headers={"Connection": "X-Hop, close", "X-Hop": "1"})
            first, second = world.decode[0].headers
            assert "X-Hop" not in second
            assert (first["Authorization"], first["X-Request-Id"]) == ("Bearer mine", "7")
            assert second["Authorization"] == "Bearer ours"
            assert first["Host"] == world.decode[0].url.removeprefix("http://")
            assert first["Accept-Encoding"] == "identity"

    run(job())


@pytest.mark.parametrize(
    ("raw", "status", "words"),
    [
        (b"[1]", 400, "no JSON object"),
        (b"{", 400, "no JSON object"),
        (b'{"a":' + b"[" * 100_000, 400, "JSON"),
        (b'{"text":"\xff"}', 400, "no JSON object"),
        (b'{"sampling_params":{"\xff":1}}', 400, "no JSON object"),
        (b'"%s"' % (b"x" * (1 << 18)), 413, "--max-payload-size"),
    ],
    ids=["list", "half", "nested", "no text", "no key", "long"],
)
def test_what_is_no_request_is_refused(raw: bytes, status: int, words: str) -> None:
    async def job() -> None:
        async with World(prefill_policy="cache_aware") as world:
            async with world.client.post(f"{world.url}/generate", data=raw) as response:
                assert response.status == status
                assert words in (await response.json())["error"]["message"]
            assert not world.decode[0].asked

    run(job())


def test_an_attempt_that_cannot_begin_leaves_nothing_in_a_servers_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no(_: object) -> bool:
        raise RecursionError

    async def job() -> None:
        async with World(prefill_policy="cache_aware") as world:
            with monkeypatch.context() as changed:
                changed.setattr(forwarding, "is_single", no)
                async with world.client.post(f"{world.url}/generate", json={}) as response:
                    assert response.status == 500
            await world.idle()
            ((view,),) = world.views.values()
            assert view.queue_s(0.0) == 0.0

    run(job())


def test_a_long_request_is_sent_in_pieces() -> None:
    """aiohttp warns of a long body that is sent at once, for the time that it takes."""

    async def job() -> None:
        async with World(max_body_bytes=4 << 20) as world:
            raw = io.BytesIO(b'{"text": "%s"}' % (b"x" * (2 << 20)))
            async with world.client.post(f"{world.url}/generate", data=raw) as response:
                assert response.status == 200
            assert len(world.decode[0].asked[0]["text"]) == 2 << 20

    run(job())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_late_server_ends_the_request(role: str) -> None:
    async def job() -> None:
        async with World(request_timeout_s=1.0) as world:
            world.decode[0].answer = never_answers
            if role == "prefill":
                world.prefill[0].answer = never_answers
            status, answer = await world.ask(text="a")
            assert status == 504
            assert f"{role} server http" in answer["error"]["message"]
            assert "--request-timeout-secs" in answer["error"]["message"]
            # The time may be over before it is asked, on a busy machine.
            assert len(world.decode[0].asked) <= 1
            await world.idle()

    run(job())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_prefill_server_that_ends_no_answer_is_the_late_one(leaves: bool) -> None:
    """Although the decode server has begun its answer, which needs the other's."""

    async def begins(
        server: FakeServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(as_event(with_logprobs(1)))
        await asyncio.Event().wait()
        return response

    async def job() -> None:
        async with World(request_timeout_s=60.0 if leaves else 1.0, retries=0) as world:
            world.prefill[0].answer, world.decode[0].answer = never_answers, begins
            asked = asyncio.create_task(world.ask(text="a", stream=True, **LOGPROBS))
            await until(lambda: world.decode[0].asked)
            if leaves:
                asked.cancel()
            else:
                status, answer = await asked
                assert status == 504
                assert "prefill server http" in str(answer)
            for server in (world.prefill[0], world.decode[0]):
                await until(lambda: server.others)  # noqa: B023
                assert "/abort_request" in str(server.others)
            await world.idle()

    run(job())


@pytest.mark.parametrize("answer", [answers({"error": {"message": "no"}}, 400), hangs_up])
def test_a_request_that_fails_leaves_its_body_to_no_search_for_garbage(answer: Any) -> None:
    async def job() -> None:
        async with World(retries=0, max_body_bytes=2_000_000) as world:
            world.prefill[0].answer = world.decode[0].answer = answer
            await world.ask(text="a")
            await world.idle()
            gc.collect()
            gc.disable()
            try:
                tracemalloc.start()
                for _ in range(10):
                    await world.ask(text="a" * 1_000_000)
                    for server in (world.prefill[0], world.decode[0]):
                        server.asked.clear()
                        world.known(server).served()
                await world.idle()
                kept, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
                gc.enable()
            assert kept < 10_000_000  # The servers of the test have the last one.

    run(job())


@asynccontextmanager
async def half_a_request(world: World, path: str) -> AsyncIterator[tuple[Reader, Writer]]:
    """The head of a request with two bytes; none of them has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.split(":")[2]))
    try:
        writer.write(f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n".encode())
        yield reader, writer
    finally:
        writer.transport.abort()


def test_a_question_for_all_servers_may_come_in_pieces() -> None:
    async def job() -> None:
        async with World(prefill=2) as world:
            async with half_a_request(world, "/abort_request") as (reader, writer):
                await asyncio.sleep(0.05)  # Until its handler waits for the body.
                writer.write(b"{}")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert [one.others for one in world.prefill] == [[("/abort_request", {})]] * 2

    run(job())


@pytest.mark.parametrize("path", ["/generate", "/query", "/abort_request"])
def test_a_request_that_does_not_come_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "BODY_S", 0.05)

    async def job() -> None:
        async with World(max_requests=1) as world, half_a_request(world, path) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            _, text = await world.get("/metrics")
            assert "sglang_mooncake_router_requests 0" in text.splitlines()

    run(job())


@pytest.mark.usefixtures("impatient")
def test_metrics_and_status_tell_what_has_happened() -> None:
    async def job() -> None:
        async with World(prefill=2) as world:
            for server in world.prefill:
                server.answer = answers({"meta_info": {"prompt_tokens": 8, "cached_tokens": 3}})
            await world.prefill[0].stop()
            await world.ask(text="a")
            await world.ask(text="a")
            await world.idle()
            _, text = await world.get("/metrics")
            lines = text.splitlines()
            prefix = "sglang_mooncake_router_"
            assert f'{prefix}requests_total{{end="answered"}} 2' in lines
            assert f"{prefix}retries_total 1" in lines
            unreachable = f'{prefix}attempts_failed_total{{role="prefill",kind="unreachable"}} 1'
            assert unreachable in lines
            assert f'{prefix}servers{{role="prefill",health="ill"}} 1.0' in lines
            other = world.prefill[1].url
            assert f'{prefix}cached_tokens_total{{role="prefill",server="{other}"}} 6' in lines
            _, page = await world.get("/")
            assert "2 answered" in page
            assert "ill for" in page

    run(job())


def test_prompts_that_begin_alike_go_to_one_server_until_its_cache_is_flushed() -> None:
    async def job() -> None:
        async with World(prefill=3, prefill_policy="cache_aware") as world:
            told = answers({"meta_info": {"prompt_tokens": 320, "cached_tokens": 0}})
            for server in world.prefill:
                server.answer = told
            for n in range(5):
                await world.ask(input_ids=[*range(320), n])
                await world.idle()
            assert sorted(len(server.asked) for server in world.prefill) == [0, 0, 5]
            _, text = await world.get("/metrics")
            assert 'sglang_mooncake_router_choices_total{reason="cache"} 4' in text.splitlines()
            await world.get("/flush_cache", "POST")
            await world.ask(input_ids=[*range(320), 9])
            _, text = await world.get("/metrics")
            assert 'sglang_mooncake_router_choices_total{reason="load"} 2' in text.splitlines()

    run(job())


def test_it_is_said_once_that_a_server_has_nothing_of_what_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "NEVER", 2)

    async def job() -> None:
        async with World(prefill_policy="cache_aware") as world:
            told = answers({"meta_info": {"prompt_tokens": 320, "cached_tokens": 0}})
            world.prefill[0].answer = told
            for _ in range(5):
                await world.ask(input_ids=list(range(320)))
                await world.idle()
            _, text = await world.get("/v1/router")
            assert '"memory": "never hits"' in text

    run(job())
    assert caplog.text.count("whose beginning it had been sent before") == 1
