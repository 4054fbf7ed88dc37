# SPDX-License-Identifier: Apache-2.0
"""One rank on each side: the big set, prefix hits, aborts, requests that cannot succeed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import pytest
import requests
from collector import Collected, Collector, collecting
from cpu_serving.expectations import Layout, Serving
from cpu_serving.nursery import Nursery
from cpu_serving.ports import PortBlock
from cpu_serving.servers import HOST, RESTING, Fleet, wait_ready
from cpu_serving.stats import collect
from cpu_serving.traffic import Answer, Request, make_requests, run, send
from direct import in_a_room
from prometheus_client.parser import text_string_to_metric_families

import sglang_mooncake
from bootstrap_server import RankStatus
from sglang_mooncake.sglang.cli import main as explain

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

# Far beyond what is needed, far below forever.
BOUND_S = 180.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def layout(collector: Collector) -> Layout:
    tracing = ("--enable-trace", "--trace-modules", "request,mooncake")
    return Layout.equal(
        "tp1",
        extra_args=("--enable-metrics", *tracing, "--otlp-traces-endpoint", collector.url),
        # Their schedulers never rest, as on a user's machine.
        extra_env={
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            **dict.fromkeys(RESTING, "0"),
        },
    )


def test_sglangs_metrics_have_those_of_the_hand_over(serving: Serving) -> None:
    """What Prometheus is told is what the ranks have counted, and what was asked for. It comes
    first: of a transfer that is cancelled, some bytes may have gone."""
    serving.assert_equal(make_requests(20, 600, seed=12))
    pair = serving.pair
    ranks, told = {}, {}
    for server in (pair.prefill, pair.decode):
        # Both are a second old at most, and nothing happens meanwhile.
        (ranks[server],) = collect(server, since=time.time() + 2)
        told[server] = metrics(server.url)
    sent, landed = told[pair.prefill], told[pair.decode]
    assert sent["sglang_mooncake_handover_bytes_total", ""] == ranks[pair.prefill].bytes
    assert sent["sglang_mooncake_bytes_total", "sent"] == ranks[pair.prefill].bytes
    assert landed["sglang_mooncake_bytes_total", "received"] == ranks[pair.prefill].bytes
    done = ranks[pair.prefill].rooms["done"]
    for figures in (sent, landed):
        assert figures["sglang_mooncake_build_info", sglang_mooncake.__version__] == 1
        assert figures["sglang_mooncake_rooms_total", "done"] == done
        assert figures["sglang_mooncake_stage_seconds_count", "acknowledged"] >= done
        assert figures["sglang_mooncake_scheduler_calls_total", "poll"] > 0
    assert sent["sglang_mooncake_handover_seconds_count", ""] == done
    measured_s = sum(ranks[pair.prefill].handover_ms) / 1e3
    assert sent["sglang_mooncake_handover_seconds_sum", ""] == pytest.approx(measured_s, rel=0.05)


def test_a_requests_trace_has_spans_of_its_hand_over(
    serving: Serving, collector: Collector
) -> None:
    """A client's trace reaches both servers, and on each the hand-over is below SGLang's span of
    the request on that rank."""
    prefill = serving.pair.prefill
    for i, request in enumerate(make_requests(3, 600, seed=13)):
        trace_id = f"{0xA1B2C3 + i:032x}"
        in_room = in_a_room(prefill, request)
        urls = [prefill.url, serving.pair.decode.url]
        asyncio.run(_post_traced(urls, in_room.body(), f"00-{trace_id}-{0xC1:016x}-01"))
        sent, received = (
            _told_by(collector, trace_id, name) for name in ("send KV cache", "receive KV cache")
        )
        room = in_room.fields["bootstrap_room"]
        for span, thread in ((sent, "Prefill Scheduler"), (received, "Decode Scheduler")):
            spans = {one.span_id: one for one in collector.trace(trace_id)}
            children = [one for one in spans.values() if one.parent_id == span.span_id]
            assert sum(one.ended_ns - one.began_ns for one in children) == (
                span.ended_ns - span.began_ns
            ), "its stages are all of it"
            assert span.attributes["sglang_mooncake.room"] == str(room)
            assert span.attributes["sglang_mooncake.outcome"] == "done"
            assert not span.is_error
            parent = _told_by(collector, trace_id, thread)
            assert span.parent_id == parent.span_id
            assert parent.scope == "sglang server"
            assert parent.began_ns <= span.began_ns < span.ended_ns
            root = _told_by(collector, trace_id, f"{thread.split()[0].lower()} Req")
            assert root.attributes["bootstrap_room"] == span.attributes["bootstrap_room"]
        assert sent.events.count("write landed") >= 1
        assert sent.attributes["sglang_mooncake.bytes"] > 0


async def _post_traced(urls: Sequence[str], body: Mapping[str, object], traceparent: str) -> None:
    headers = {"traceparent": traceparent}
    timeout = aiohttp.ClientTimeout(BOUND_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def post(url: str) -> None:
            async with session.post(f"{url}/generate", json=body) as answer:
                text = await answer.text()
                assert answer.status == 200, text

        await asyncio.gather(*map(post, urls))


def _told_by(collector: Collector, trace_id: str, name: str) -> Collected:
    """The one span of a trace whose name begins like that, once it is there. It goes to the
    collector when it has ended, and those below it before."""
    deadline_s = time.monotonic() + BOUND_S
    while True:
        found = [one for one in collector.trace(trace_id) if one.name.startswith(name)]
        if found:
            (span,) = found
            return span
        told = sorted(one.name for one in collector.trace(trace_id))
        assert time.monotonic() < deadline_s, f"no span {name!r} of trace {trace_id} in {told}"
        time.sleep(0.2)


def metrics(url: str) -> dict[tuple[str, str], float]:
    """By name and the value of the label that tells a metric's rows apart; rails are added up."""
    found: dict[tuple[str, str], float] = {}
    text = requests.get(f"{url}/metrics", timeout=BOUND_S).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("sglang_mooncake_") and "le" not in sample.labels:
                labels = ("direction", "end", "stage", "call", "outcome", "reason", "version")
                key = (
                    sample.name,
                    next((sample.labels[n] for n in labels if n in sample.labels), ""),
                )
                found[key] = found.get(key, 0.0) + sample.value
    return found


