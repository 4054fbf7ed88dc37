# SPDX-License-Identifier: Apache-2.0
"""A prefill server of vLLM on the CPU with two TP ranks, and decode servers with one and with two,
answer as one ordinary server does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import Answer, compare, make_requests
from cpu_serving.vllm_proxy import Proxy
from cpu_serving.vllm_servers import (
    VllmServer,
    ask,
    counters,
    handed_over,
    pair_flags,
    start_vllm,
)

# A server with two ranks has four processes.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS = make_requests(4, 600, seed=37)
TOKENS = sum(len(one.input_ids) for one in REQUESTS)
PREFILL_TP = 2


@dataclass
class Servers:
    prefill: VllmServer
    #: By their TP ranks.
    decodes: dict[int, VllmServer]
    stats: Path
    #: What an ordinary server has answered.
    expected: list[Answer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model, stats = make_model("llama"), tmp_path_factory.mktemp("stats")
    with (
        tempfile.TemporaryDirectory(prefix="kv") as path,
        Fleet(tmp_path_factory.mktemp("vllm")) as fleet,
    ):
        place = Path(path)
        alone = start_vllm(fleet, "alone", model, place)
        flags = pair_flags("kv_producer", registry_port=fleet.port(), stats_dir=str(stats))
        prefill = start_vllm(fleet, "prefill", model, place, flags, tp=PREFILL_TP)
        flags = pair_flags("kv_consumer")
        decodes = {
            tp: start_vllm(fleet, f"decode-{tp}", model, place, flags, core=1, tp=tp)
            for tp in (1, 2)
        }
        wait_ready([alone, prefill, *decodes.values()])
        expected = ask(alone, REQUESTS)
        alone.stop()
        yield Servers(prefill, decodes, stats, expected)


@pytest.mark.parametrize("tp", [1, 2])
def test_servers_with_other_numbers_of_ranks_answer_as_one_server(
    servers: Servers, tp: int
) -> None:
    decode, before = servers.decodes[tp], counters(servers.stats, "prefill")
    with Proxy(servers.prefill.url, decode.url) as proxy:
        answers = ask(proxy, REQUESTS)
    assert not compare(servers.expected, answers)
    label = 'source="external_kv_transfer"'
    came = decode.metric("vllm:prompt_tokens_by_source_total", label)
    assert TOKENS - came <= len(REQUESTS), "a last token of each is computed on decode"
    rooms = before.get("done", 0) + len(REQUESTS) * PREFILL_TP
    assert handed_over(servers.stats, rooms) > before.get("bytes", 0)
