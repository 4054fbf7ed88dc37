# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server of vLLM on the CPU answer as one ordinary server does."""

from __future__ import annotations

import json
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import Answer, Request, compare, make_requests
from cpu_serving.vllm_proxy import Proxy, ask_decode, ask_prefill
from cpu_serving.vllm_servers import (
    BLOCK,
    VllmServer,
    ask,
    body_of,
    counters,
    pair_flags,
    reset,
    start_vllm,
)

# Starting a server takes 20 CPU-seconds.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WAIT_S = 120.0
#: Of the decode server; a prompt takes milliseconds.
LOAD_TIMEOUT_S = 20.0
HOLD_TIMEOUT_S = 30.0
REQUESTS = make_requests(4, 600, seed=31)
TOKENS = sum(len(one.input_ids) for one in REQUESTS)
#: Two prompts of one length, so that only their tokens tell them apart.
ONE, OTHER = (
    max(make_requests(2, 300, seed=seed), key=lambda one: len(one.input_ids)) for seed in (41, 42)
)


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.05)


@dataclass
class Servers:
    prefill: VllmServer
    decode: VllmServer
    stats: Path
    #: What an ordinary server has answered.
    expected: Mapping[tuple[int, ...], Answer]

    def counters(self, role: str) -> Counter[str]:
        """Of a rank: rooms by how they ended, and bytes sent."""
        return Counter(counters(self.stats, role))

    def right(self, requests: Sequence[Request], answers: Sequence[Answer]) -> bool:
        return not compare([self.expected[one.input_ids] for one in requests], answers)

    def external(self) -> float:
        """Prompt tokens that the decode server has had from the prefill server."""
        return self.tokens("external_kv_transfer")

    def tokens(self, source: str) -> float:
        return self.decode.metric("vllm:prompt_tokens_by_source_total", f'source="{source}"')

    def is_idle(self) -> bool:
        """No block is in use."""
        both = (self.prefill, self.decode)
        return not any(one.metric("vllm:kv_cache_usage_perc") for one in both)

    def step(self) -> None:
        """A server without requests says nothing of its blocks: each computes one."""
        for one in (self.prefill, self.decode):
            answered(one, [ONE])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Servers]:
    model, stats = make_model("llama"), tmp_path_factory.mktemp("stats")
    settings: dict[str, Any] = {"stats_dir": str(stats), "load_timeout_s": LOAD_TIMEOUT_S}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as path,
        Fleet(tmp_path_factory.mktemp("vllm"), nursery) as fleet,
    ):
        place = Path(path)
        more = {"registry_port": fleet.port(), "hold_timeout_s": HOLD_TIMEOUT_S}
        alone = start_vllm(fleet, "alone", model, place)
        flags = pair_flags("kv_producer", **settings, **more)
        prefill = start_vllm(fleet, "prefill", model, place, flags)
        flags = pair_flags("kv_consumer", **settings)
        decode = start_vllm(fleet, "decode", model, place, flags, core=1)
        wait_ready([alone, prefill, decode])
        requests = [*REQUESTS, ONE, OTHER]
        prompts = [one.input_ids for one in requests]
        expected = dict(zip(prompts, answered(alone, requests), strict=True))
        alone.stop()
        yield Servers(prefill, decode, stats, expected)


@pytest.fixture(autouse=True)
def _empty(servers: Servers) -> None:
    """No server holds a prompt of another test."""
    if servers.prefill.process.alive():
        reset(servers.prefill)
    reset(servers.decode)


def answered(server: VllmServer | Proxy, requests: Sequence[Request]) -> list[Answer]:
    answers = ask(server, requests)
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


def decoded(servers: Servers, request: Request, params: Mapping[str, Any]) -> Answer:
    """The decode server's answer, when it is told this."""
    answer = ask_decode(servers.decode.url, body_of(request), params)
    return Answer(tuple(answer["choices"][0]["token_ids"]), None, 0.0)


def prefilled(servers: Servers, request: Request) -> dict[str, Any]:
    return dict(ask_prefill(servers.prefill.url, body_of(request)))


def test_a_pair_answers_as_one_server_and_computes_each_prompt_once(servers: Servers) -> None:
    computed, came = servers.tokens("local_compute"), servers.external()
    done = servers.counters("decode")["done"]
    with Proxy(servers.prefill.url, servers.decode.url) as proxy:
        answers = answered(proxy, REQUESTS)
    assert servers.right(REQUESTS, answers)

    def prompts() -> float:
        return servers.tokens("local_compute") - computed + servers.external() - came

    until(lambda: prompts() == TOKENS, "vLLM has counted all")
    assert servers.tokens("local_compute") - computed <= len(REQUESTS)  # a last token of each
    done += len(REQUESTS)
    until(lambda: servers.counters("decode")["done"] == done, "all were handed over")
    until(lambda: servers.counters("prefill")["done"] == done, "and the prefill server knows")
    assert servers.counters("prefill")["bytes"] > TOKENS * 100
    assert not servers.counters("decode")["failed"]


