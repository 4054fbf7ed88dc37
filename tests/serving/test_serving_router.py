# SPDX-License-Identifier: Apache-2.0
"""This project's router before real servers: two for prefill, of which one tells of its cache by KV
events, and one for decode."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
import requests
from cpu_serving.architectures import VOCAB_SIZE
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import HOST, Fleet, Router, Server, ServerOptions, wait_ready
from cpu_serving.streaming import stream_all
from cpu_serving.traffic import Answer, Request, compare, make_requests, run, send, send_all
from patient import patient

from bootstrap_server import BootstrapServer

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

# Far beyond what is needed, far below forever.
BOUND_S = 180.0
MODEL = "llama"
PAGE_SIZE = 16


@dataclass(frozen=True)
class Deployment:
    telling: Server
    quiet: Server
    decode: Server
    router: Router
    #: In front of one prefill server each.
    alone: dict[Server, Router]
    #: This one is told of no server, but of a registry.
    finding: Router
    reference: Reference

    def assert_equal(self, prompts: list[Request], concurrency: int = 8) -> list[Answer]:
        """Each gets the tokens that one ordinary server gives."""
        got = send_all(self.router.url, prompts, concurrency)
        assert [one.error for one in got if one.error] == []
        assert compare(self.reference.answers(MODEL, prompts), got) == []
        return got

    def status(self) -> dict[str, Any]:
        return dict(requests.get(f"{self.router.url}/v1/router", timeout=BOUND_S).json())

    def seen(self, server: Server) -> dict[str, Any]:
        """What the router knows of a prefill server."""
        return next(one for one in self.status()["servers"]["prefill"] if one["url"] == server.url)


@pytest.fixture(scope="module")
def deployment(
    nursery: Nursery, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with (
        BootstrapServer(HOST, 0) as registry,
        Fleet(tmp_path_factory.mktemp("router"), nursery) as fleet,
    ):
        address = f"{HOST}:{registry.port}"
        beside = {"SGLANG_MOONCAKE_REGISTRY": address}
        model = make_model(MODEL)
        options = patient(ServerOptions(model, page_size=PAGE_SIZE, extra_env=beside))
        ports = [fleet.port(), fleet.port()]
        published = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }
        telling = replace(options, extra_args=("--kv-events-config", json.dumps(published)))
        servers = [
            fleet.server("prefill", telling, name="prefill-telling"),
            fleet.server("prefill", options, name="prefill-quiet"),
            fleet.server("decode", options),
        ]
        router = fleet.router(servers[:2], servers[2:], kind="ours")
        reads = ("--tokenizer-path", str(model))
        alone = {
            one: fleet.router(
                one, servers[2], name=f"router-{number}", kind="ours", extra_args=reads
            )
            for number, one in enumerate(servers[:2])
        }
        given = ("--registry", address)
        finding = fleet.router([], [], name="router-finding", kind="ours", extra_args=given)
        wait_ready([*servers, router, *alone.values(), finding])
        yield Deployment(*servers, router, alone, finding, reference)


def is_live(deployment: Deployment) -> bool:
    """Whether the events of the server that tells them come; before the first there is no state."""
    return (deployment.seen(deployment.telling)["events"] or {}).get("state") == "live"


def until(holds: Any) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_tokens_streams_and_logprobs_are_those_of_one_server(deployment: Deployment) -> None:
    prompts = make_requests(24, 600, seed=7)
    deployment.assert_equal(prompts)
    expected = deployment.reference.answers(MODEL, prompts[:4])
    streamed = stream_all(deployment.router.url, prompts[:4])
    assert [one.output_ids for one in streamed] == [one.output_ids for one in expected]
    asked = prompts[0].body() | {"return_logprob": True, "logprob_start_len": 0}
    answer = requests.post(f"{deployment.router.url}/generate", json=asked, timeout=BOUND_S).json()
    told = [token for _, token, _ in answer["meta_info"]["input_token_logprobs"]]
    # SGLang shows its last token as 0, since numbers beyond stand for images.
    shown = [token if token < VOCAB_SIZE - 1 else 0 for token in prompts[0].input_ids]
    assert told == shown


def test_a_prompt_that_goes_on_is_found_where_it_is_expected(deployment: Deployment) -> None:
    """By what the router has sent, and by what the one server tells; both are right. Where a prompt
    is computed is also a matter of the servers' speed, so each has a router of its own here."""
    for server, router in deployment.alone.items():
        one = replace(deployment, router=router)
        begins = make_requests(8, 800, seed=5 if server is deployment.telling else 6)
        begins = [each for each in begins if len(each.input_ids) > 4 * PAGE_SIZE]
        one.assert_equal(begins, concurrency=1)
        if server is deployment.telling:
            until(lambda one=one: is_live(one))
        longer = [replace(each, input_ids=(*each.input_ids, *range(50, 90))) for each in begins]
        one.assert_equal(longer, concurrency=1)
        seen = one.seen(server)
        assert seen["prefixes_missed"] == 0
        assert seen["cached_tokens"] > 0
        assert seen["expected_cached_tokens"] == pytest.approx(seen["cached_tokens"], rel=0.03)
    events = replace(deployment, router=deployment.alone[deployment.telling]).seen(
        deployment.telling
    )["events"]
    assert events["losses"] == 0
    assert events["pages"] > 0


