# SPDX-License-Identifier: Apache-2.0
"""scripts/demo --store-hits: what it makes of the times at which tokens come."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from aiohttp import web
from cpu_serving.hits_demo import PUBLISHED, Figures, _problems, figures_of, medians, table
from cpu_serving.processes import ServingError
from cpu_serving.streaming import Streamed, stream_all
from cpu_serving.traffic import Request

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
WAIT_S = 30.0


def answer(first_s: float, last_s: float, *ids: int, cached: int = 0) -> Streamed:
    return Streamed(ids, cached, 0.0, first_s, last_s)


def test_figures_of_a_round() -> None:
    answers = [answer(float(i), i + 2.0, 1, 2, 3) for i in range(1, 11)]
    got = figures_of(answers, 97)
    assert (got.mean_ttft_s, got.p50_ttft_s, got.p90_ttft_s) == (5.5, 5.5, 10.0)
    assert (got.mean_tpot_s, got.p50_tpot_s, got.p90_tpot_s) == (1.0, 1.0, 1.0)
    assert got.requests_per_s == pytest.approx(10 / 12)
    assert got.output_tokens_per_s == pytest.approx(30 / 12)
    assert got.total_tokens_per_s == pytest.approx(1000 / 12)
    assert figures_of([answer(1.0, 1.0, 7)], 9).mean_tpot_s == 0.0, "one token has none after it"


def test_each_figure_is_a_median_of_the_rounds() -> None:
    rounds = [Figures(*([float(one)] * 9)) for one in (3, 1, 9)]
    assert medians(rounds) == rounds[0]


def test_the_table_shows_changes_beside_the_published_ones() -> None:
    cold, hit = Figures(*([2.0] * 9)), Figures(*([0.5] * 9))
    lines = [line.split() for line in table(cold, hit).splitlines()]
    assert lines[0] == ["computed", "from", "store", "change", "published"]
    assert lines[1] == ["TTFT,", "mean", "2000", "ms", "500", "ms", "-75%", "-69%"]
    assert lines[7] == ["requests", "/", "s", "2.00", "0.50", "-75%", "191%"]
    assert len(lines) == 10
    assert PUBLISHED.requests_per_s == 1.91


def test_what_a_round_must_show() -> None:
    computed, loaded = [answer(1, 2, 7)], [answer(1, 2, 7, cached=32)]
    assert _problems(1, computed, loaded, 40) == []
    assert _problems(1, computed, loaded, 48) == [], "the last token's page is computed"
    assert _problems(2, loaded, loaded, 40) == [
        "round 2: some of what was to be computed was found"
    ]
    assert _problems(3, computed, computed, 40) == ["round 3: 1 of 1 requests were not found whole"]
    assert _problems(4, computed, [answer(1, 2, 8, cached=32)], 40) == [
        "round 4: 1 of 1 requests have other tokens"
    ]


# -- tokens as they come


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts an HTTP server that answers as the handler does; its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def started(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/generate", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    runners: list[web.AppRunner] = []

    def start(handler: Handler) -> str:
        return asyncio.run_coroutine_threadsafe(started(handler), loop).result(WAIT_S)

    yield start
    for one in runners:
        asyncio.run_coroutine_threadsafe(one.cleanup(), loop).result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


def streaming(*records: object) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["stream"] is True
        response = web.StreamResponse()
        await response.prepare(request)
        for one in records:
            await response.write(f"data: {json.dumps(one)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    return handle


def record(*ids: int) -> dict[str, object]:
    return {"output_ids": list(ids), "meta_info": {"cached_tokens": 16}}


def test_tokens_are_timed_as_they_come(serve: Callable[[Handler], str]) -> None:
    url = serve(streaming(record(1), record(1, 2)))
    answers = stream_all(url, [Request((5, 6), 2)] * 3)
    assert [one.output_ids for one in answers] == [(1, 2)] * 3
    for one in answers:
        assert one.cached_tokens == 16
        assert 0 <= one.sent_s <= one.first_s <= one.last_s
        assert one.first_token_s == one.first_s - one.sent_s
        assert one.per_token_s == one.last_s - one.first_s


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="full")


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (_refuse, "HTTP 503: full"),
        (streaming(record(1)), "ended after 1 of 2 tokens"),
        (streaming(), "ended after 0 of 2 tokens"),
        (streaming({"error": {"message": "aborted"}}), "aborted"),
    ],
)
def test_a_request_that_fails_is_told(
    handler: Handler, said: str, serve: Callable[[Handler], str]
) -> None:
    with pytest.raises(ServingError, match=said):
        stream_all(serve(handler), [Request((5,), 2)])


def test_a_server_that_is_not_there_is_told() -> None:
    with pytest.raises(ServingError, match="a request failed: ClientConnectorError"):
        stream_all("http://127.0.0.1:1", [Request((5,), 2)])