def test_two_hundred_requests_32_at_a_time(serving: Serving) -> None:
    requests = make_requests(200, 1500, seed=1)
    assert {1, 1500} <= {len(request.input_ids) for request in requests}
    serving.assert_equal(requests, concurrency=32)


def test_the_registry_shows_what_the_prefill_rank_does(serving: Serving) -> None:
    """The status page of the registry in SGLang's main process: reports come with renewals."""
    serving.assert_equal(make_requests(4, 300, seed=9))
    url = f"http://{HOST}:{serving.pair.prefill.bootstrap_port}"
    assert "<title>KV-cache registry</title>" in requests.get(url, timeout=30).text
    deadline_s = time.monotonic() + BOUND_S
    while True:
        status = requests.get(f"{url}/v1/status", timeout=30).json()
        reports = [msgspec.convert(one[3], RankStatus) for one in status["reports"]]
        if any(report.rooms["done"] >= 4 and report.rails for report in reports):
            break
        assert time.monotonic() < deadline_s, f"never reported: {status}"
        time.sleep(1)
    ((report,), (instance,)) = reports, status["instances"]
    assert [peer.coords for peer in report.peers] == [(0, 0, 0, 0)]
    assert [plan["problem"] for plan in instance["plans"]] == [None]
    assert instance["ranks"][0]["lost_s"] is None