def test_a_text_is_found_by_the_tokens_that_servers_make_of_it(deployment: Deployment) -> None:
    one = replace(deployment, router=deployment.alone[deployment.telling])
    before = one.seen(deployment.telling)
    text = "pages of keys and values move from one server to the other, " * 8
    for more in ("and back", "and back again", "and once more"):
        body = {"text": text + more, "sampling_params": {"max_new_tokens": 4}}
        answer = requests.post(f"{one.router.url}/generate", json=body, timeout=BOUND_S)
        assert answer.status_code == 200, answer.text
        until(lambda: one.seen(deployment.telling)["requests"] == 0)
    after = one.seen(deployment.telling)
    found, expected = (
        after[name] - before[name] for name in ("cached_tokens", "expected_cached_tokens")
    )
    assert found > 0
    # By the guess of text its pages would be of other lengths.
    assert expected == pytest.approx(found, rel=0.03)


def test_a_choice_knows_which_cache_has_the_prompt(deployment: Deployment) -> None:
    begins = make_requests(8, 800, seed=13)
    begins = [one for one in begins if len(one.input_ids) > 4 * PAGE_SIZE]
    deployment.assert_equal(begins, concurrency=1)
    until(lambda: is_live(deployment))
    before = deployment.status()["choices"]
    longer = [replace(one, input_ids=(*one.input_ids, *range(50, 90))) for one in begins]
    deployment.assert_equal(longer, concurrency=1)
    after = deployment.status()["choices"]
    # "queue" is where the server that has the prompt is expected to be slower all the same.
    known = sum(after.get(one, 0) - before.get(one, 0) for one in ("cache", "queue"))
    assert known == len(begins)


def test_servers_are_found_in_a_registry(deployment: Deployment) -> None:
    one = replace(deployment, router=deployment.finding)
    until(lambda: all(is_well(one, role) for role in ("prefill", "decode")))
    listed = one.status()["servers"]
    assert {each["url"] for each in listed["prefill"]} == {
        deployment.telling.url,
        deployment.quiet.url,
    }
    ports = {each["url"]: each["bootstrap_port"] for each in listed["prefill"]}
    assert ports[deployment.quiet.url] == deployment.quiet.bootstrap_port
    assert [each["url"] for each in listed["decode"]] == [deployment.decode.url]
    one.assert_equal(make_requests(8, 300, seed=14))


def is_well(deployment: Deployment, role: str) -> bool:
    servers = deployment.status()["servers"][role]
    count = 2 if role == "prefill" else 1
    return len(servers) == count and all(one["is_well"] for one in servers)


def test_clients_that_leave_leave_no_page_behind(deployment: Deployment) -> None:
    async def leave_early(session: aiohttp.ClientSession) -> None:
        delays = random.Random(8)
        asked = [
            asyncio.create_task(send(session, deployment.router.url, request))
            for request in make_requests(16, 1500, seed=8, new_tokens=32)
        ]
        for task in asked:
            await asyncio.sleep(delays.uniform(0, 0.1))
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    run(leave_early, BOUND_S)
    deployment.assert_equal(make_requests(8, 300, seed=9))
    for server in (deployment.telling, deployment.quiet, deployment.decode):
        assert leaked_pages(server, timeout_s=BOUND_S) == 0
    status = deployment.status()
    assert status["requests"] == 0
    assert status["ended"]["client left"] > 0


def test_requests_of_a_prefill_server_that_is_killed_are_computed_elsewhere(
    deployment: Deployment,
) -> None:
    """The last test: the server stays away."""

    async def meanwhile(session: aiohttp.ClientSession) -> list[Answer]:
        asked = [
            asyncio.create_task(send(session, deployment.router.url, request))
            for request in prompts
        ]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(deployment.quiet.process.kill)
        return list(await asyncio.gather(*asked))

    prompts = make_requests(24, 1500, seed=10)
    got = run(meanwhile, BOUND_S)
    assert [one.error for one in got if one.error] == []
    assert compare(deployment.reference.answers(MODEL, prompts), got) == []
    until(lambda: not deployment.seen(deployment.quiet)["is_well"])
    deployment.assert_equal(make_requests(8, 300, seed=11))
    assert leaked_pages(deployment.decode, timeout_s=BOUND_S) == 0
