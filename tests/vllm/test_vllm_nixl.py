# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connector of NIXL, unmodified, over te: a prefill and a decode server on the CPU."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.ports import HOST
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.severed import sever
from cpu_serving.traffic import Answer, Request, compare, make_requests
from cpu_serving.vllm_proxy import Proxy, ask_decode, ask_prefill
from cpu_serving.vllm_servers import (
    VllmServer,
    ask,
    body_of,
    nixl_flags,
    reset,
    start_vllm,
)

from sglang_mooncake.sglang.running import environment_for

# Starting a server takes 20 CPU-seconds.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STALL_S = 3.0
#: In which a request is answered whose prompt does not come: until te gives up, to connect again,
#: and to compute the prompt; by a machine that others use, too.
ANSWERED_S = 60.0
REQUESTS = make_requests(4, 600, seed=31)
ONE = max(make_requests(2, 300, seed=41), key=lambda one: len(one.input_ids))


@dataclass
class Servers:
    prefill: VllmServer
    decode: VllmServer
    logs: Path
    expected: Mapping[tuple[int, ...], Answer]

    def right(self, requests: Sequence[Request], answers: Sequence[Answer]) -> bool:
        return not compare([self.expected[one.input_ids] for one in requests], answers)

    def came(self) -> float:
        """Prompt tokens that the decode server has had from the prefill server."""
        return self.decode.metric(
            "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'
        )


def environment(fleet: Fleet) -> dict[str, str]:
    """As `sglang-mooncake run` makes it; over TCP, whose connections can be severed."""
    return {
        **environment_for({}),
        "SGLANG_MOONCAKE_TRANSPORTS": "tcp",
        "SGLANG_MOONCAKE_STALL_TIMEOUT_S": f"{STALL_S:g}",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(fleet.port()),
    }


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model, logs = make_model("llama"), tmp_path_factory.mktemp("vllm")
    with tempfile.TemporaryDirectory(prefix="kv") as path, Fleet(logs) as fleet:
        place = Path(path)
        alone = start_vllm(fleet, "alone", model, place)
        prefill, decode = (
            start_vllm(
                fleet, name, model, place, nixl_flags(role), core, more_env=environment(fleet)
            )
            for core, (name, role) in enumerate(
                [("prefill", "kv_producer"), ("decode", "kv_consumer")]
            )
        )
        wait_ready([alone, prefill, decode])
        requests = [*REQUESTS, ONE]
        expected = dict(
            zip([one.input_ids for one in requests], answered(alone, requests), strict=True)
        )
        alone.stop()
        yield Servers(prefill, decode, logs, expected)


@pytest.fixture(autouse=True)
def _empty(servers: Servers) -> None:
    reset(servers.prefill)
    reset(servers.decode)


def answered(server: VllmServer | Proxy, requests: Sequence[Request]) -> list[Answer]:
    answers = ask(server, requests)
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


def test_a_pair_answers_as_one_server(servers: Servers) -> None:
    before = servers.came()
    with Proxy(servers.prefill.url, servers.decode.url) as proxy:
        answers = answered(proxy, REQUESTS)
    assert servers.right(REQUESTS, answers)
    assert servers.came() > before
    for name in ("prefill", "decode"):
        log = (servers.logs / f"{name}.log").read_text()
        assert "mooncake.engine and nixl are te, and mooncake.store is kvstore" in log


def test_blocks_of_the_prefill_server_are_free_once_they_were_read(servers: Servers) -> None:
    """It hears of that by a note, long before its lease of 30 s runs out."""
    with Proxy(servers.prefill.url, servers.decode.url) as proxy:
        began_s = time.monotonic()
        answered(proxy, [ONE])
    while servers.prefill.metric("vllm:kv_cache_usage_perc"):
        answered(servers.prefill, [ONE])  # A server without requests says nothing of its blocks.
        assert time.monotonic() < began_s + 20.0
        time.sleep(0.1)


def test_severed_connections_are_made_again(servers: Servers) -> None:
    """By themselves, each time; with NVIDIA's NIXL every later read fails."""
    with Proxy(servers.prefill.url, servers.decode.url) as proxy:
        answered(proxy, [ONE])
        for _ in range(3):
            assert sever(servers.decode.process.pid, servers.prefill.process.pid)
            for _ in range(4):
                reset(servers.decode)
                before = servers.came()
                assert servers.right([ONE], answered(proxy, [ONE]))
                assert servers.came() > before


def test_a_prefill_server_that_stands_still_costs_a_computation(servers: Servers) -> None:
    """Where NVIDIA's NIXL waits for as long as it does."""
    params = ask_prefill(servers.prefill.url, body_of(ONE))
    pid = servers.prefill.process.pid
    group = os.getpgid(pid)
    os.killpg(group, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        answer = ask_decode(servers.decode.url, body_of(ONE), params)
        took_s = time.monotonic() - began_s
    finally:
        os.killpg(group, signal.SIGCONT)
    tokens = tuple(answer["choices"][0]["token_ids"])
    assert servers.right([ONE], [Answer(tokens, None, 0.0)])
    assert took_s < ANSWERED_S
    reset(servers.decode)
    before = servers.came()
    deadline_s = time.monotonic() + ANSWERED_S
    while servers.came() == before:  # And prompts come again, by themselves.
        assert time.monotonic() < deadline_s
        with Proxy(servers.prefill.url, servers.decode.url) as proxy:
            assert servers.right([ONE], answered(proxy, [ONE]))
        reset(servers.decode)