def test_sglang_router_in_rust_serves_like_the_mini_lb(
    serving: Serving, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Fleet(tmp_path_factory.mktemp("rust"), nursery) as fleet:
        pair = serving.pair
        router = fleet.router(pair.prefill, pair.decode, name="sglang-router", kind="sglang-router")
        wait_ready([router])
        behind = replace(serving, pair=replace(pair, router=router))
        behind.assert_equal(make_requests(24, 600, seed=7), concurrency=8)


def test_same_prompts_again_hit_the_prefix_cache_of_prefill(serving: Serving) -> None:
    requests = make_requests(12, 600, seed=2)
    serving.assert_equal(requests)
    serving.assert_equal(requests)
    longer = [
        replace(request, input_ids=request.input_ids + requests[0].input_ids)
        for request in requests
    ]
    serving.assert_equal(longer)
    assert re.search(r"#cached-token: [1-9]", serving.pair.prefill.process.log_text())


@pytest.mark.parametrize("way", ["abort_request", "disconnect"])
def test_abort_in_mid_flight(serving: Serving, way: str) -> None:
    delays = random.Random(3)
    requests = [
        in_a_room(serving.pair.prefill, request, rid=f"{way}-{i}")
        for i, request in enumerate(make_requests(32, 1500, seed=3, new_tokens=32))
    ]
    urls = [serving.pair.prefill.url, serving.pair.decode.url]

    async def one(session: aiohttp.ClientSession, request: Request) -> bool:
        """Whether the abort came before the answer."""
        sent = [asyncio.create_task(send(session, url, request)) for url in urls]
        await asyncio.sleep(delays.uniform(0, 2))
        if way == "abort_request":
            for url in urls:
                async with session.post(
                    f"{url}/abort_request", json={"rid": request.fields["rid"]}
                ) as response:
                    assert response.status == 200
        else:
            for task in sent:
                task.cancel()
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        return not all(isinstance(o, Answer) and o.error is None for o in outcomes)

    async def all_of_them(session: aiohttp.ClientSession) -> list[bool]:
        return await asyncio.gather(*(one(session, request) for request in requests))

    aborted = run(all_of_them, BOUND_S)
    assert any(aborted), "every request was answered before its abort: nothing was tested"
    serving.assert_equal(make_requests(24, 800, seed=4))


def test_wrong_bootstrap_address_fails_in_bounded_time(serving: Serving) -> None:
    async def ask(session: aiohttp.ClientSession) -> Answer:
        return await send(session, serving.pair.decode.url, request)

    with PortBlock() as nobody:
        plain = make_requests(1, 50)[0]
        request = in_a_room(serving.pair.prefill, plain, bootstrap_port=nobody.first)
        answer = run(ask, BOUND_S)
    assert answer.error is not None
    assert str(nobody.first) in answer.error, "the message names the address that did not answer"
    serving.assert_equal(make_requests(4, 100, seed=5))


def test_the_time_of_each_request_is_explained(
    serving: Serving, status_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stages that ranks tell of a request are the hand-over time that was measured."""
    serving.assert_equal(make_requests(20, 600, seed=11))
    where = ["--dir", str(status_directory)]
    assert explain(["explain", "--slowest", "32", "--json", *where]) == 0
    told = {one["role"]: one for one in json.loads(capsys.readouterr().out)}
    assert set(told) == {"prefill", "decode"}
    (rank,) = collect(serving.pair.prefill, since=time.time())
    measured = sorted(rank.handover_ms)
    marks = [story["marks"] for story in told["prefill"]["stories"] if story["end"] == "done"]
    assert marks
    for mark in marks:
        told_ms = (mark["acknowledged"] - mark["queued"]) * 1e3
        nearest = min(measured, key=lambda one: abs(one - told_ms))
        assert told_ms == pytest.approx(nearest, rel=0.05)
    assert explain(["explain", "--last", *where]) == 0
    text = capsys.readouterr().out
    assert "done, " in text
    assert "on 2 ranks of 1 host" in text