def test_blocks_that_the_decode_server_holds_are_not_sent_again(servers: Servers) -> None:
    assert servers.right([ONE], [decoded(servers, ONE, prefilled(servers, ONE))])
    before, held = servers.external(), servers.tokens("local_cache_hit")
    assert servers.right([ONE], [decoded(servers, ONE, prefilled(servers, ONE))])
    whole = (len(ONE.input_ids) - 1) // BLOCK * BLOCK
    until(lambda: servers.tokens("local_cache_hit") - held == whole, "full blocks are found")
    assert servers.external() - before < BLOCK


def test_the_cache_of_another_prompt_would_change_the_tokens(servers: Servers) -> None:
    """The negative control: were the digest not compared, this is what would be noticed."""
    assert len(ONE.input_ids) == len(OTHER.input_ids)
    mine, others = prefilled(servers, ONE), prefilled(servers, OTHER)
    wrong = decoded(servers, ONE, others | {"prompt": mine["prompt"]})
    assert not servers.right([ONE], [wrong])
    wrong = decoded(servers, OTHER, mine | {"prompt": others["prompt"]})
    assert not servers.right([OTHER], [wrong])


def test_another_prompt_is_computed(servers: Servers) -> None:
    before = servers.counters("prefill")["aborted"]
    answer = decoded(servers, ONE, prefilled(servers, OTHER))
    assert servers.right([ONE], [answer])
    assert "has computed another prompt" in servers.decode.process.log_text()
    until(lambda: servers.counters("prefill")["aborted"] > before, "prefill is told to let it go")


def test_another_servers_prompt_is_computed_and_both_values_are_named(servers: Servers) -> None:
    params = prefilled(servers, ONE)
    params["server"] = params["server"] | {"--block-size": "64"}
    assert servers.right([ONE], [decoded(servers, ONE, params)])
    said = "--block-size: the prefill server has 64, this one has 32"
    assert said in servers.decode.process.log_text()


def test_what_a_client_makes_up_is_computed(servers: Servers) -> None:
    answer = decoded(servers, ONE, {"do_remote_prefill": True, "room": "x"})
    assert servers.right([ONE], [answer])


def test_a_prompt_that_does_not_come_in_time_is_computed(servers: Servers) -> None:
    before = servers.counters("decode")["failed"]
    params = prefilled(servers, ONE)
    params["room"] ^= 1  # which the prefill server does not know
    assert servers.right([ONE], [decoded(servers, ONE, params)])
    until(lambda: servers.counters("decode")["failed"] == before + 1, "the room has failed")
    assert "(load_timeout_s)" in servers.decode.process.log_text()


def test_a_client_that_leaves_while_its_prompt_is_awaited_leaves_no_block(
    servers: Servers,
) -> None:
    params = prefilled(servers, ONE)
    params["room"] ^= 1
    before = servers.counters("decode")
    with pytest.raises(TimeoutError):
        _leave(servers.decode.url, body_of(ONE) | {"kv_transfer_params": params}, 5.0)
    until(
        lambda: servers.counters("decode")["aborted"] > before["aborted"],
        "the decode server gives the load up",
    )
    until(lambda: not servers.counters("prefill")["open"], "nobody asks, and prefill lets go")
    servers.step()
    until(servers.is_idle, "all blocks are free on both servers")


def test_a_prefill_server_that_dies_costs_a_computation(servers: Servers) -> None:
    answers: list[Answer] = []
    waits = prefilled(servers, ONE)
    late = prefilled(servers, OTHER)
    unknown = waits | {"room": waits["room"] ^ 1}
    before = servers.counters("decode")["failed"]
    began_s = time.monotonic()
    asking = threading.Thread(target=lambda: answers.append(decoded(servers, ONE, unknown)))
    asking.start()
    until(lambda: servers.counters("decode")["open"], "the load is under way")
    servers.prefill.process.kill()
    asking.join(WAIT_S)
    assert servers.right([ONE], answers)
    assert time.monotonic() - began_s < WAIT_S
    assert servers.right([OTHER], [decoded(servers, OTHER, late)])
    until(lambda: servers.counters("decode")["failed"] == before + 2, "both have failed")
    log = servers.decode.process.log_text()
    assert "its prompt did not come: lost the connection to prefill rank" in log


def _leave(url: str, body: Mapping[str, Any], after_s: float) -> None:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    urllib.request.urlopen(request, timeout=after_s)
